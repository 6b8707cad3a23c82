"""Settings of the back-pressure controller, validated once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from retrain.controllers import require
from retrain.controllers.backpressure.curve import Objective

Control = Literal["batch", "microbatch"]


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
        require(
            "objective", self.objective, self.objective in ("throughput", "goodput"), "throughput or goodput"
        )
        require("control", self.control, self.control in ("batch", "microbatch"), "batch or microbatch")
