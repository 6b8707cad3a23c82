"""Several sources of prompts: each with its own reward and environment, and its part of a step's row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from retrain.backends import Backend, Sampling
from retrain.base.rollouts import Group, Prompt
from retrain.config.resolve import as_played
from retrain.config.schema import Config, EvalSection, SourceSection
from retrain.records.step_row import SourceSummary, StepRow
from retrain.trainer.batch import SampleGroups, ScoredBatch, joined, mean_of
from retrain.trainer.evaluation import ScoreGroups
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


class RunScorer:
    """The rewards of a run, all opened at once: its own, and those of its sources and evaluations."""

    def __init__(self, config: Config) -> None:
        """Open them; ConfigError if there is none of a name, or one rejects its parameters."""
        table, max_steps = config.reward, config.training.max_steps
        sandbox = {"sandbox": table.sandbox, "sandbox_options": table.sandbox_options}
        with ExitStack() as opened:

            def open_scorer(reward: str, params: Mapping[str, Any]) -> Scorer:
                return opened.enter_context(closing(Scorer(reward, params, sandbox, max_steps)))

            self._own = open_scorer(table.reward, table.params)
            self._of_sources = {
                source.label: open_scorer(source.reward, source.params)
                for source in config.data.source
                if source.reward
            }
            self._of_evals = {
                each.name: open_scorer(each.reward, each.params) for each in config.eval.tables if each.reward
            }
            self._all = [self._own, *self._of_sources.values(), *self._of_evals.values()]
            self.close = opened.pop_all().close

    def use_ranks(self, backend: Backend) -> None:
        """Score on all ranks of a backend from now on, by each reward that may be."""
        for scorer in self._all:
            scorer.use_ranks(backend)

    def score(self, groups: Sequence[Group], step: int = 0, *, is_part: bool = False) -> ScoredBatch:
        """Score every rollout by its source's reward, as `Scorer.score`; fail if no source has a score."""
        by_scorer: dict[Scorer, list[int]] = {}
        for number, group in enumerate(groups):
            scorer = self._of_sources.get(group.prompt.source, self._own)
            by_scorer.setdefault(scorer, []).append(number)
        if len(by_scorer) < 2:
            return next(iter(by_scorer), self._own).score(groups, step, is_part=is_part)
        batch = joined(
            [
                scorer.score([groups[number] for number in numbers], step, is_part=True)
                for scorer, numbers in by_scorer.items()
            ]
        )
        if batch.failure is not None and not is_part:
            raise batch.failure
        order = np.argsort([number for numbers in by_scorer.values() for number in numbers])
        return batch.select(order.tolist())

    def of_evaluation(self, table: EvalSection) -> ScoreGroups:
        """Return what scores an `[[eval]]`: its own reward, whatever its environment gave, or the run's."""
        own = self._of_evals.get(table.name)
        return partial(own.score, ignores_environment=True) if own else self.score

    def progress(self) -> str:
        """Return how far scoring is, in words; empty while nothing is scored. From any thread."""
        scorers = (*self._of_sources.values(), self._own)
        return next((text for scorer in scorers if (text := scorer.progress())), "")


def sample_by_source(config: Config, open_sampler: Callable[[Config], SampleGroups]) -> SampleGroups:
    """Return what samples each prompt as its source says: in its environment, with its limit of tokens.

    Prompts without a source, as those of evaluations, are sampled as the run says.
    """
    otherwise = open_sampler(config)
    samplers: dict[str, tuple[SampleGroups, int | None]] = {}
    for source in config.data.source:
        own = open_sampler(as_played(config, source)) if source.environment else otherwise
        samplers[source.label] = own, source.max_tokens
    if not samplers:
        return otherwise

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
