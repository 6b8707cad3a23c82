"""What sampling and training a policy cost, from its size and the lengths of its sequences.

Counts what the mathematics asks for, as model FLOPs utilisation does: no padding, no recomputed
activations, no attention scores. The lengths are those that actually ran.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.backends import SamplingWork, Work
from retrain.controllers.roofline import decode_bytes, token_flops

Ints = NDArray[np.int64]

NOTHING = SamplingWork(Work(), Work())
OPTIMIZER_PASSES = 7  # Adam reads weight, gradient and two moments, and writes all but the gradient


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A policy's size, as its phases need it.

    Attributes:
        body: weights that every token is multiplied with.
        head: weights that turn a token's state into logits.
        weight_bytes: size of one of them.
        kv_bytes_per_token: keys and values of one token, all layers; 0 without a cache.
        frozen: whether only adapters are trained, so that most weights need no gradient.
        trained_bytes: size of the weights that are trained, as the optimizer keeps them.
        idle: weights of experts that a token is not sent to; a batch needs them all in each pass.
    """

    body: int
    head: int
    weight_bytes: int
    kv_bytes_per_token: float = 0.0
    frozen: bool = False
    trained_bytes: int = 0
    idle: int = 0

    def prefill(self, lengths: Sequence[int], passes: int, time_s: float) -> Work:
        """Return the work of running prompts; the logits of their last states count as decoding.

        Args:
            lengths: of every distinct prompt.
            passes: over the weights: 1 when all positions run together, else one per position.
            time_s: seconds that it took.
        """
        tokens = sum(lengths)
        moved = decode_bytes(self._body_bytes, passes, self.kv_bytes_per_token, tokens)
        return Work(tokens, token_flops(self.body, tokens, "prefill"), moved, time_s)

    def decode(self, prompts: Ints | int, lengths: Ints, time_s: float) -> Work:
        """Return the work of drawing completions, all of them concurrently.

        A completion's first token costs logits alone, and its last is never run. Token k of a
        completion reads the cache of the prompt and of the k - 1 tokens before it.

        Args:
            prompts: length of each completion's prompt, shape (completions,) or one for all.
            lengths: of the completions, in tokens, shape (completions,).
            time_s: seconds that it took.
        """
        tokens, longest = int(lengths.sum()), int(lengths.max(initial=0))
        run = tokens - len(lengths)
        cached = float(((lengths - 1) * (prompts + lengths / 2)).sum()) if self.kv_bytes_per_token else 0.0
        flops = token_flops(self.body, run, "decode") + token_flops(self.head, tokens, "decode")
        moved = decode_bytes(self._body_bytes, max(longest - 1, 0), self.kv_bytes_per_token, cached)
        return Work(tokens, flops, moved + self._head_bytes * longest, time_s)

    def train(self, tokens: int, drawn: int, passes: int, parts: int = 1, *, reference: bool = False) -> Work:
        """Return the work (without time) of training on `tokens`, of which `drawn` have logits.

        Args:
            tokens: prompts and completions.
            drawn: tokens of completions.
            passes: over the body's weights in each direction.
            parts: micro-batches, each of which runs the head at once.
            reference: the policy before training runs beside this one, forward only.
        """
        flops = token_flops(self.body, tokens, "train", lora=self.frozen)
        flops += token_flops(self.head, drawn, "train", lora=self.frozen)
        directions = 2
        if reference:
            flops += token_flops(self.body, tokens, "prefill") + token_flops(self.head, drawn, "prefill")
            directions += 1
        return Work(tokens, flops, directions * (self._body_bytes * passes + self._head_bytes * parts))

    def optimize(self) -> Work:
        """Return the work of one optimizer step; its few operations per weight are left out."""
        return Work(bytes_moved=float(OPTIMIZER_PASSES * self.trained_bytes))

    @property
    def _body_bytes(self) -> float:
        return float((self.body + self.idle) * self.weight_bytes)

    @property
    def _head_bytes(self) -> float:
        return float(self.head * self.weight_bytes)


class WorkMeter:
    """Adds up what sampling cost, from any thread, until it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = NOTHING

    def add(self, prefill: Work, decode: Work) -> None:
        """Count one call."""
        with self._lock:
            self._sum = SamplingWork(self._sum.prefill + prefill, self._sum.decode + decode)

    def take(self) -> SamplingWork:
        """Return the sum since the last call, and start over."""
        with self._lock:
            taken, self._sum = self._sum, NOTHING
        return taken
