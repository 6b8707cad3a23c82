"""Runs the controllers: what they decide for the next step, and what they learn from the last one.

Their order: configured batch -> back pressure -> load throttle -> learning rate scaled to the batch used.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from retrain.backends import UpdateStats
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.control.rules.backpressure import BackPressure, StepObservation
from retrain.control.rules.first_steps import FirstSteps
from retrain.control.rules.mismatch import MismatchTrend
from retrain.control.rules.no_signal import NOTABLE, SignalWatch
from retrain.control.rules.scaling.rules import RULES, LearningRateScaling, LEGWRule, schedule_factor
from retrain.control.rules.throttle import ThrottleState
from retrain.records.row_parts import ApiPause
from retrain.records.step_row import (
    BackPressureDecision,
    ControlSummary,
    EpisodeSummary,
    RolloutSummary,
    ScalingDecision,
    ThrottleSummary,
    Timing,
    Unscored,
)

log = logging.getLogger(__name__)
MOMENT_PARTS = 4  # micro-batches whose gradients are compared to estimate the noise scale


@dataclass(frozen=True, slots=True)
class StepSize:
    """How to run the next step, and why."""

    batch_size: int  # prompts of the step
    at_a_time: int  # prompts sampled and trained on at a time
    parts: int  # micro-batches of an optimizer step: at least its prompts / at_a_time
    lr_factor: float
    gpu_fraction: float
    wants_moments: bool  # whether the noise scale is estimated
    scaling: ScalingDecision
    load: ThrottleState | None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the controllers learn from a finished step."""

    timing: Timing
    rollouts: RolloutSummary
    stats: UpdateStats
    trained_groups: int  # with a gradient; with a KL term or an entropy bonus, tied groups too
    entropy: float | None  # of the tokens as sampled, in nats
    episodes: EpisodeSummary | None = None
    unscored: Unscored | None = None
    pause: ApiPause | None = None

    @property
    def active_s(self) -> float:
        """The step's time without the pauses of an API, which say nothing about its size."""
        paused_s = self.pause.pause_s if self.pause else 0.0
        return max(self.timing.step_time_s - paused_s, 0.01 * self.timing.step_time_s)


@dataclass(frozen=True, slots=True)
class ControllerRows:
    """The controllers' parts of a step's row."""

    control: ControlSummary
    back_pressure: BackPressureDecision | None
    throttle: ThrottleSummary | None
    scaling: ScalingDecision | None


