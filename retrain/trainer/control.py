"""Runs the controllers: what they decide for the next step, and what they learn from the last one.

Their order: configured batch -> back pressure -> load throttle -> learning rate scaled to the batch used.
Where the load of the machine allows nothing, the next step waits.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from retrain.config.schema import Config, ThrottleSection
from retrain.control.rules import StateDict
from retrain.control.rules.backpressure import BackPressure, StepObservation
from retrain.control.rules.scaling import RULES, LearningRateScaling, LEGWRule, schedule_factor
from retrain.control.rules.throttle import ThrottleState
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import worker_pids
from retrain.records.step_row import BackPressureDecision, ControlSummary, ScalingDecision, ThrottleSummary
from retrain.records.text import about
from retrain.trainer.journal import Journal
from retrain.trainer.part import Loop, Part, StepSize, TakenStep

if TYPE_CHECKING:
    from retrain.control.machine.throttle import TrainingThrottle

MOMENT_PARTS = 4  # micro-batches whose gradients are compared to estimate the noise scale
POLL_S = 5.0  # as often as a paused throttle looks at the load


# the controllers' parts of a step's row
ControllerRows: TypeAlias = tuple[
    ControlSummary, BackPressureDecision | None, ThrottleSummary | None, ScalingDecision | None
]


class Control(Part):
    """The controllers of one run."""

    name = "steering"  # since 0.1.0

    def __init__(self, config: Config, data_size: int) -> None:
        self._config = config
        self._group_size = config.training.group_size
        self._keeps_batch = not config.backpressure.enabled or config.backpressure.control == "microbatch"
        seeks_goodput = config.backpressure.enabled and _seeks_goodput(config)
        self._wants_noise = seeks_goodput or config.scaling.rule in ("adascale", "adamscale")
        self._back_pressure = _back_pressure(config)
        table = config.scaling
        is_legw = table.rule == "legw"
        rule = LEGWRule(table.base_warmup_epochs, data_size) if is_legw else RULES[table.rule]()
        self._scaling = LearningRateScaling(rule, config.training.batch_size, table.smoothing)
        self._too_large: list[int] = []  # sizes that did not fit since the last finished step
        self._largest = (
            config.training.batch_size if self._keeps_batch else config.backpressure.max_batch_size
        )

    def next_size(self, load: ThrottleState | None, load_wait_s: float = 0.0) -> StepSize:
        """Return how to run the next step; None as load: the load is not watched."""
        base = self._config.training.batch_size
        most = min(self._back_pressure.batch_size if self._back_pressure else base, self._largest)
        batch = base if self._keeps_batch else most
        multiplier = load.batch_multiplier if load else 1.0
        if self._config.throttle.control == "batch":
            batch = max(1, int(batch * multiplier))
        else:
            most = max(1, int(most * multiplier))
        at_a_time = math.ceil(batch / math.ceil(batch / min(most, batch)))
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
            load_wait_s=load_wait_s,
        )

    def observe(self, taken: TakenStep) -> ControllerRows:
        """Update the controllers with a finished step; return their parts of its row."""
        size, is_trained = taken.size, taken.trained_groups > 0
        control = ControlSummary(
            lr_factor=size.lr_factor,
            prompts_at_a_time=size.at_a_time,
            out_of_memory_at=min(self._too_large, default=None),
        )
        self._too_large.clear()
        self._scaling.count_groups(taken.trained_groups, size.batch_size)
        moments = taken.stats.moments
        learned = is_trained and self._scaling.observe(
            size.scaling,
            moments.local_sqr_norms if moments else None,
            moments.mean_sqr_norm if moments else None,
            informative=taken.trained_groups,
            consecutive=moments is not None and moments.consecutive,
        )
        decision = self._decide(self._back_pressure, taken, learned) if self._back_pressure else None
        throttle = None
        if (load := size.load) is not None:
            throttle = ThrottleSummary(
                level=load.level.value,
                load=load.load,
                batch_multiplier=load.batch_multiplier,
                wait_s=size.load_wait_s,
                reason=load.reason,
            )
        scales = self._config.scaling.rule != "none" or self._wants_noise
        return control, decision, throttle, size.scaling if scales else None

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
        return {
            "back_pressure": self._back_pressure.state_dict() if self._back_pressure else None,
            "scaling": self._scaling.state_dict(),
            "largest": self._largest,
        }

    def load_state_dict(self, state: StateDict) -> None:
        if self._back_pressure is not None and state["back_pressure"] is not None:
            self._back_pressure.load_state_dict(state["back_pressure"])
        self._scaling.load_state_dict(state["scaling"])
        self._largest = int(state["largest"])

    def _decide(self, control: BackPressure, taken: TakenStep, learned: bool) -> BackPressureDecision:
        size = taken.size
        if not taken.trained_groups:  # faster than a step of its size normally is
            return control.hold("not counted: no group carried a signal, so nothing was trained")
        noise_scale = size.scaling.noise_scale * self._group_size  # in rollouts
        return control.observe(
            StepObservation(
                batch_size=size.at_a_time,
                group_size=self._group_size,
                tokens=taken.rollouts.tokens_per_step,
                step_time_s=taken.active_s,
                memory_fraction=taken.stats.memory_fraction,
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


class LoadThrottle(Part):
    """Waits, before a step, while the machine's load allows nothing; watches nothing unless it is enabled."""

    name = "machine"

    def __init__(
        self, table: ThrottleSection, campaign: CampaignFiles, stop: threading.Event, journal: Journal
    ) -> None:
        """Prepare; other workers of the campaign are no foreign load."""
        self._stop, self._journal = stop, journal
        self._throttle: TrainingThrottle | None = None
        self.load: ThrottleState | None = None  # before the step that is taken; None: it is not watched
        self.waited_s = 0.0  # before that step
        if table.enabled:
            from retrain.control.machine.throttle import throttle_of  # here: few runs watch the load

            self._throttle = throttle_of(table, lambda: worker_pids(campaign.runs))

    def before_step(self, loop: Loop) -> None:
        if self._throttle is None:
            return
        self.load, self.waited_s = self._throttle.current(), 0.0
        if self.load.should_train:
            return
        began_s = time.monotonic()

        def show(load: ThrottleState) -> None:
            waited_s = time.monotonic() - began_s
            since = f" for {about(waited_s)}" if waited_s >= 1.0 else ""
            self._journal.phase(f"paused{since}: {load.reason}", loop.step)

        show(self.load)
        self.load = self._throttle.wait_for_idle(poll=POLL_S, stop=self._stop, on_poll=show)
        self.waited_s = time.monotonic() - began_s

    def state_dict(self) -> StateDict:
        return {} if self._throttle is None else self._throttle.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        if self._throttle is not None and state:
            self._throttle.load_state_dict(state)
