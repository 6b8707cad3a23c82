"""Completions in progress, where they come from, and the random numbers that each is drawn with.

Turns may be sampled while others are: each is answered when it ends, and others join meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrain.backends.engines import Drawn, Ids
from retrain.backends.progress import SamplingProgress
from retrain.backends.text import Vocabulary, check_finite, extended
from retrain.base.errors import PromptError
from retrain.base.rollouts import FirstTurn, NextTurn, Prompt, Rollout

# Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: SplitMix64
GAMMA, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
FRACTION_BITS = 53


@dataclass(slots=True, eq=False)
class Row:
    """One completion: its prompt, and the tokens so far."""

    prompt: Ids
    limit: int  # maximum tokens
    stream: int = 0  # names its random numbers, so that they do not depend on the rows beside it
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    has_ended: bool = False  # with an end token or a stop string

    @property
    def ids(self) -> Ids:
        return (*self.prompt, *self.tokens)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def is_done(self) -> bool:
        return self.has_ended or len(self.tokens) >= self.limit

    def append(self, token: int, logprob: float, entropy: float, ends: Collection[int]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.entropies.append(entropy)
        self.has_ended = token in ends

    def drawn(self) -> Drawn:
        entropy = sum(self.entropies) / len(self.entropies) if self.entropies else float("nan")
        return Drawn(tuple(self.tokens), np.array(self.logprobs), entropy, self.has_ended)


def uniforms(rows: Sequence[Row], count: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) for the next `count` tokens of each row: (count, rows)."""
    streams = np.array([row.stream for row in rows], dtype=np.uint64)
    drawn = np.array([len(row.tokens) for row in rows], dtype=np.uint64)
    steps = drawn + np.arange(1, count + 1, dtype=np.uint64)[:, None]
    mixed = streams + steps * GAMMA
    mixed = (mixed ^ (mixed >> np.uint64(30))) * FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * SECOND
    mixed ^= mixed >> np.uint64(31)
    fractions: NDArray[np.float64] = (mixed >> np.uint64(64 - FRACTION_BITS)) * 2.0**-FRACTION_BITS
    return fractions


class GivenRows:
    """Rows that are known beforehand, without those that are done."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row for row in rows if not row.is_done]

    def take(self, under_way: int) -> Sequence[Row]:
        rows, self._rows = self._rows, []
        return rows

    def end(self, rows: Sequence[Row]) -> None:
        """Do nothing: whoever gave them has them."""


class RowAdmission:
    """Whether rows that wait join those that run: each time costs a pass, in which these stand still.

    They wait until they have lost as many tokens as that costs, which is at most twice what the best choice
    of times would lose (ski rental: Karlin et al., "Competitive snoopy caching", Algorithmica 1988).
    """

    def __init__(self) -> None:
        self._lost = 0

    def is_due(self, waiting: int, running: int, tokens: int = 1) -> bool:
        """Return whether so many rows are to join, before the next `tokens` of each that runs."""
        if self._lost < running:
            self._lost += waiting * tokens
            return False
        self._lost = 0
        return True


class Drawing(Protocol):
    """A completion in progress."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def is_done(self) -> bool: ...


Tell = Callable[[Sequence[Drawing]], None]


class CallsProgress:
    """Sums up the calls that are in progress, which may be in several threads."""

    def __init__(self, observe: Callable[[SamplingProgress], None], every_s: float = 0.5) -> None:
        self._observe, self._every_s = observe, every_s
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[float, Sequence[Drawing]]] = {}  # when each began, and its rows
        self._told_s = time.monotonic()

    def is_busy(self) -> bool:
        """Whether a call has begun and not ended."""
        return bool(self._calls)

    @contextmanager
    def call(self) -> Iterator[Tell]:
        """Return what tells the rows of a call, as often as it likes, until the call ends."""
        call, began_s = object(), time.monotonic()
        with self._lock:
            self._calls[call] = (began_s, ())

        def tell(rows: Sequence[Drawing]) -> None:
            now_s = time.monotonic()
            with self._lock:
                self._calls[call] = (began_s, rows)
                if now_s - self._told_s < self._every_s:
                    return
                self._told_s = now_s
                drawings = [drawing for _, rows in self._calls.values() for drawing in rows]
                lengths, finished = [len(d.tokens) for d in drawings], sum(d.is_done for d in drawings)
                time_s = now_s - min(began_s for began_s, _ in self._calls.values())
                self._observe(SamplingProgress(len(lengths), finished, sum(lengths), max(lengths), time_s))

        try:
            yield tell
        finally:
            with self._lock:
                self._calls.pop(call, None)


