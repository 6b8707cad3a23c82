"""What goes into the back-pressure controller and what comes out: one step, one decision."""

from __future__ import annotations

import math
from dataclasses import dataclass

from retrain.controllers.backpressure.regime import Action, Regime
from retrain.controllers.checks import require


@dataclass(frozen=True)
class StepObservation:
    """One step that completed or ran out of memory.

    Attributes:
        batch_size: prompts in the step.
        group_size: rollouts per prompt.
        tokens: all sampled tokens, informative or not.
        step_time_s: seconds the step took.
        out_of_memory: the step did not fit; tokens and time are then not looked at.
        memory_fraction: peak share of memory that was used, in [0, 1]; None when not known or not
            telling (a pool that is reserved in advance).
        noise_scale: measured gradient noise scale in samples; None without one. A value that is not
            positive and finite says nothing and is skipped.

    Raises:
        ValueError: a value that cannot be a measurement.
    """

    batch_size: int
    group_size: int
    tokens: float
    step_time_s: float
    out_of_memory: bool = False
    memory_fraction: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        """Refuse what would poison a fit."""
        require("batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        require("group_size", self.group_size, self.group_size >= 1, "at least 1")
        if self.memory_fraction is not None:
            inside = 0.0 <= self.memory_fraction <= 1.0
            require("memory_fraction", self.memory_fraction, inside, "a number in [0, 1]")
        if not self.out_of_memory:
            require("tokens", self.tokens, 0.0 < self.tokens < math.inf, "a positive, finite count")
            finite = 0.0 < self.step_time_s < math.inf
            require("step_time_s", self.step_time_s, finite, "a positive, finite number of seconds")
            rate = self.tokens / self.step_time_s
            require("tokens / step_time_s", rate, 1e-30 < rate < 1e30, "a rate from 1e-30 to 1e30 a second")


@dataclass(frozen=True)
class Decision:
    """What to run next, and why.

    Attributes:
        action: hold, throttle or increase; exploring counts as hold.
        regime: where the observed step ran (the table in `regime.py`).
        batch_size: prompts to run next.
        p_star: fitted best concurrency; infinite when there is none, or fewer than three sizes are known.
        sigma, kappa: fitted contention and crosstalk; 0 until three sizes are known.
        utilization: throughput expected of `batch_size` over the best that the fit offers between the bounds;
            0 while unknown.
        throughput: moving average of tokens per second.
        reason: why, in a few words.
    """

    action: Action
    regime: Regime
    batch_size: int
    p_star: float
    sigma: float
    kappa: float
    utilization: float
    throughput: float
    reason: str
