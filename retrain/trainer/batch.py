"""Rewards -> advantages -> token advantages -> weighted training samples.

Groups whose advantages are all zero carry no signal. They count in the loss's denominator, so that ties do
not amplify the other groups, unless `loss_normalization` begins with "informative_". They are trained on
only if a KL term or an entropy bonus gives them a gradient. Unscored rollouts enter no mean, spread or count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Sampling
from retrain.backends.objective import RatioCap
from retrain.base import registry
from retrain.base.errors import RetrainError, RunFailedError
from retrain.base.rollouts import (
    CORRECT,
    Evaluate,
    Floats,
    Group,
    Loss,
    LossTerms,
    Prompt,
    Rollout,
    TrainingSample,
)
from retrain.config.schema import Config
from retrain.plugins.advantages import OVER_BATCH, taken_parts
from retrain.plugins.rewards import Score
from retrain.plugins.rewards.parts import part_weights
from retrain.records.step_row import RolloutSummary

if TYPE_CHECKING:
    from retrain.trainer.teachers import TeacherSignal

SampleGroups = Callable[[Sequence[Prompt], Sampling], list[Group]]  # completions, or whole episodes
Reweigh = Callable[[Rollout, float, float], Floats]  # rollout, advantage, progress -> token advantages


LEAST_ROLLOUTS = 2  # a single rollout has no baseline


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """A step's groups, their rewards of shape (prompts, rollouts), and counts of scoring failures."""

    groups: Sequence[Group]
    rewards: Floats  # NaN where a rollout could not be scored
    errors: int = 0  # rollouts whose scoring failed, as opposed to wrong answers
    timeouts: int = 0  # rollouts whose scoring took too long
    faults: int = 0  # rollouts that did what no solution does, such as a forbidden system call
    over_limits: int = 0  # rollouts whose program ran into a limit of memory or files
    marked: Mapping[int, Score] = field(default_factory=dict)  # of rollouts without a reward or with a sign
    sandbox: str | None = None  # where programs of the policy ran, if any did
    parts: Mapping[str, Floats] = field(default_factory=dict)  # of the rewards, by name; NaN where unscored
    # 1 where a rollout is right and 0 where it is wrong, whatever shaped parts add to its reward; NaN where
    # it is unscored. None if the reward has no notion of right (`RewardPlugin.outcome`)
    right: Floats | None = None
    # parts that give advantages where they differ, whatever the rewards do
    signal_parts: Collection[str] = ()
    failure: RetrainError | None = None  # of a step that has no other scores; None: some, or none is possible
    sampled: ScoredBatch | None = None  # all groups of the step, where a refill kept these of them

    @property
    def everything(self) -> ScoredBatch:
        """All that the step sampled; counts of failures are of that."""
        return self.sampled or self

    def select(self, numbers: Sequence[int]) -> ScoredBatch:
        """Return the groups of these numbers, in their order; counts of failures stay those of all."""
        width = self.rewards.shape[1]
        marked = {
            place * width + rollout: self.marked[number * width + rollout]
            for place, number in enumerate(numbers)
            for rollout in range(width)
            if number * width + rollout in self.marked
        }
        return replace(
            self,
            groups=[self.groups[number] for number in numbers],
            rewards=self.rewards[numbers],
            marked=marked,
            parts={name: values[numbers] for name, values in self.parts.items()},
            right=None if self.right is None else self.right[numbers],
        )

    @property
    def by_source(self) -> dict[str, ScoredBatch]:
        """The groups of each source of prompts; none where there is one source."""
        numbers: dict[str, list[int]] = {}
        for number, group in enumerate(self.groups):
            numbers.setdefault(group.prompt.source, []).append(number)
        return {name: self.select(own) for name, own in numbers.items() if name}

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Which rollouts have a reward."""
        return ~np.isnan(self.rewards)

    @property
    def known_rewards(self) -> Floats:
        """The rewards of scored rollouts, flattened."""
        return self.rewards[self.scored]

    @property
    def correct_rate(self) -> float | None:
        """The share of scored rollouts that are right; None without any."""
        return mean_of(self.known_rewards >= CORRECT)

    @property
    def tied(self) -> NDArray[np.bool_]:
        """Which groups have a score and no `untied` ones."""
        return self.scored.any(axis=1) & ~self.untied

    @property
    def untied(self) -> NDArray[np.bool_]:
        """Which groups have rewards that differ, or parts of them that give advantages on their own."""
        parts = (np.where(self.scored, self.parts[p], np.nan) for p in self.signal_parts if p in self.parts)
        return np.asarray(np.any([differ(values) for values in (self.rewards, *parts)], axis=0))

    @property
    def scored_groups(self) -> NDArray[np.int_]:
        """The numbers of the groups with a score."""
        return np.flatnonzero(self.scored.any(axis=1))

    def mean_by_group(self, values: NDArray[Any]) -> Floats:
        """Return the mean of values of rollouts over the scored ones of each of `scored_groups`."""
        groups = self.scored_groups
        return np.asarray(np.mean(values[groups], axis=1, where=self.scored[groups]))

    @property
    def outages(self) -> int:
        """How many rollouts have no reward because the scorer failed or timed out."""
        return sum(score.is_outage for score in self.marked.values())

    @property
    def unscored_fraction(self) -> float | None:
        """The share of rollouts without a reward; None if all have one."""
        return float(np.mean(~self.scored)) or None

    @property
    def part_means(self) -> dict[str, float | None]:
        """The mean of each part over the rollouts that have it; None if none has."""
        return {name: mean_of(values[~np.isnan(values)]) for name, values in self.parts.items()}

    @property
    def parts_unscored(self) -> dict[str, float]:
        """The share of rollouts without a part, of those that some lack; of sources whose reward has it."""
        sources, lacking = np.array([group.prompt.source for group in self.groups]), {}
        for name, values in self.parts.items():
            having = np.unique(sources[~np.isnan(values).all(axis=1)])
            own = values[np.isin(sources, having)] if len(having) else values
            lacking[name] = float(np.mean(np.isnan(own)))
        return {name: fraction for name, fraction in lacking.items() if fraction}

    @property
    def error_fraction(self) -> float:
        return self.errors / self.rewards.size

    @property
    def timeout_fraction(self) -> float:
        return self.timeouts / self.rewards.size

    def outcomes(self) -> dict[int, list[float | None]]:
        """Return the rewards of each prompt, by its id; None where a rollout has none."""
        return {
            group.prompt.id: [None if np.isnan(reward) else float(reward) for reward in rewards]
            for group, rewards in zip(self.groups, self.rewards, strict=True)
        }

    def summary(self, advantages: Floats, step_time_s: float) -> RolloutSummary:
        """Return what rows tell of all that was sampled, though `advantages` are of this batch only."""
        whole, kept = self.everything, {id(group) for group in self.groups}
        rollouts = whole.rollouts
        with_signal = int(np.any(advantages != 0, axis=1).sum())
        with_signal += sum(id(whole.groups[n]) not in kept for n in np.flatnonzero(whole.untied).tolist())
        lengths = [len(sample.tokens) for rollout in rollouts for sample in rollout.samples]
        # as `np.percentile`, which imports masked arrays: 20 ms of each worker
        last, ordered = len(lengths) - 1, sorted(lengths)
        median, high = np.interp([0.5 * last, 0.95 * last], range(len(ordered)), ordered)
        return RolloutSummary(
            batch_size=len(self.groups),
            group_size=self.rewards.shape[1],
            mean_reward=mean_of(whole.known_rewards),
            reward_std=float(whole.known_rewards.std()) if whole.scored.any() else None,
            correct_rate=whole.correct_rate,
            zero_signal_group_fraction=1.0 - with_signal / len(whole.groups),
            max_token_hit_rate=float(np.mean([rollout.truncated for rollout in rollouts])),
            length_p50=float(median),
            length_p95=float(high),
            length_max=max(lengths),
            tokens_per_step=sum(lengths),
            tokens_per_second=sum(lengths) / step_time_s,
            reward_error_fraction=whole.error_fraction,
            reward_timeout_fraction=whole.timeout_fraction,
            reward_faults=whole.faults,
            reward_over_limits=whole.over_limits,
            sandbox=whole.sandbox,
            parts=whole.part_means,
            parts_unscored=whole.parts_unscored,
        )


def differ(values: Floats) -> NDArray[np.bool_]:
    """Return which rows hold different numbers; NaN is none."""
    least, most = np.fmin.reduce(values, 1), np.fmax.reduce(values, 1)
    return np.asarray(least < most)


def joined(batches: Sequence[ScoredBatch]) -> ScoredBatch:
    """Return the groups of several batches as one."""
    rollouts = np.cumsum([0, *(batch.rewards.size for batch in batches)]).tolist()

    def each(values: Sequence[Floats | None]) -> Floats:
        """Return values of all rollouts from those of each batch; NaN where it has none."""
        shapes = [batch.rewards.shape for batch in batches]
        whole = (np.full(s, np.nan) if own is None else own for s, own in zip(shapes, values, strict=True))
        return np.concatenate([*whole])

    failures = (batch.failure for batch in reversed(batches) if batch.failure)
    return ScoredBatch(
        [group for batch in batches for group in batch.groups],
        np.concatenate([batch.rewards for batch in batches]),
        errors=sum(batch.errors for batch in batches),
        timeouts=sum(batch.timeouts for batch in batches),
        faults=sum(batch.faults for batch in batches),
        over_limits=sum(batch.over_limits for batch in batches),
        marked={
            before + number: score
            for before, batch in zip(rollouts, batches, strict=False)
            for number, score in batch.marked.items()
        },
        sandbox=next((batch.sandbox for batch in batches if batch.sandbox), None),
        parts={
            name: each([batch.parts.get(name) for batch in batches])
            for name in dict.fromkeys(name for batch in batches for name in batch.parts)
        },
        right=each([batch.right for batch in batches]) if any(b.right is not None for b in batches) else None,
        signal_parts=batches[0].signal_parts,
        failure=None if any(batch.scored.any() for batch in batches) else next(failures, None),
    )


def mean_of(values: NDArray[Any]) -> float | None:
    """Return the mean of values; None if there are none, as where no rollout has a score."""
    return float(np.mean(values)) if len(values) else None


class BoundAlgorithm:
    """The plugins of a run with their parameters bound."""

    def __init__(
        self,
        config: Config,
        reward: Callable[[Sequence[Group], int], ScoredBatch],
        teacher: TeacherSignal | None = None,
    ) -> None:
        """Find the plugins that a configuration names, for an open reward (`retrain.trainer.scoring`).

        With a `teacher`, its unscored and tied rollouts are trained on as well.
        """
        table = config.algorithm
        loss = partial(registry.find_plugin("losses", table.loss_mode), **table.loss_params)
        evaluate: Evaluate = CheckedLoss(table.loss_mode, loss)
        if table.ratio_cap:
            evaluate = RatioCap(table.ratio_cap, table.ratio_cap_scope, table.ratio_cap_mode).limit(evaluate)
        self.reward = reward
        params = table.advantage_params
        self._estimate = open_advantage(table.advantage_mode, params, advantage_weights(config))
        self.loss = Loss(table.loss_mode, evaluate, table.loss_params, is_capped=table.ratio_cap > 0)
        self._reweigh = open_transform(table.transform_mode, table.transform_params)
        self._normalization, self._max_tokens = table.loss_normalization, config.training.max_tokens
        self._teacher = teacher
        # a KL term, an entropy bonus or a teacher trains tied groups too
        self._is_regularized = teacher is not None or table.kl_coef > 0 or config.training.entropy_bonus > 0
        self._masks_truncated = table.mask_truncated  # they enter advantages, but not the loss

    def estimate(self, batch: ScoredBatch) -> Floats:
        """Return the advantages of a batch's rollouts, 0 for unscored ones."""
        return self._estimate(batch.rewards, batch.parts)

    def transform(self, batch: ScoredBatch, advantages: Floats, progress: float) -> list[TrainingSample]:
        """Return the rollouts that have a gradient, with token advantages and normalised token weights."""
        scope, _, unit = self._normalization.rpartition("_")
        informative = np.any(advantages != 0, axis=1)
        is_counted = batch.scored & (informative[:, None] | (not scope))
        if self._teacher:
            taught = [self._teacher.teacher_of(group.prompt) != "" for group in batch.groups]
            is_counted |= np.array(taught)[:, None]
        counted = [  # what the loss counts: samples with their group and advantage
            (group, float(advantages[group, number]), rollout)
            for group, number in np.argwhere(is_counted).tolist()
            for rollout in batch.groups[group].rollouts[number].samples
            if rollout.tokens and not (self._masks_truncated and rollout.truncated)
        ]
        rollouts = [rollout for _, _, rollout in counted]
        weigh = self._weights(unit, rollouts)
        bonus = weigh if scope else self._weights("token", rollouts)
        samples = []
        for group, advantage, rollout in counted:
            if informative[group]:
                token_advantages = self._reweigh(rollout, advantage, progress)
            elif self._is_regularized:
                token_advantages = np.zeros(len(rollout.tokens))
            else:
                continue
            samples.append(TrainingSample(rollout, token_advantages, weigh(rollout), group, bonus(rollout)))
        return self._teacher.teach(samples, progress) if self._teacher else samples

    def _weights(self, unit: str, rollouts: Sequence[Rollout]) -> Callable[[Rollout], float]:
        if unit == "token":
            tokens = sum(len(r.tokens) for r in rollouts)
            return lambda rollout: 1.0 / tokens
        if unit == "sequence":
            return lambda rollout: 1.0 / (len(rollouts) * len(rollout.tokens))
        return lambda rollout: 1.0 / (len(rollouts) * self._max_tokens)