class Control:
    """The controllers of one run."""

    def __init__(self, config: Config, data_size: int) -> None:
        self._config = config
        self._group_size = config.training.group_size
        self._keeps_batch = not config.backpressure.enabled or config.backpressure.control == "microbatch"
        seeks_goodput = config.backpressure.enabled and _seeks_goodput(config)
        self._wants_noise = seeks_goodput or config.scaling.rule in ("adascale", "adamscale")
        self._back_pressure = _back_pressure(config)
        self._scaling = _scaling(config, data_size)
        self._mismatch = MismatchTrend()
        self._signal = SignalWatch()
        self._first_steps = FirstSteps()
        self._too_large: list[int] = []  # sizes that did not fit since the last finished step
        self._largest = (
            config.training.batch_size if self._keeps_batch else config.backpressure.max_batch_size
        )

    def next_size(self, load: ThrottleState | None) -> StepSize:
        """Return how to run the next step; None as load: the load is not watched."""
        base = self._config.training.batch_size
        wanted = min(self._back_pressure.batch_size if self._back_pressure else base, self._largest)
        batch = base if self._keeps_batch else wanted
        multiplier = load.batch_multiplier if load else 1.0
        if self._config.throttle.control == "batch":
            batch = max(1, int(batch * multiplier))
        else:
            wanted = max(1, int(wanted * multiplier))
        at_a_time = math.ceil(batch / math.ceil(batch / min(wanted, batch)))
        scaling = self._scaling.decide(batch)
        schedule = schedule_factor(
            self._config.training.lr_schedule,
            scaling.progress,
            self._config.training.max_steps,
            self._config.training.lr_warmup_steps,
        )
        minibatch = math.ceil(batch / self._config.training.minibatches)
        parts = math.ceil(minibatch / at_a_time)
        return StepSize(
            batch_size=batch,
            at_a_time=at_a_time,
            parts=max(parts, min(minibatch, MOMENT_PARTS)) if self._wants_noise else parts,
            lr_factor=scaling.lr_factor * schedule,
            gpu_fraction=load.gpu_fraction if load else 1.0,
            wants_moments=self._wants_noise,
            scaling=scaling,
            load=load,
        )

    def observe(self, size: StepSize, facts: StepFacts, step: int) -> ControllerRows:
        """Update the controllers with a finished step, of this number; return their parts of its row."""
        no_signal = self._notice(facts, step)
        control = ControlSummary(
            lr_factor=size.lr_factor,
            prompts_at_a_time=size.at_a_time,
            out_of_memory_at=min(self._too_large, default=None),
            mismatch_rise=self._mismatch.rise or None,
            no_signal=no_signal or None,
            first_steps=self._first_steps.observe(
                self._results(size, facts), trained=facts.trained_groups > 0
            )
            or None,
        )
        self._too_large.clear()
        self._scaling.count_groups(facts.trained_groups, size.batch_size)
        learned = facts.trained_groups > 0 and self._learn_noise(size, facts)
        pressure, load = self._back_pressure, size.load
        decided = self._decision(pressure, size, facts, learned) if pressure else None
        throttle = None
        if load is not None:
            throttle = ThrottleSummary(
                level=load.level.value,
                load=load.load,
                batch_multiplier=load.batch_multiplier,
                reason=load.reason,
            )
        scales = self._config.scaling.rule != "none" or self._wants_noise
        return ControllerRows(control, decided, throttle, size.scaling if scales else None)

    def _notice(self, facts: StepFacts, step: int) -> str:
        """Warn of what became notable with a step; return how long there has been no signal, "" if not."""
        if (mismatch := facts.stats.mismatch) and (said := self._mismatch.observe(mismatch.kl, step)):
            log.warning("%s; algorithm.ratio_cap limits what that does to the gradient", said)
        trained = facts.trained_groups > 0
        said = self._signal.observe(step, facts.rollouts, trained=trained, entropy=facts.entropy)
        if said and self._signal.steps == NOTABLE:
            log.warning("%s", said)
        return said

    def _results(self, size: StepSize, facts: StepFacts) -> Iterator[float | None]:
        """Iterate over a step's results that no clock decides."""
        rollouts, stats = facts.rollouts, facts.stats
        yield from (size.batch_size, self._config.training.lr * size.lr_factor)
        yield from (
            rollouts.mean_reward,
            rollouts.reward_std,
            rollouts.correct_rate,
            rollouts.tokens_per_step,
        )
        yield from (stats.loss, stats.grad_norm, stats.entropy, stats.clip_fraction, stats.approx_kl)

    def out_of_memory(self, size: StepSize) -> bool:
        """Record that a step did not fit in memory; return whether the next one is smaller."""
        self._too_large.append(size.at_a_time)
        if self._back_pressure is not None:
            self._back_pressure.observe(
                StepObservation(size.at_a_time, self._group_size, 0, 0.0, out_of_memory=True)
            )
        if self._back_pressure is None or self._back_pressure.batch_size >= size.at_a_time:
            self._largest = max(1, size.at_a_time // 2)
        return size.at_a_time > 1

    def state_dict(self) -> StateDict:
        """Return the controllers' state, JSON-able."""
        return {
            "back_pressure": self._back_pressure.state_dict() if self._back_pressure else None,
            "scaling": self._scaling.state_dict(),
            "largest": self._largest,
            "mismatch": self._mismatch.state_dict(),
            "signal": self._signal.state_dict(),
            "first_steps": self._first_steps.state_dict(),
        }

    def load_state_dict(self, state: StateDict) -> None:
        if self._back_pressure is not None and state["back_pressure"] is not None:
            self._back_pressure.load_state_dict(state["back_pressure"])
        self._scaling.load_state_dict(state["scaling"])
        self._largest = int(state["largest"])
        self._mismatch.load_state_dict(state["mismatch"])
        self._signal.load_state_dict(state["signal"])
        self._first_steps.load_state_dict(state["first_steps"])

    def _learn_noise(self, size: StepSize, facts: StepFacts) -> bool:
        moments = facts.stats.moments
        if moments is None:
            return self._scaling.observe(size.scaling, None, None)
        return self._scaling.observe(
            size.scaling,
            moments.local_sqr_norms,
            moments.mean_sqr_norm,
            informative=facts.trained_groups,
            consecutive=moments.consecutive,
        )

    def _decision(
        self, control: BackPressure, size: StepSize, facts: StepFacts, learned: bool
    ) -> BackPressureDecision:
        if not facts.trained_groups:  # faster than a step of its size normally is
            return control.hold("not counted: no group carried a signal, so nothing was trained")
        noise_scale = size.scaling.noise_scale * self._group_size  # in rollouts
        return control.observe(
            StepObservation(
                batch_size=size.at_a_time,
                group_size=self._group_size,
                tokens=facts.rollouts.tokens_per_step,
                step_time_s=facts.active_s,
                memory_fraction=facts.stats.memory_fraction,
                noise_scale=noise_scale if learned and math.isfinite(noise_scale) else None,
            )
        )


def _seeks_goodput(config: Config) -> bool:
    return config.backpressure.objective == "goodput" and config.backpressure.control == "batch"


def _back_pressure(config: Config) -> BackPressure | None:
    keys = dataclasses.asdict(config.backpressure)
    if not keys.pop("enabled"):
        return None
    if _seeks_goodput(config):  # the gradient of a single prompt says nothing about the noise
        keys["min_batch_size"] = max(keys["min_batch_size"], min(2, keys["max_batch_size"]))
    if config.backpressure.control == "microbatch":  # only sizes that cut the batch evenly
        batch, lowest = config.training.batch_size, keys["min_batch_size"]
        cuts = {math.ceil(batch / parts) for parts in range(1, batch + 1)}
        lowest = min(cut for cut in cuts if cut >= lowest)
        keys |= {"sizes": cuts, "min_batch_size": lowest, "max_batch_size": batch}
    return BackPressure(config.training.batch_size, config.training.group_size, **keys)


def _scaling(config: Config, data_size: int) -> LearningRateScaling:
    table = config.scaling
    rule = LEGWRule(table.base_warmup_epochs, data_size) if table.rule == "legw" else RULES[table.rule]()
    return LearningRateScaling(rule, config.training.batch_size, table.smoothing)
