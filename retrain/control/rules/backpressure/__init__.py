"""Choose the batch size with the best throughput (or goodput), with a reason for each decision.

Each completed step measures (concurrency, throughput). The controller fits a curve, explores where it is
uncertain, operates at throttle_margin x p*, stays below sizes that ran out of memory, and explores again
after a change point. Concurrency p is batch_size x group_size. No clock and no I/O: observe steps that
completed or ran out of memory, not steps that were skipped or failed for other reasons.

| regime | when | action |
|---|---|---|
| warmup | doubling the batch, at the start and after a change point | hold |
| retrograde | a smaller batch is expected to be better, or out of memory | throttle |
| retrograde | past throttle_margin x p*, but a smaller batch would cost too much | hold |
| compute_bound | a larger batch is expected to be faster | increase |
| compute_bound | under 80 % of the fit, and no other batch would be faster | hold |
| memory_bound | over 110 % of the fit, which the curve does not explain | hold |
| optimal | within 80 to 110 % of the fit, or no fit yet | hold |

A probe has action hold and the regime of the step just run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from retrain.base.rollouts import Floats
from retrain.control.rules import StateDict, require
from retrain.control.rules.backpressure.explore import (
    Explorer,
    MemoryLimit,
    Situation,
    batch_sizes,
    classify,
    nearest,
)
from retrain.control.rules.backpressure.measurements import (
    ENOUGH_SAMPLES,
    STALE_DEVIATION,
    ChangeDetector,
    FittedCurve,
    Measurements,
    NoiseScaleTrack,
    Posterior,
    Residual,
    StepObservation,
    fit_curve,
)
from retrain.control.rules.usl import StepTimeFitter
from retrain.records.step_row import Action, BackPressureDecision, Regime

__all__ = ["BackPressure", "BackPressureDecision", "StepObservation"]

STATE_VERSION = 1
KNOWN = 3.0  # observations of a size after which a second slow step means a slower machine, not a stall


class BackPressure:
    """The controller; run `batch_size`, then `observe` the step.

    An observed batch may differ from the recommended one and arrive out of order: it counts as the newest
    measurement of the nearest candidate size. A batch outside the bounds is ignored, and the decision's
    reason says so. Sizes at or above the smallest that ran out of memory are not recommended again, except
    min_batch_size, the lower bound of every recommendation.

    Args:
        batch_size: prompts of the first step.
        group_size: rollouts per prompt.
        sizes: candidate batch sizes; those outside the bounds are ignored. Default: about eight per
            doubling. The bounds and `batch_size` are always included.
        keys: those of the table [backpressure].

    Raises:
        ValueError: a key is out of range.
    """

    def __init__(
        self, batch_size: int = 8, group_size: int = 8, *, sizes: Iterable[int] | None = None, **keys: Any
    ) -> None:
        from retrain.config.checks import draft_of  # not at the top: it imports pydantic, which few runs need

        draft = draft_of({"backpressure": keys})
        if draft.mistakes:
            raise ValueError("; ".join(f"{problem.where[-1]}: {problem.what}" for problem in draft.mistakes))
        self.settings = draft.config.backpressure
        lowest, highest = self.settings.min_batch_size, self.settings.max_batch_size
        require("max_batch_size", highest, highest >= lowest, "at least min_batch_size")
        sizes = None if sizes is None else list(sizes)
        for name, value in (("batch_size", batch_size), ("group_size", group_size)):
            require(name, value, type(value) is int, "a whole number")
        require("sizes", sizes, all(type(size) is int for size in sizes or ()), "whole numbers")
        bounds = f"min_batch_size {lowest} to max_batch_size {highest}"
        require("batch_size", batch_size, lowest <= batch_size <= highest, bounds)
        require("group_size", group_size, group_size >= 1, "at least 1")
        self.batch_size, self.group_size = batch_size, group_size
        self._sizes = batch_sizes(lowest, highest, batch_size, sizes)
        self._whole_sizes = range(lowest, highest + 1) if sizes is None else self._sizes  # near a limit
        self._concurrency: Floats = np.array(self._sizes, dtype=float) * group_size
        self._fitter = StepTimeFitter(self._concurrency)
        self._measured = Measurements.nothing(len(self._sizes))
        self._posterior = Posterior(self._sizes, group_size)
        self._curve = FittedCurve()
        self._change = ChangeDetector()
        self._memory = MemoryLimit(largest=batch_size)
        self._explorer = Explorer()
        self._noise_scale = NoiseScaleTrack()
        self._throughput = 0.0
        self._refit()

    def observe(self, step: StepObservation) -> BackPressureDecision:
        """Learn from a step and decide the batch size of the next."""
        size = step.batch_size * step.group_size / self.group_size
        if not self._sizes[0] <= size <= self._sizes[-1]:
            bounds = f"{self._sizes[0]}..{self._sizes[-1]}"
            return self.hold(f"ignored: a batch of {size:g} is outside {bounds}")
        index = nearest(self._sizes, size)
        if step.out_of_memory:
            self._memory.exhausted(math.ceil(size))
            self._choose(index)
            reason = f"out of memory at {size:g}"
            if self.batch_size >= size:
                return self._decision("hold", "retrograde", f"{reason}, and min_batch_size allows no less")
            return self._decision("throttle", "retrograde", reason)
        self._memory.fitted(math.floor(size), step.memory_fraction)
        self._noise_scale.add(step.noise_scale)
        throughput = step.tokens / step.step_time_s
        is_first = self._measured.origin is None
        decay = 0.0 if is_first else self.settings.ema_decay
        self._throughput = decay * self._throughput + (1.0 - decay) * throughput
        value = self._measured.relative(throughput)
        verdict = "usual" if is_first else self._judge(index, value)
        if verdict == "stall":
            return self.hold("far slower than predicted; measured again before it counts")
        self._measured.add(index, value)
        self._refit()
        self._choose(index)
        excess = self._curve.excess(float(self._concurrency[index]), float(self._measured.mean[index]))
        is_above = size > self._limit()
        action, regime = classify(size, self.batch_size, self._explorer.purpose, excess, is_above=is_above)
        sought = "throughput" if self._goodput_noise_scale() is None else "goodput"
        reason = {
            "warmup": f"exploring: {self.batch_size} is expected to be faster",
            "probe": f"probing {self.batch_size}, which may be better than predicted",
            "operate": f"best expected {sought} at {self.batch_size}",
        }[self._explorer.purpose]
        if verdict == "changed":
            reason = f"the curve changed; {reason}"
        if is_above and self._explorer.purpose == "operate" and action == "hold":
            margin = self.settings.throttle_margin
            reason += f", above {margin:g} x p*: a smaller batch costs too much or is not allowed"
        return self._decision(action, regime, reason)

    def hold(self, reason: str) -> BackPressureDecision:
        """Return an unchanged decision after a step without a measurement (skipped or failed)."""
        regime: Regime = "retrograde" if self.batch_size > self._limit() else "optimal"
        return self._decision("hold", "warmup" if self._explorer.warming else regime, reason)

    def state_dict(self) -> StateDict:
        """Return the complete state as plain data for JSON."""
        return {
            "version": STATE_VERSION,
            "sizes": list(self._sizes),
            "group_size": self.group_size,
            "batch_size": self.batch_size,
            "throughput": self._throughput,
            "observed": self._measured.state(),
            "change": asdict(self._change),
            "memory": self._memory.state(),
            "explorer": asdict(self._explorer),
            "noise_scale": asdict(self._noise_scale),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a `state_dict`, decision for decision.

        Raises:
            ValueError: the state has another version, other batch sizes or another group size.
        """
        missing = sorted(self.state_dict().keys() - set(state))
        require("state", f"without {missing}", not missing, "every key that `state_dict` returned")
        expected = {"version": STATE_VERSION, "sizes": list(self._sizes), "group_size": self.group_size}
        for name, value in expected.items():
            require(f"state {name}", state.get(name), state.get(name) == value, f"{value}, as configured")
        self.batch_size = int(state["batch_size"])
        self._throughput = float(state["throughput"])
        self._measured = Measurements.from_state(state["observed"])
        self._change = ChangeDetector(**state["change"])
        self._memory = MemoryLimit.from_state(state["memory"])
        self._explorer = Explorer(**state["explorer"])
        self._noise_scale = NoiseScaleTrack(**state["noise_scale"])
        self._refit()

    def _judge(self, index: int, value: float) -> Residual:
        """Compare an observation with its prediction; discount older ones after a change point."""
        surprise = value - float(self._posterior.expected[index])
        open_ = float(self._posterior.shape_variance[index] + self._posterior.own_variance[index])
        deviation = math.sqrt(self._measured.noise_variance + open_)
        is_known = float(self._measured.count[index]) > KNOWN
        verdict = self._change.judge(surprise, deviation, self._measured.noise, is_known=is_known)
        if verdict != "stall":
            self._measured.learn_noise(index, surprise)
        if verdict == "changed":
            measured = self._measured  # of which all observations before count for less
            np.minimum(measured.count, measured.noise_variance / STALE_DEVIATION**2, out=measured.count)
            self._explorer.restart()
        return verdict

    def _refit(self) -> None:
        self._posterior.update(self._measured)
        self._curve = fit_curve(self._fitter, self._concurrency, self._posterior, self._measured.mean)

    def _choose(self, index: int) -> None:
        noise_scale = self._goodput_noise_scale()
        value = self._posterior.expected
        if noise_scale is not None:
            value = value - np.log(noise_scale + self._concurrency)
        largest, highest = self._largest()
        limit = self._limit()
        if limit < math.inf:
            limit = self._whole_sizes[max(0, bisect_right(self._whole_sizes, limit) - 1)]
        situation = Situation(
            posterior=self._posterior,
            measured=self._measured,
            settings=self.settings,
            sizes=self._sizes,
            value=value,
            highest=highest,
            current=index,
            limit=limit,
        )
        chosen = self._explorer.choose(situation)
        self.batch_size = largest if chosen == highest else self._sizes[chosen]
        if chosen == nearest(self._sizes, limit):
            self.batch_size = int(min(self.batch_size, limit))

    def _largest(self) -> tuple[int, int]:
        """Return the largest batch that memory allows, and the index of the largest size within it."""
        largest = self._memory.highest(self._whole_sizes)
        return largest, bisect_right(self._sizes, largest) - 1

    def _limit(self) -> float:
        """Return throttle_margin x p* in prompts; infinite without p* or while it is not determined."""
        p_star = self._curve.best(self._goodput_noise_scale())
        return math.inf if p_star is None else self.settings.throttle_margin * p_star / self.group_size

    def _goodput_noise_scale(self) -> float | None:
        """Return the noise scale that goodput uses; None when maximizing throughput."""
        is_goodput = self.settings.objective == "goodput" and self.settings.control == "batch"
        return self._noise_scale.noise_scale if is_goodput else None

    def _decision(self, action: Action, regime: Regime, reason: str) -> BackPressureDecision:
        noise_scale = self._goodput_noise_scale()
        if self.settings.objective == "goodput" and noise_scale is None:
            why = f"{self._noise_scale.samples} of {ENOUGH_SAMPLES} noise-scale samples so far"
            if self.settings.control == "microbatch":
                why = "a micro-batch's size does not affect learning"
            reason += f" (throughput: {why})"
        utilization = None
        if self._curve.time is not None:
            expected = self._posterior.expected
            best = float(expected[: self._largest()[1] + 1].max())
            utilization = math.exp(min(0.0, float(expected[nearest(self._sizes, self.batch_size)]) - best))
        sigma, kappa = None, None
        if self._curve.time is not None and self._curve.is_determined:
            sigma, kappa, _ = self._curve.time.coefficients
        return BackPressureDecision(
            action=action,
            regime=regime,
            batch_size=self.batch_size,
            p_star=self._curve.best(noise_scale),
            sigma=sigma,
            kappa=kappa,
            utilization=utilization,
            throughput=self._throughput,
            reason=reason,
        )
