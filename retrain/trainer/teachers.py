"""The teacher of a run: what it thinks of each token that the policy sampled, as advantages or a divergence.

The log-ratio log p(teacher) - log p(sampler) of a token is added to its advantage, times a weight: its own
only, not that of later ones (discount 0), and no gradient goes through it. The loss's importance ratios, and
their caps, apply to the sum, so stale samples count as for a reward. Sources: Agarwal et al. 2024,
arXiv:2306.13649; Thinking Machines Lab 2025, "On-Policy Distillation"; with a prompt of the teacher's own,
self-distillation, arXiv:2601.19897.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from retrain.backends import SELF, Backend, TeacherSpec
from retrain.backends.objective import divergence
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Floats, Prompt, Rollout, TeacherScores, TrainingSample
from retrain.config.resolve import teachers_of
from retrain.config.schema import Config, TeacherSection
from retrain.control.rules.scaling import schedule_factor
from retrain.records.step_row import StepRow, TeacherSummary
from retrain.trainer.part import Loop, Part, TakenStep, is_due

OUTSIDE = 1e-4  # probability below which a teacher would hardly ever have written a token


class TeacherSignal(Part):
    """Has the teacher score a step's samples, and writes what it thinks of them to the row."""

    def __init__(self, config: Config, backend: Backend) -> None:
        self._table, training = config.teacher, config.training
        self._max_steps, self._save_every = training.max_steps, training.save_every
        is_whole, temperature = self._table.mode == "jsd", training.temperature
        self._teachers = {
            name: backend.open_teacher(TeacherSpec(name, temperature, is_whole))
            for name in teachers_of(config)
        }
        self._names = {source.label: source.teacher for source in config.data.source if source.teacher}
        self._summary: TeacherSummary | None = None
        self._kl_by_source: dict[str, float] = {}

    def teacher_of(self, prompt: Prompt) -> str:
        """Return the name of the teacher of a prompt's completions; "" without one."""
        return self._names.get(prompt.source, self._table.teacher)

    def teach(self, samples: Sequence[TrainingSample], progress: float) -> list[TrainingSample]:
        """Return a step's samples with the teacher's part, after this share of the run's steps.

        Only what is trained on is scored: no tokens of an environment, and none that `mask_truncated` drops.
        """
        self._summary, self._kl_by_source = None, {}
        began_s, table = time.perf_counter(), self._table
        weight = table.weight * schedule_factor(table.schedule, progress * self._max_steps, self._max_steps)
        taught, scored = list(samples), dict(self._scored(samples))
        if not scored:
            return taught
        apart: dict[str, list[Floats]] = {}  # log-ratios, by source
        for number, scores in scored.items():
            sample = samples[number]
            ratios = sample.rollout.logprobs - scores.logprobs
            apart.setdefault(sample.rollout.prompt.source, []).append(ratios)
            if table.mode == "jsd":
                taught[number] = replace(sample, teacher=replace(scores, weight=weight, beta=table.beta))
            else:
                advantages = sample.advantages - weight * ratios
                taught[number] = replace(sample, teacher=scores, advantages=advantages)
        self._kl_by_source = {source: _distance(ratios) for source, ratios in apart.items()}
        logprobs = np.concatenate([scores.logprobs for scores in scored.values()])
        self._summary = TeacherSummary(
            kl=_distance([*chain.from_iterable(apart.values())]),
            outside=float(np.mean(logprobs < np.log(OUTSIDE))),
            weight=weight,
            tokens=sum(scores.read for scores in scored.values()),
            time_s=time.perf_counter() - began_s,
        )
        return taught

    def _scored(self, samples: Sequence[TrainingSample]) -> Iterator[tuple[int, TeacherScores]]:
        """Iterate over the samples that have a teacher, as their number and its scores."""
        for name, teacher in self._teachers.items():
            numbers = [n for n, s in enumerate(samples) if self.teacher_of(s.rollout.prompt) == name]
            if numbers:
                rollouts = [as_read(samples[number].rollout, self._table) for number in numbers]
                yield from zip(numbers, teacher.score(rollouts), strict=True)

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        if self._table.refresh and is_due(self._save_every, taken.number):
            self._teachers[SELF].refresh()
        if self._summary is None:
            return row
        sources = row.sources and replace(row.sources, teacher_kl=self._kl_by_source)
        summary = replace(self._summary, agreement=taken.stats.teacher_agreement)
        return replace(row, teacher=summary, sources=sources)

    def close(self) -> None:
        for teacher in self._teachers.values():
            teacher.close()


def _distance(apart: Sequence[Floats]) -> float:
    ratios = np.concatenate(apart)
    return divergence(ratios) / len(ratios)


def as_read(rollout: Rollout, table: TeacherSection) -> Rollout:
    """Return a rollout as its teacher reads it: the same tokens, perhaps after another prompt."""
    if rollout.prompt.ids and table.prompt:
        raise ConfigError(
            "[teacher].prompt: a program gives the prompts as tokens, so no text can be put around them; "
            "leave it out"
        )
    if not table.prompt:
        return rollout
    feedback = "\n".join(given.text.strip() for given in rollout.given)
    return replace(rollout, prompt=rollout.prompt.hinted(table.prompt, feedback))
