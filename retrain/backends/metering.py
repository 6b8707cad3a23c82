"""What a run costs: the tokens that an API bills, call by call, and the operations of sampling and training.

Operations are those that the model's mathematics requires, as in model FLOPs utilisation (MFU): no padding,
no recomputed activations, no attention scores. Lengths are the actual ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, TypeAlias

from retrain.records.spending import Tokens

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


NOTHING = Tokens()


@dataclass
class BilledCall:
    """A call under way; whoever makes it sets `billed` once that is known, `NOTHING` if it was refused."""

    billed: Tokens | None = None


@dataclass
class Tally:
    """What calls for one purpose were billed."""

    tokens: Tokens = NOTHING

    def by_kind(self) -> dict[str, int]:
        """Return the tokens of each kind that there are any of."""
        return {kind: count for kind, count in asdict(self.tokens).items() if count}


TALLY: ContextVar[Tally | None] = ContextVar("TALLY", default=None)


@contextmanager
def tally() -> Iterator[Tally]:
    """Add up, beside the meter, what the calls of this context are billed; calls of others do not count."""
    total = Tally()
    before = TALLY.set(total)
    try:
        yield total
    finally:
        TALLY.reset(before)


class Meter:
    """Counts of one attempt; from any thread."""

    def __init__(
        self, changed: Callable[[Meter], None] = lambda _: None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Start at 0; `check` raises before a call that is not to be made, `changed` is called around one."""
        self._changed, self._check = changed, check
        self._lock = threading.Lock()
        self.tokens = self.unsure = self.open = NOTHING

    @contextmanager
    def call(self, at_most: Tokens) -> Iterator[BilledCall]:
        """Count a call that is billed `at_most` so much; so much if nobody learns how much it was."""
        self._check()
        billed_call = BilledCall()
        self._count(open=at_most)
        try:
            yield billed_call
        finally:
            unsure = at_most if billed_call.billed is None else NOTHING
            self._count(open=NOTHING - at_most, tokens=billed_call.billed or NOTHING, unsure=unsure)

    def doubt(self, at_most: Tokens) -> None:
        """Count tokens that may have been billed beside those of a call."""
        self._count(open=NOTHING, unsure=at_most)

    def _count(self, *, open: Tokens, tokens: Tokens = NOTHING, unsure: Tokens = NOTHING) -> None:
        apart = TALLY.get()
        with self._lock:
            if apart is not None:
                apart.tokens += tokens
            self.open, self.tokens, self.unsure = self.open + open, self.tokens + tokens, self.unsure + unsure
            self._changed(self)


Ints: TypeAlias = "NDArray[np.int64]"
FORWARD_FLOPS = 2  # per parameter and token: a multiplication and an addition
TRAIN_FLOPS = 6  # forward, gradient of activations, gradient of weights
LORA_TRAIN_FLOPS = 4  # frozen weights need no weight gradient
OPTIMIZER_PASSES = 7  # Adam reads weight, gradient and two moments, and writes weight and moments


@dataclass(frozen=True, slots=True)
class Work:
    """Cost of one phase of a step: the work that the model's mathematics requires, and the time it took.

    Attributes:
        tokens: tokens that the model processed, without padding.
        flops: 2 per weight and token forward, 6 in training; without attention's quadratic part.
        bytes_moved: the weights once per pass, and every cached token each time it is read.
    """

    tokens: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0
    time_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """Cost of sampling: prefill (once per distinct prompt), then decoding."""

    prefill: Work
    decode: Work


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A policy's size, as the cost of each phase needs it.

    Attributes:
        body: weights that every token is multiplied by.
        head: weights of the output projection, from hidden state to logits.
        weight_bytes: size of one weight, on average.
        kv_bytes_per_token: keys and values of one token, all layers; 0 without a cache.
        frozen: only adapters are trained, so most weights need no gradient.
        trained_bytes: size of the trained weights, as the optimizer stores them.
        idle: weights of experts that a token is not routed to; a batch still reads all of them per pass.
    """

    body: int
    head: int
    weight_bytes: float
    kv_bytes_per_token: float = 0.0
    frozen: bool = False
    trained_bytes: int = 0
    idle: int = 0

    def prefill(self, lengths: Sequence[int], passes: int, time_s: float) -> Work:
        """Return the work of running distinct prompts; the logits of the last states count as decoding.

        `passes` over the weights: 1 if all positions run together, else one per position.
        """
        tokens = sum(lengths)
        moved = self._body_bytes * passes + self.kv_bytes_per_token * tokens
        return Work(tokens, FORWARD_FLOPS * self.body * tokens, moved, time_s)

    def decode(self, prompts: Ints | int, lengths: Ints, time_s: float, passes: int | None = None) -> Work:
        """Return the work of decoding completions, by default all concurrently.

        The first token of a completion costs only its logits, and the last one is not fed back. Token k
        reads the cache of the prompt and of the k - 1 tokens before it. `prompts` and `lengths` are each
        completion's tokens before and after; `passes` is the number of forward passes of the head.
        """
        tokens = int(lengths.sum())
        passes = int(lengths.max(initial=0)) if passes is None else passes
        run = tokens - len(lengths)
        cached = float(((lengths - 1) * (prompts + lengths / 2)).sum()) if self.kv_bytes_per_token else 0.0
        flops = FORWARD_FLOPS * (self.body * run + self.head * tokens)
        moved = self._body_bytes * max(passes - 1, 0) + self.kv_bytes_per_token * cached
        return Work(tokens, flops, moved + self._head_bytes * passes, time_s)

    def train(self, tokens: int, drawn: int, passes: int, parts: int = 1, *, reference: bool = False) -> Work:
        """Return the work (without time) of training on `tokens`, `drawn` of which have logits.

        Args:
            passes: over the body's weights in each direction.
            parts: micro-batches; each runs the head once.
            reference: also run the policy before training, forward only.
        """
        each, directions = LORA_TRAIN_FLOPS if self.frozen else TRAIN_FLOPS, 2
        if reference:
            each, directions = each + FORWARD_FLOPS, directions + 1
        flops = each * (self.body * tokens + self.head * drawn)
        return Work(tokens, flops, directions * (self._body_bytes * passes + self._head_bytes * parts))

    def optimize(self) -> Work:
        """Return the work of one optimizer step, without its few operations per weight."""
        return Work(bytes_moved=float(OPTIMIZER_PASSES * self.trained_bytes))

    @property
    def _body_bytes(self) -> float:
        return float((self.body + self.idle) * self.weight_bytes)

    @property
    def _head_bytes(self) -> float:
        return float(self.head * self.weight_bytes)


class WorkMeter:
    """Accumulates the cost of sampling, from any thread, until `take` is called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = SamplingWork(Work(), Work())

    def add(self, prefill: Work, decode: Work) -> None:
        with self._lock:
            self._sum = SamplingWork(self._sum.prefill + prefill, self._sum.decode + decode)

    def take(self) -> SamplingWork:
        with self._lock:
            taken, self._sum = self._sum, SamplingWork(Work(), Work())
        return taken
