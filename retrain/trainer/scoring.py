"""Scores a step's rollouts and tells wrong answers from failures to score.

A rollout that could not be scored has reward NaN: it counts in no mean, gets no advantage and is not trained
on. If no rollout of a step could be scored and the scorer was away for any of them, the infrastructure has
failed; a step that the reward cannot judge has no gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrain.backends import Backend
from retrain.base import registry
from retrain.base.errors import RetrainError, RunFailedError, UnscoredStepError
from retrain.base.event_loop import EventLoopThread
from retrain.base.rollouts import CORRECT, Floats, Group, Rollout
from retrain.plugins.environments.episode import LARGEST_REWARD
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, TrainerState
from retrain.plugins.rewards.opening import is_pure, open_reward, range_of
from retrain.plugins.rewards.parts import name_problem
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.rank_scoring import Opening, RankScorer


def _score_by_environment(rollout: Rollout, *, is_ignored: bool) -> Score | None:
    """Return the score that an environment gave; None if the reward has to."""
    episode = rollout.episode
    if episode is None or ((is_ignored or episode.reward is None) and not episode.error):
        return None
    failure = Outcome.TIMEOUT if episode.timed_out else Outcome.ERROR
    outcome = failure if episode.error else Outcome.SCORED
    return Score(episode.reward, outcome, episode.error, parts=episode.parts)


class Scorer:
    """The reward of a run, opened once."""

    def __init__(
        self,
        name: str,
        params: Mapping[str, Any],
        sandbox: Mapping[str, Any] | None = None,
        max_steps: int = 1,
    ) -> None:
        """Open the reward; raise ConfigError if there is none of this name, or it rejects its parameters."""
        self._name, self._max_steps = name, max_steps
        self._opening = Opening(name, params, sandbox)
        self._bounds = range_of(name)
        self._outcome: str = registry.ask("rewards", name, "outcome", params)
        self._reward: BatchScorer = open_reward(*self._opening)
        self._under_way: tuple[int, int | None] | None = None  # completions of a call, and `scored` before it
        self._had_turns = False  # some rollout was sampled from the policy
        self._calls = EventLoopThread()  # its own: a slow reward must not delay the backend's heartbeats

    def score(
        self,
        groups: Sequence[Group],
        step: int = 0,
        *,
        ignores_environment: bool = False,
        is_part: bool = False,
    ) -> ScoredBatch:
        """Score every rollout after `step` complete steps, if asked also those that an environment scored.

        Of a part of a step's groups, the error of a step without any score is not raised but returned.

        Raises:
            RunFailedError: a reward is not a finite number, or every one is outside the reward's range.
            UnscoredStepError: no rollout could be scored, some of them since the scorer failed or timed out.
        """
        state = TrainerState(step, self._max_steps)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        by_environment = [_score_by_environment(one, is_ignored=ignores_environment) for one in rollouts]
        scores, failure = self._scores_of(groups, by_environment, state)
        if failure is not None and not is_part:
            raise failure
        sizes = np.cumsum([len(group.rollouts) for group in groups])[:-1]

        def by_group(values: Iterable[float | None]) -> Floats:
            numbers = np.array([math.nan if value is None else value for value in values])
            return np.array(np.split(numbers, sizes))

        def right(score: Score) -> float | None:
            """Return 1 for a right completion and 0 for a wrong one; None if that is not known."""
            value = score.parts.get(self._outcome, score.value)
            return None if value is None or score.value is None else float(value >= CORRECT)

        rewards = by_group(score.value for score in scores)
        names = dict.fromkeys(name for score in scores for name in score.parts)
        if wrong := name_problem(names):
            raise RunFailedError(f"reward {self._name!r} has {wrong}")
        parts = {name: by_group(score.parts.get(name) for score in scores) for name in names}
        has_right = bool(self._outcome or self._bounds.high == 1) and None in by_environment
        counts = Counter(score.outcome for score in scores)
        return ScoredBatch(
            groups,
            rewards,
            errors=counts[Outcome.ERROR],
            timeouts=counts[Outcome.TIMEOUT],
            faults=counts[Outcome.FAULT],
            over_limits=sum(score.is_over_limit for score in scores),
            marked={n: score for n, score in enumerate(scores) if score.value is None or score.sign},
            sandbox=self._reward.sandbox or None,
            parts=parts,
            right=by_group(map(right, scores)) if has_right else None,
            failure=failure,
        )

    def _scores_of(
        self, groups: Sequence[Group], by_environment: Sequence[Score | None], state: TrainerState
    ) -> tuple[list[Score], RetrainError | None]:
        """Return a score per rollout, its environment's, else the reward's; and the error of none at all."""
        rollouts = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
        self._had_turns |= any(rollout.tokens or rollout.truncated for _, rollout in rollouts)
        played = [rollout for _, rollout in rollouts if rollout.episode and not rollout.episode.error]
        if rollouts and not self._had_turns and len(played) == len(rollouts):  # whatever their rewards
            what = f"none of {len(rollouts)} episodes got a turn of the policy"
            raise RunFailedError(f"{what}; let the program ask at the base_url that it is given")
        answers = [
            Answer(rollout.text, prompt, rollout.placed()[0], state)
            for (prompt, rollout), score in zip(rollouts, by_environment, strict=True)
            if score is None
        ]
        by_reward: list[Score] = []
        if answers:
            self._under_way = len(answers), self._reward.scored
            try:
                by_reward = self._calls.wait_for(self._reward.score_all(answers))
            finally:
                self._under_way = None
        kept = self._bounds.keep(by_reward)
        self._check(answers, kept)
        rest = iter(kept)
        scores = [score or next(rest) for score in by_environment]
        for number, (_, rollout) in enumerate(rollouts):  # parts of an environment that leaves scoring to us
            if (episode := rollout.episode) and episode.parts and episode.reward is None:
                score = scores[number]
                scores[number] = replace(score, parts={**episode.parts, **score.parts})
        is_unscored = all(score.value is None for score in scores)
        return scores, self._failure(scores, by_reward) if is_unscored else None

    def progress(self) -> str:
        """Return how far scoring is, in words; empty while nothing is scored. From any thread."""
        if (under_way := self._under_way) is None:
            return ""
        (completions, before), after = under_way, self._reward.scored
        if before is None or after is None:
            return f"{completions} to score"
        return f"{min(after - before, completions)} of {completions} scored"

    def use_ranks(self, backend: Backend) -> None:
        """Score on all ranks of a backend from now on, if the reward declares that it may be."""
        cores = backend.info.rank_cores
        weights = cores if self._reward.uses_all_cores else [1.0] * len(cores)
        if sum(weight > 0 for weight in weights) > 1 and is_pure(self._name, self._opening.params):
            self._reward = RankScorer(self._reward, self._calls, self._opening, backend, weights)

    def close(self) -> None:
        self._reward.close()
        self._calls.close()

    def _check(self, answers: Sequence[Answer], scores: Sequence[Score]) -> None:
        if len(scores) != len(answers):
            raise RunFailedError(
                f"the reward {self._name!r} returned {len(scores)} scores for {len(answers)} completions"
            )
        for answer, score in zip(answers, scores, strict=True):
            if score.value is not None and not abs(score.value) <= LARGEST_REWARD:
                raise RunFailedError(
                    f"reward {self._name!r}, prompt {answer.prompt.id}: is {score.value:g}; "
                    f"a reward must be a finite number of at most {LARGEST_REWARD:g}"
                )
            if self._outcome and score.value is not None and self._outcome not in score.parts:
                raise RunFailedError(
                    f"reward {self._name!r}, prompt {answer.prompt.id}: outcome names the part "
                    f"{self._outcome!r}, and it has {', '.join(score.parts) or 'none'}"
                )
            for name, value in score.parts.items():
                if value is not None and not abs(value) <= LARGEST_REWARD:
                    raise RunFailedError(
                        f"reward {self._name!r}, prompt {answer.prompt.id}: its part {name!r} is {value:g}; "
                        f"it must be a finite number of at most {LARGEST_REWARD:g}"
                    )

    def _failure(self, scores: Sequence[Score], by_reward: Sequence[Score]) -> RetrainError | None:
        """Return the error of a step without any score, None if the reward cannot judge its completions.

        `by_reward` are the reward's scores, in its range or not, if it was asked.
        """
        if not by_reward:
            late = [score for score in scores if score.outcome is Outcome.TIMEOUT]
            last = (late or scores)[-1].message
            what = f"none of {len(scores)} episodes could be played; the last one: {last}"
            if late:
                return UnscoredStepError(f"{what}; raise [environment].time_limit_s if it needs longer")
            return RunFailedError(f"{what}; correct the environment")
        what = f"none of {len(scores)} completions could be scored by {self._name!r}"
        if any(score.value is not None for score in by_reward):
            first = next(score.message for score in scores if score.is_unjudged)
            return RunFailedError(f"{what}; the first one: {first}; correct the reward or its RANGE")
        if outages := [score.message for score in scores if score.is_outage]:
            failed = f"the scorer failed or timed out for {len(outages)} of them"
            return UnscoredStepError(f"{what}: {failed}; the last one: {outages[-1]}")
        return None
