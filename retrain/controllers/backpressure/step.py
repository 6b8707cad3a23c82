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

Objective = Literal["throughput", "goodput"]
Control = Literal["batch", "microbatch"]
Action = Literal["hold", "throttle", "increase"]
Purpose = Literal["warmup", "probe", "operate"]  # why a batch size was chosen
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
    """Keys of the TOML table, with their defaults."""

    warmup_steps: int = 10  # limit of steps that double the batch, at the start and after a change point
    ema_decay: float = 0.9  # weight of the old value in the reported average of throughput, in [0, 1)
    throttle_margin: float = 0.85  # operating point as a fraction of p*, in (0, 1]
    increase_margin: float = 0.5  # below this fraction of it, the batch grows without a required gain
    min_batch_size: int = 1  # bounds of every recommendation, in prompts
    max_batch_size: int = 64
    peak_gflops: float = 0.0  # the machine's peaks for roofline hints; 0 if unknown
    peak_bw_gb_s: float = 0.0
    objective: Objective = "throughput"  # what to maximize: tokens per second, or goodput
    control: Control = "batch"  # what a recommendation changes: the batch, or only its micro-batches

    def __post_init__(self) -> None:
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

    Raises:
        ValueError: a value is not a valid measurement and would corrupt the fit.
    """

    batch_size: int  # prompts in the step
    group_size: int  # rollouts per prompt
    tokens: float  # number of sampled tokens, informative or not
    step_time_s: float
    out_of_memory: bool = False  # the step did not fit; tokens and time are then ignored
    memory_fraction: float | None = None  # peak in use, in [0, 1]; None if unknown or reserved in advance
    noise_scale: float | None = None  # gradient noise scale in samples; skipped unless positive and finite

    def __post_init__(self) -> None:
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
    """The next batch size, with the reason."""

    action: Action  # exploring counts as hold
    regime: Regime  # of the observed step (table above)
    batch_size: int  # prompts to run next
    p_star: float  # fitted optimal concurrency; infinite without one, or with fewer than three sizes known
    sigma: float  # fitted contention; 0 until three sizes are known
    kappa: float  # fitted crosstalk, likewise
    utilization: float  # expected throughput over the highest fitted within the bounds; 0 while unknown
    throughput: float  # moving average of tokens per second
    reason: str
