"""Input and output of the back-pressure controller: one step, one decision.

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
from typing import Literal

from retrain.controllers import require

Action = Literal["hold", "throttle", "increase"]
Purpose = Literal["warmup", "probe", "operate"]  # why a batch size was chosen
Regime = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]

HEADROOM, SHORTFALL = 1.1, 0.8  # measured over fitted throughput


def classify(size: float, following: int, purpose: Purpose, over_fit: float) -> tuple[Action, Regime]:
    """Return the action and the regime of a completed step of `size`, after which `following` is run.

    `over_fit` is measured over fitted throughput at `size`; 1 without a fit.
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
class BackPressureDecision:
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
