"""A feed of turns that is known beforehand: each ended turn may be followed by another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from retrain.backends.rows import LiveTurn, Taken
from retrain.base.rollouts import FirstTurn, NextTurn, Rollout


class Script:
    """Turns to begin with, and what follows; notes the order in which they are answered."""

    def __init__(
        self,
        turns: Mapping[int, FirstTurn],
        follow: Callable[[int, Rollout], NextTurn | None] = lambda *_: None,
    ) -> None:
        """`turns` by stream; the turn that follows has the next one."""
        self._due: list[LiveTurn] = [LiveTurn(turn, stream) for stream, turn in turns.items()]
        self._follow = follow
        self.answers: list[tuple[int, Taken]] = []
        self.under_way: list[int] = []

    def take(self, under_way: int) -> Sequence[LiveTurn]:
        self.under_way.append(under_way)
        due, self._due = self._due, []
        return due

    def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
        for asked, rollout in taken:
            self.answers.append((asked.stream, rollout))
            further = self._follow(asked.stream, rollout) if isinstance(rollout, Rollout) else None
            if further is not None:
                self._due.append(LiveTurn(further, asked.stream + 1))

    @property
    def rollouts(self) -> dict[int, Rollout]:
        return {stream: one for stream, one in self.answers if isinstance(one, Rollout)}
