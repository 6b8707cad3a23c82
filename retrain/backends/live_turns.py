"""Turns that are sampled while others are: each is answered when it ends, and others join meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from retrain.backends import Backend, Sampling
from retrain.backends.rows import Row
from retrain.backends.text import Vocabulary, check_finite, extended
from retrain.engines import Drawn, Ids
from retrain.errors import PromptError
from retrain.rollouts import FirstTurn, NextTurn, Prompt, Rollout

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


def live_sampler(backend: Backend) -> Callable[[TurnFeed, Sampling], object] | None:
    """Return the `sample_turns` of a backend that samples in this process, None if it has none."""
    takes_several = backend.info.remote or backend.info.overlaps  # its calls overlap, which is as good
    found: Callable[[TurnFeed, Sampling], object] | None = getattr(backend, "sample_turns", None)
    return None if takes_several else found


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A turn that has room."""

    rollout: Rollout  # so far, with what was said since
    ids: Ids  # all tokens before the turn
    limit: int  # most tokens


def unsampled(prompt: Prompt, version: int) -> Rollout:
    """Return the rollout of a prompt before its first token."""
    return Rollout(prompt, policy_version=version, mean_entropy=0.0)


def with_turns(
    vocabulary: Vocabulary, begun: Sequence[Begun | None], drawn: Sequence[Drawn]
) -> list[Rollout | None]:
    """Return rollouts with what was drawn for those turns that have room, None for the others."""
    check_finite(drawn)
    new = iter(drawn)
    return [
        None if one is None else extended(vocabulary, one.rollout, next(new).cut(one.limit)) for one in begun
    ]


class LiveRows:
    """The turns of a feed as rows of a backend."""

    def __init__(
        self,
        feed: TurnFeed,
        vocabulary: Vocabulary,
        begin: Callable[[FirstTurn | NextTurn], Begun | None],
    ) -> None:
        """Prepare; `begin` returns None without room for a turn; its PromptError answers the turn."""
        self._feed, self._vocabulary, self._begin = feed, vocabulary, begin
        self._asked: dict[Row, tuple[LiveTurn, Begun]] = {}

    def take(self, under_way: int) -> list[Row]:
        """Return rows to begin; with none under way, none are the end."""
        rows: list[Row] = []
        while asked := self._feed.take(under_way):
            begun = [(one, self._read(one.turn)) for one in asked]
            if unread := [(one, found) for one, found in begun if not isinstance(found, Begun)]:
                self._feed.answer(unread)
            for one, found in begun:
                if isinstance(found, Begun):
                    rows.append(Row(found.ids, found.limit, one.stream))
                    self._asked[rows[-1]] = one, found
            if rows or under_way:
                break
        return rows

    def end(self, rows: Sequence[Row]) -> None:
        """Answer with rows that are done."""
        asked, begun = zip(*map(self._asked.pop, rows), strict=True)
        rollouts = with_turns(self._vocabulary, begun, [row.drawn() for row in rows])
        self._feed.answer([*zip(asked, rollouts, strict=True)])

    def _read(self, turn: FirstTurn | NextTurn) -> Begun | PromptError | None:
        try:
            return self._begin(turn)
        except PromptError as error:
            return error
