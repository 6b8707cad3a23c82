"""Replaces groups that teach nothing by further ones, until a step's batch is as informative as asked."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import count
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrain.base.rollouts import Floats, Group
from retrain.config.schema import DataSection
from retrain.records.step_row import RefillSummary, StepRow
from retrain.trainer.batch import ScoredBatch, differ, joined
from retrain.trainer.episodes import summary_of
from retrain.trainer.part import Loop, Part, TakenStep
from retrain.trainer.step_meter import StepMeter

log = logging.getLogger(__name__)
Score = Callable[..., ScoredBatch]  # of groups and the number of complete steps; see `Scorer.score`
Shares: TypeAlias = Mapping[str, int] | None  # prompts of each source; None: their weights decide


class InTurn:
    """Samples what was begun when it is asked for, all at once."""

    def __init__(self, sample: Callable[[int, Shares], list[Group]]) -> None:
        self._sample = sample
        self._begun: tuple[int, Shares] = 0, None
        self._numbers = count()

    def start(self, size: int, shares: Shares = None) -> None:
        """Begin so many further groups, if it is given so many of each source."""
        self._begun = size, shares

    def finished(self) -> list[tuple[int, Group]]:
        """Wait for some of the groups that were begun; return each with its number in that order."""
        return [(next(self._numbers), group) for group in self._sample(*self._begun)]


class AtOnce:
    """Samples each group in a thread of its own, so that further ones start while slow ones finish."""

    def __init__(self, begin: Callable[[int, Shares], list[Callable[[], Group]]], threads: int) -> None:
        """`begin` draws prompts, and returns what samples each of them."""
        self._begin, self._pool = begin, ThreadPoolExecutor(threads, "refill")
        self._numbers = count()
        self._under_way: dict[Future[Group], int] = {}

    def start(self, size: int, shares: Shares = None) -> None:
        for sample in self._begin(size, shares):
            self._under_way[self._pool.submit(sample)] = next(self._numbers)

    def finished(self) -> list[tuple[int, Group]]:
        done, _ = wait(self._under_way, return_when=FIRST_COMPLETED)
        return [(self._under_way.pop(future), future.result()) for future in done]

    def close(self) -> None:
        """Wait for what is under way; what has not begun is dropped."""
        self._pool.shutdown(cancel_futures=True)


class Refill(Part):
    """Scores the groups of a step as they come, and has further ones sampled for those that teach nothing.

    A batch that stays short is filled up with the first groups that teach nothing, so that few informative
    ones weigh as much as without a refill.

    Source: dynamic sampling of DAPO, arXiv:2503.14476.
    """

    def __init__(
        self, table: DataSection, score: Score, meter: StepMeter, signal_parts: Collection[str] = ()
    ) -> None:
        """`signal_parts` are those of the reward that give advantages on their own."""
        self._mode, self.most = table.refill, table.most_refill  # further batches of a step
        self._scorer, self._meter, self._signal_parts = score, meter, signal_parts
        self._batch: ScoredBatch | None = None  # of the step that is being taken
        self._first = self._kept = 0  # groups asked for at first, and of the further ones those kept
        self._was_told = False

    def fill(
        self, sampling: InTurn | AtOnce, size: int, step: int, *, by_source: bool = False
    ) -> list[Group]:
        """Return the `size` groups to train on, of which as many teach as further sampling could find.

        Each group that teaches nothing has another one begun at once; none is sampled beyond the need.

        Args:
            step: complete steps.
            by_source: return as many groups of each source as were sampled at first.
        """
        self._batch, self._first, self._kept = None, size, 0
        sampling.start(size)
        if self._mode == "none":
            with self._meter.part("sample"):
                return [group for _, group in sampling.finished()]
        under_way, left = size, self.most * size
        numbers: list[int] = []
        batches: list[ScoredBatch] = []
        while under_way:
            with self._meter.part("sample"):
                finished = sampling.finished()
            groups = [group for _, group in finished]
            numbers += [number for number, _ in finished]
            with self._meter.part("reward"):
                batches.append(self._score(groups, step, is_part=True))
            teach_nothing = np.flatnonzero(~self._teaches(batches[-1])).tolist()
            further = [groups[number].prompt.source for number in teach_nothing][:left]
            if further:
                sampling.start(len(further), Counter(further) if by_source else None)
            under_way, left = under_way - len(groups) + len(further), left - len(further)
        batch = joined(batches)
        if batch.failure is not None:
            raise batch.failure
        batch = batch.select(np.argsort(numbers).tolist())
        teaches = self._teaches(batch)
        sources = np.array([group.prompt.source if by_source else "" for group in batch.groups])
        chosen: list[int] = []
        for source, share in Counter(sources[:size].tolist()).items():
            own = np.flatnonzero(sources == source)
            chosen += own[np.argsort(~teaches[own], kind="stable")[:share]].tolist()
        chosen.sort()
        self._kept = sum(number >= size for number in chosen)
        self._batch = replace(batch.select(chosen), sampled=batch)
        if not teaches.any():
            self._warn(step + 1, len(batch.groups))
        return list(self._batch.groups)

    def score(self, groups: Sequence[Group], step: int) -> ScoredBatch:
        """Return the scored batch of a step: what `fill` scored already, if it did."""
        if self._batch is None:
            self._batch = self._score(groups, step)
        return self._batch

    def rewards_of(self, groups: Sequence[Group]) -> Floats | None:
        """Return the rewards of groups of this step; None if it was not scored."""
        if self._batch is None:
            return None
        batch = self._batch.everything
        rows = {id(group): row for group, row in zip(batch.groups, batch.rewards, strict=True)}
        return np.array([rows[id(group)] for group in groups]).reshape(len(groups), batch.rewards.shape[1])

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        if self._mode == "none":
            return row
        everything = taken.batch.everything
        sampled = len(everything.groups) - self._first
        summary = RefillSummary(sampled=sampled, kept=self._kept, dropped=sampled)
        return replace(row, refill=summary, episodes=summary_of(everything.rollouts))

    def _score(self, groups: Sequence[Group], step: int, **how: bool) -> ScoredBatch:
        return replace(self._scorer(groups, step, **how), signal_parts=self._signal_parts)

    def _teaches(self, batch: ScoredBatch) -> NDArray[np.bool_]:
        """Return which groups have scored rollouts that differ in what the mode looks at."""
        if self._mode == "outcome" and batch.right is not None:
            has_right = ~np.isnan(batch.right).all(axis=1)  # not where a source's reward knows none
            return np.where(has_right, differ(batch.right), batch.untied)
        return batch.untied

    def _warn(self, step: int, groups: int) -> None:
        """Say once that no group of a step taught anything."""
        if not self._was_told:
            self._was_told = True
            log.warning(
                "step %d: none of %d groups teaches anything, so it changes nothing but by a KL term or an "
                "entropy bonus; give easier prompts or a reward with more steps, or set [data].refill = "
                '"none" to spend less',
                step,
                groups,
            )
