"""Several sources of prompts: each with its own reward and environment, and its part of a step's row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from retrain.backends import Sampling
from retrain.base.rollouts import Group, Prompt
from retrain.config.schema import SourceSection
from retrain.records.step_row import SourceSummary, StepRow
from retrain.trainer.batch import SampleGroups, ScoredBatch, joined, mean_of
from retrain.trainer.part import Loop, Part, TakenStep
from retrain.trainer.scoring import Scorer


class SourceRows(Part):
    """Writes what a step sampled of each source to its row."""

    def __init__(self, sources: Sequence[SourceSection]) -> None:
        self._names = [source.label for source in sources]

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        return replace(row, sources=summary_of(self._names, taken.batch.everything))


def summary_of(names: Sequence[str], batch: ScoredBatch) -> SourceSummary:
    """Return the prompts, tokens and mean reward of each source in a batch."""
    own = {name: batch.select([]) for name in names} | batch.by_source
    rewards = {name: mean_of(part.known_rewards) for name, part in own.items()}
    shares = {name: len(part.groups) / len(batch.groups) for name, part in own.items()}
    return SourceSummary(
        prompts={name: len(part.groups) for name, part in own.items()},
        tokens={
            name: sum(len(sample.tokens) for rollout in part.rollouts for sample in rollout.samples)
            for name, part in own.items()
        },
        mean_reward=rewards,
        shown=", ".join(
            f"{name} {'-' if (reward := rewards[name]) is None else f'{reward:.3f}'} ({share:.0%} of prompts)"
            for name, share in shares.items()
            if share
        ),
    )


class ScorerBySource:
    """Scores each group by its source's reward, as `Scorer` does by one."""

    def __init__(self, scorers: Mapping[str, Scorer], otherwise: Scorer) -> None:
        """`otherwise` scores the prompts of other sources, and of evaluations."""
        self._scorers, self._otherwise = scorers, otherwise

    def score(
        self,
        groups: Sequence[Group],
        step: int = 0,
        *,
        ignores_environment: bool = False,
        is_part: bool = False,
    ) -> ScoredBatch:
        """Score every rollout, as `Scorer.score` does; the step fails if no source has a score."""
        by_scorer: dict[Scorer, list[int]] = {}
        for number, group in enumerate(groups):
            scorer = self._scorers.get(group.prompt.source, self._otherwise)
            by_scorer.setdefault(scorer, []).append(number)
        parts = [
            scorer.score(
                [groups[number] for number in numbers],
                step,
                ignores_environment=ignores_environment,
                is_part=True,
            )
            for scorer, numbers in by_scorer.items()
        ]
        batch = joined(parts)
        if batch.failure is not None and not is_part:
            raise batch.failure
        order = np.argsort([number for numbers in by_scorer.values() for number in numbers])
        return batch.select(order.tolist())

    def progress(self) -> str:
        """Return how far scoring is, in words; empty while nothing is scored. From any thread."""
        scorers = (*self._scorers.values(), self._otherwise)
        return next((text for scorer in scorers if (text := scorer.progress())), "")


def sample_by_source(
    samplers: Mapping[str, tuple[SampleGroups, int | None]], otherwise: SampleGroups
) -> SampleGroups:
    """Return what samples each prompt as its source says.

    Args:
        samplers: by name of the source, with the most tokens of its completions if it limits them.
        otherwise: samples the prompts of other sources, and of evaluations.
    """

    def sample(prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        together: dict[tuple[SampleGroups, int], list[int]] = {}
        for number, prompt in enumerate(prompts):
            own, limit = samplers.get(prompt.source, (otherwise, None))
            together.setdefault((own, min(limit or how.max_tokens, how.max_tokens)), []).append(number)
        groups: dict[int, Group] = {}
        for part, ((own, most), numbers) in enumerate(together.items()):
            seed = None if how.seed is None else how.seed + part
            sampled = own([prompts[n] for n in numbers], replace(how, max_tokens=most, seed=seed))
            groups |= zip(numbers, sampled, strict=True)
        return [groups[number] for number in range(len(prompts))]

    return sample
