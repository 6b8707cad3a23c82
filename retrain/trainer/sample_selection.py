"""Chooses the rollouts of a step that are kept for people to read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from retrain.records.samples import shortened
from retrain.rollouts import Floats
from retrain.trainer.batch import ScoredBatch

LONGEST_ANSWER = 500  # characters


@dataclass(frozen=True, slots=True)
class ShownRollout:
    """A row of samples.jsonl."""

    prompt_id: int
    rollout: int  # number within its group
    reward: float | None  # None: not scored
    advantage: float | None
    tie: bool  # whether all rewards of its group are equal
    tokens: int
    truncated: bool
    prompt: str
    answer: str
    completion: str


def choose(batch: ScoredBatch, advantages: Floats, count: int) -> list[ShownRollout]:
    """Return `count` rollouts of the first prompt, the batch's best and worst, and one of a tied group.

    Prompts come in random order, so the first one is a fair sample. Nothing else is random: a repeated
    step chooses the same rollouts.
    """
    if count == 0:
        return []
    flat, width = batch.rewards.ravel(), batch.rewards.shape[1]
    lowest, highest = np.fmin.reduce(batch.rewards, axis=1), np.fmax.reduce(batch.rewards, axis=1)
    tied = lowest == highest  # False for a group without a score: both are NaN
    places = [(0, rollout) for rollout in range(min(count, width))]
    places += [divmod(int(np.nanargmax(flat)), width), divmod(int(np.nanargmin(flat)), width)]
    places += [(int(group), 0) for group in np.flatnonzero(tied)[:1]]
    return [
        _shown(batch, group, rollout, float(advantages[group, rollout]), is_tied=bool(tied[group]))
        for group, rollout in dict.fromkeys(places)
    ]


def _shown(batch: ScoredBatch, group: int, rollout: int, advantage: float, *, is_tied: bool) -> ShownRollout:
    sampled = batch.groups[group].rollouts[rollout]
    prompt = batch.groups[group].prompt
    reward = float(batch.rewards[group, rollout])
    is_scored = math.isfinite(reward)
    return ShownRollout(
        prompt_id=prompt.id,
        rollout=rollout,
        reward=reward if is_scored else None,
        advantage=advantage if is_scored and math.isfinite(advantage) else None,
        tie=is_tied,
        tokens=len(sampled.tokens),
        truncated=sampled.truncated,
        prompt=shortened(prompt.text),
        answer=shortened(prompt.answer, LONGEST_ANSWER),
        completion=shortened(sampled.text),
    )