def advantage_weights(config: Config) -> Mapping[str, float]:
    """Return the weights of the parts that a run's advantages are made of; none if the reward makes them."""
    return part_weights(config) if taken_parts(config.algorithm.advantage_mode) else {}


class CheckedLoss:
    """A loss that raises RunFailedError unless it gives terms for each token; it can be sent elsewhere."""

    def __init__(self, name: str, evaluate: Evaluate) -> None:
        self._name = f"loss_mode {name!r}"
        self.__wrapped__ = evaluate  # backends read its parameters

    def __call__(self, logprobs: Floats, *others: Any) -> LossTerms:
        terms: object = self.__wrapped__(logprobs, *others)
        if not isinstance(terms, LossTerms):
            kind = type(terms).__name__
            raise RunFailedError(f"{self._name} returned a {kind}; needs retrain.LossTerms")
        if any(np.shape(term) != logprobs.shape for term in (terms.value, terms.slope, terms.clipped)):
            raise RunFailedError(
                f"{self._name} returned terms of another shape than {logprobs.shape}, one per token"
            )
        return terms


def open_transform(name: str, params: Mapping[str, Any]) -> Reweigh:
    """Return the token transform of this name; RunFailedError unless it gives finite advantages of tokens."""
    plugin = registry.find_plugin("transforms", name)

    def reweigh(rollout: Rollout, advantage: float, progress: float) -> Floats:
        advantages = np.asarray(plugin(rollout, advantage, progress, **params), dtype=np.float64)
        if advantages.shape != (len(rollout.tokens),):
            raise RunFailedError(
                f"transform_mode {name!r} returned shape {advantages.shape} for a rollout of shape "
                f"{(len(rollout.tokens),)}; needs an advantage for each token"
            )
        if not np.isfinite(advantages).all():
            raise RunFailedError(
                f"transform_mode {name!r} returned {advantages[~np.isfinite(advantages)][0]}; "
                "an advantage must be a finite number"
            )
        return advantages

    return reweigh


