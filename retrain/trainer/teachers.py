"""The teacher of a run: what it thinks of each token that the policy sampled, as advantages or a divergence.

The log-ratio log p(teacher) - log p(sampler) of a token is added to its advantage, times a weight: its own
only, not that of later ones (discount 0), and no gradient goes through it. The loss's importance ratios, and
their caps, apply to the sum, so stale samples count as for a reward. Sources: Agarwal et al. 2024,
arXiv:2306.13649; Thinking Machines Lab 2025, "On-Policy Distillation"; with a prompt of the teacher's own,
self-distillation, arXiv:2601.19897.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from retrain.backends import Backend, TeacherSpec
from retrain.backends.objective import divergence
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Rollout, TrainingSample
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
        is_whole = self._table.mode == "jsd"
        self._teacher = backend.open_teacher(TeacherSpec(self._table.teacher, training.temperature, is_whole))
        self._summary: TeacherSummary | None = None

    def teach(self, samples: Sequence[TrainingSample], progress: float) -> list[TrainingSample]:
        """Return a step's samples with the teacher's part, after this share of the run's steps.

        Only what is trained on is scored: no tokens of an environment, and none that `mask_truncated` drops.
        """
        self._summary = None
        if not samples:
            return []
        began_s, table = time.perf_counter(), self._table
        all_scores = self._teacher.score([asked(sample.rollout, table) for sample in samples])
        weight = table.weight * schedule_factor(table.schedule, progress * self._max_steps, self._max_steps)
        taught, apart, logprobs = [], [], []
        for sample, scores in zip(samples, all_scores, strict=True):
            logprobs.append(scores.logprobs)
            apart.append(sample.rollout.logprobs - scores.logprobs)
            if table.mode == "jsd":
                taught.append(replace(sample, teacher=replace(scores, weight=weight, beta=table.beta)))
            else:
                advantages = sample.advantages - weight * apart[-1]
                taught.append(replace(sample, teacher=scores, advantages=advantages))
        sampled = np.concatenate(apart)
        self._summary = TeacherSummary(
            kl=divergence(sampled) / len(sampled),
            outside=float(np.mean(np.concatenate(logprobs) < np.log(OUTSIDE))),
            weight=weight,
            tokens=sum(scores.read for scores in all_scores),
            time_s=time.perf_counter() - began_s,
        )
        return taught

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        if self._table.refresh and is_due(self._save_every, taken.number):
            self._teacher.refresh()
        if self._summary is None:
            return row
        return replace(row, teacher=replace(self._summary, agreement=taken.stats.teacher_agreement))

    def close(self) -> None:
        self._teacher.close()


def asked(rollout: Rollout, table: TeacherSection) -> Rollout:
    """Return a rollout as its teacher reads it: the same tokens, perhaps after another prompt."""
    if rollout.prompt.ids and table.prompt:
        raise ConfigError(
            "[teacher].prompt: a program gives the prompts as tokens, around which no text can be put; "
            "leave it out"
        )
    return replace(rollout, prompt=rollout.prompt.hinted(table.prompt)) if table.prompt else rollout
