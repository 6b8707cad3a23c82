"""Settings, input and output of the back-pressure controller: one step, one decision.

| regime | when | action |
|---|---|---|
| warmup | doubling the batch, at the start and after a change point | hold |
| retrograde | past throttle_margin x p*, a measured drop, or out of memory | throttle |
| compute_bound | a larger batch is expected to be faster | increase |
| compute_bound | under 80 % of the fit, and no other batch would be faster | hold |
| memory_bound | over 110 % of the fit, which the curve does not explain | hold |
| optimal | within 80 to 110 % of the fit, or no fit yet | hold |

A probe has action hold and the regime of the step just run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from retrain.controllers import require
from retrain.controllers.backpressure.explore import Purpose

Objective = Literal["throughput", "goodput"]
Control = Literal["batch", "microbatch"]
Action = Literal["hold", "throttle", "increase"]
Regime = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]

HEADROOM, SHORTFALL = 1.1, 0.8  # measured over fitted throughput


def classify(size: float, following: int, purpose: Purpose, over_fit: float) -> tuple[Action, Regime]:
    """Return the action and the regime of a completed step.

    Args:
        size: the batch that ran.
        following: the batch to run next.
        purpose: why the next batch was chosen.
        over_fit: measured over fitted throughput at `size`; 1 without a fit.
    """
    if purpose == "warmup":
        return "hold", "warmup"
    if purpose == "operate" and following < size:
        return "throttle", "retrograde"
    if purpose == "operate" and following > size:
        return "increase", "compute_bound"
    if over_fit > HEADROOM:
        return "hold", "memory_bound"
    return "hold", "compute_bound" if over_fit < SHORTFALL else "optimal"


@dataclass(frozen=True)
class Settings:
    """Keys of the TOML table, with their defaults.

    Attributes:
        warmup_steps: limit of steps that double the batch, at the start and after a change point.
        ema_decay: weight of the old value in the reported moving average of throughput, in [0, 1).
        throttle_margin: operating point as a fraction of p*, in (0, 1].
        increase_margin: below this fraction of the operating point, the batch grows without a required gain.
        min_batch_size, max_batch_size: bounds of every recommendation, in prompts.
        peak_gflops, peak_bw_gb_s: the machine's peaks for roofline hints; 0 if unknown.
        objective: maximize tokens per second, or goodput.
        control: what a recommendation changes, the batch or only its micro-batches.
    """

    warmup_steps: int = 10
    ema_decay: float = 0.9
    throttle_margin: float = 0.85
    increase_margin: float = 0.5
    min_batch_size: int = 1
    max_batch_size: int = 64
    peak_gflops: float = 0.0
    peak_bw_gb_s: float = 0.0
    objective: Objective = "throughput"
    control: Control = "batch"

    def __post_init__(self) -> None:
        """Raise ValueError for the first key out of range."""
        for name in ("warmup_steps", "min_batch_size", "max_batch_size"):
            require(name, getattr(self, name), type(getattr(self, name)) is int, "a whole number")
        require("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "at least 0")
        require("ema_decay", self.ema_decay, 0.0 <= self.ema_decay < 1.0, "a number in [0, 1)")
        for name in ("throttle_margin", "increase_margin"):
            value = getattr(self, name)
            require(name, value, 0.0 < value <= 1.0, "a number in (0, 1]")
        require("min_batch_size", self.min_batch_size, self.min_batch_size >= 1, "at least 1")
        largest = self.max_batch_size
        require("max_batch_size", largest, largest >= self.min_batch_size, "at least min_batch_size")
        for name in ("peak_gflops", "peak_bw_gb_s"):
            value = getattr(self, name)
            require(name, value, 0.0 <= value < math.inf, "finite and at least 0 (0: unknown)")
        for name, known in (("objective", get_args(Objective)), ("control", get_args(Control))):
            require(name, getattr(self, name), getattr(self, name) in known, " or ".join(known))


@dataclass(frozen=True)
class StepObservation:
    """One step that completed or ran out of memory.

    Attributes:
        batch_size: prompts in the step.
        group_size: rollouts per prompt.
        tokens: number of sampled tokens, informative or not.
        step_time_s: duration of the step.
        out_of_memory: the step did not fit; tokens and time are then ignored.
        memory_fraction: peak fraction of memory in use, in [0, 1]; None if unknown or meaningless (a
            pool reserved in advance).
        noise_scale: measured gradient noise scale in samples, or None. A value that is not positive and
            finite is skipped.

    Raises:
        ValueError: a value is not a valid measurement.
    """

    batch_size: int
    group_size: int
    tokens: float
    step_time_s: float
    out_of_memory: bool = False
    memory_fraction: float | None = None
    noise_scale: float | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for values that would corrupt the fit."""
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
    """The next batch size, with the reason.

    Attributes:
        action: hold, throttle or increase; exploring counts as hold.
        regime: regime of the observed step (table above).
        batch_size: prompts to run next.
        p_star: fitted optimal concurrency; infinite without an optimum, or with fewer than three sizes known.
        sigma, kappa: fitted contention and crosstalk; 0 until three sizes are known.
        utilization: expected throughput of `batch_size` over the highest fitted within the bounds; 0 while
            unknown.
        throughput: moving average of tokens per second.
        reason: short explanation.
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