Taken: TypeAlias = Rollout | PromptError | None  # a turn as it was sampled; None: no room in the context


@dataclass(frozen=True, slots=True, eq=False)
class LiveTurn:
    """A turn to be sampled."""

    turn: FirstTurn | NextTurn
    stream: int  # from 0, below 2**63: names its random numbers, whichever turns are sampled beside it


class TurnFeed(Protocol):
    """Where a backend finds turns, and leaves them."""

    def take(self, under_way: int) -> Sequence[LiveTurn]:
        """Return turns to begin, of those that are asked for; called between tokens.

        Args:
            under_way: turns that were taken and not answered. With 0 it waits; none then are the end.

        Raises:
            InterruptedRunError: the run is to stop.
        """

    def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
        """Answer turns, each once; the sampled tokens follow those of its rollout."""


@dataclass(frozen=True, slots=True, eq=False)
class AdmittedTurn:
    """A turn that has room."""

    rollout: Rollout  # so far, with what was said since
    ids: Ids  # all tokens before the turn
    limit: int  # most tokens


def unsampled(prompt: Prompt, version: int) -> Rollout:
    """Return the rollout of a prompt before its first token."""
    return Rollout(prompt, policy_version=version, mean_entropy=0.0)


def with_turns(
    vocabulary: Vocabulary, begun: Sequence[AdmittedTurn | None], drawn: Sequence[Drawn]
) -> list[Rollout | None]:
    """Return rollouts with what was drawn for those turns that have room, None for the others."""
    check_finite(drawn)
    new = iter(drawn)
    return [
        None if turn is None else extended(vocabulary, turn.rollout, next(new).cut(turn.limit))
        for turn in begun
    ]


@dataclass(slots=True, eq=False)
class LiveRows:
    """The turns of a feed as rows of a backend."""

    feed: TurnFeed
    vocabulary: Vocabulary
    # returns None without room for a turn; its PromptError answers the turn
    begin: Callable[[FirstTurn | NextTurn], AdmittedTurn | None]
    asked: dict[Row, tuple[LiveTurn, AdmittedTurn]] = field(default_factory=dict)

    def take(self, under_way: int) -> list[Row]:
        """Return rows to begin; with none under way, none are the end."""
        rows: list[Row] = []
        while turns := self.feed.take(under_way):
            unread: list[tuple[LiveTurn, Taken]] = []
            for live in turns:
                try:
                    admitted = self.begin(live.turn)
                except PromptError as error:
                    unread.append((live, error))
                    continue
                if admitted is None:
                    unread.append((live, None))
                    continue
                rows.append(Row(admitted.ids, admitted.limit, live.stream))
                self.asked[rows[-1]] = live, admitted
            if unread:
                self.feed.answer(unread)
            if rows or under_way:
                break
        return rows

    def end(self, rows: Sequence[Row]) -> None:
        """Answer with rows that are done."""
        turns, begun = zip(*map(self.asked.pop, rows), strict=True)
        rollouts = with_turns(self.vocabulary, begun, [row.drawn() for row in rows])
        self.feed.answer([*zip(turns, rollouts, strict=True)])


RowSource: TypeAlias = GivenRows | LiveRows  # where rows come from, also while others run