def entropy_of(batch: ScoredBatch, of_update: float | None) -> float | None:
    """Return the mean entropy, nats per token: the sampler's if known, else the update's, if it was taken."""
    sampled = [
        (r.mean_entropy, len(r.tokens)) for r in batch.rollouts if np.isfinite(r.mean_entropy) and r.tokens
    ]
    if not sampled:
        return of_update
    entropies, lengths = zip(*sampled, strict=True)
    return float(np.average(entropies, weights=lengths))


def open_advantage(
    name: str, params: Mapping[str, Any], weights: Mapping[str, float] = MappingProxyType({})
) -> Callable[..., Floats]:
    """Return a function from rewards of shape (prompts, rollouts), NaN where unscored, to advantages.

    Its second argument are the parts of the rewards, by name; `weights` are those of the parts.

    Advantages are finite, and exactly 0 for unscored rollouts. The function raises RunFailedError if the
    plugin's result has another shape, or is not finite where rollouts are scored.
    """
    plugin, taken = registry.find_plugin("advantages", name), taken_parts(name)
    over_batch = bool(getattr(plugin, OVER_BATCH, False))

    def checked(rewards: Floats, scored: NDArray[np.bool_], parts: Mapping[str, Floats]) -> Floats:
        passed = {key: value for key, value in (("parts", parts), ("weights", weights)) if key in taken}
        advantages = np.asarray(plugin(rewards.copy(), **passed, **params), dtype=np.float64)
        if advantages.shape != rewards.shape:
            raise RunFailedError(
                f"advantage_mode {name!r} returned shape {advantages.shape} for rewards of shape "
                f"{rewards.shape}; needs the same shape"
            )
        if not np.isfinite(advantages[scored]).all():
            group, rollout = np.argwhere(scored & ~np.isfinite(advantages))[0]
            lacks = not scored.all() or any(np.isnan(part).any() for part in parts.values())
            hint = "; leave NaN rewards (unscored) out of every mean" if lacks else ""
            raise RunFailedError(
                f"advantage_mode {name!r} returned {advantages[group, rollout]} for a reward of "
                f"{rewards[group, rollout]:g}; an advantage must be a finite number{hint}"
            )
        return advantages

    def estimate(rewards: Floats, parts: Mapping[str, Floats] = MappingProxyType({})) -> Floats:
        scored = ~np.isnan(rewards)
        unscored: Floats = np.full(rewards.shape, np.nan)
        every = {part: np.where(scored, parts.get(part, unscored), np.nan) for part in {**weights, **parts}}
        if scored.any() and (over_batch or scored.all()):
            return np.where(scored, checked(rewards, scored, every), 0.0)
        advantages: Floats = np.zeros(rewards.shape)
        counts = scored.sum(axis=1)
        for count in np.unique(counts[counts >= LEAST_ROLLOUTS]).tolist():
            groups = np.flatnonzero(counts == count)
            places = np.nonzero(scored[groups])  # row by row, `count` in each

            shape = len(groups), count
            known = {part: values[groups][places].reshape(shape) for part, values in every.items()}
            rewards_known = rewards[groups][places].reshape(shape)
            estimated = checked(rewards_known, np.ones(shape, dtype=np.bool_), known)
            advantages[groups[places[0]], places[1]] = estimated.ravel()
        return advantages

    return estimate
