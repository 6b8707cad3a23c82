"""The protocol's protobuf messages to and from plain arrays."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import zstandard
from numpy.typing import NDArray


def _messages() -> ModuleType:
    """Return the SDK's messages without the SDK, whose import would cost each server seconds."""
    (package,) = importlib.util.find_spec("tinker").submodule_search_locations
    file = Path(package) / "proto" / "tinker_public_pb2.py"
    spec = importlib.util.spec_from_file_location("tinker_public_pb2", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pb = _messages()
DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}


@dataclass(frozen=True)
class Datum:
    tokens: list[int]
    inputs: Mapping[str, NDArray]


@dataclass(frozen=True)
class ForwardBackward:
    model_id: str
    seq: int
    loss: str
    config: Mapping[str, float]
    data: list[Datum]
    forward_only: bool = False


def read_forward_backward(body: bytes, encoding: str) -> ForwardBackward:
    message = pb.ForwardBackwardRequest()
    message.ParseFromString(zstandard.ZstdDecompressor().decompress(body) if encoding == "zstd" else body)
    return ForwardBackward(
        message.model_id,
        message.seq_id,
        message.loss_fn,
        dict(message.loss_fn_config),
        [_datum(datum) for datum in message.data],
        message.forward_only,
    )


def write_forward_backward(logprobs: Sequence[NDArray], metrics: Mapping[str, float]) -> bytes:
    """Return one record whose only field is the log-probabilities, datum after datum."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(num_datums=len(logprobs))
    field = record.fields["logprobs"]
    field.dtype = pb.DTYPE_FLOAT32
    field.data = np.concatenate(logprobs).astype(np.float32).tobytes()
    ends = np.cumsum([0, *(4 * len(values) for values in logprobs)])
    field.offsets = ends.astype(np.int64).tobytes()
    return message.SerializeToString()


def write_samples(
    samples: Sequence[tuple[Sequence[int], NDArray, bool]], prompt_logprobs: Sequence[float] = ()
) -> bytes:
    """Return sequences of tokens, log-probabilities, and whether each came to an end."""
    message = pb.SampleResponse(prompt_logprobs=np.array(prompt_logprobs, np.float32).tobytes())
    for tokens, logprobs, ended in samples:
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if ended else pb.STOP_REASON_LENGTH,
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=np.asarray(logprobs, np.float32).tobytes(),
        )
    return message.SerializeToString()


def _datum(message: pb.Datum) -> Datum:
    tokens = [
        token for chunk in message.model_input for token in np.frombuffer(chunk.encoded_text.tokens, np.int32)
    ]
    inputs = {
        name: np.frombuffer(tensor.dense, DTYPES[tensor.dtype])
        for name, tensor in message.loss_fn_inputs.items()
    }
    return Datum([int(token) for token in tokens], inputs)
