"""Signs that a run needs a look: its policies drift apart, nothing is learned, or two runs do the same.

And how to tell a change of a series from noise whose successive values are alike, and whose means therefore
wander. Source of the autocorrelation's bias in short series: Kendall 1954, doi:10.2307/2332719.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from retrain.base.rollouts import Floats
from retrain.records.step_row import RolloutSummary

MOST_PERSISTENT = 0.97  # autocorrelation; noise above it cannot be told from a trend in some hundred values
ROUNDING = 1e-12  # squared residual of a value on a straight line


def window_rises(values: Floats, window: int) -> Floats:
    """Return by how much the mean of each window is above that of the window before it; NaN if unknown."""
    if len(values) < 2 * window:
        return np.zeros(0)
    means = sliding_window_view(values, window).mean(axis=1)
    return np.asarray(means[window:] - means[:-window])


def deviation(values: Floats) -> float:
    """Return the standard deviation of most values, as of normal noise; 0 if none is known."""
    finite = values[np.isfinite(values)]
    return 1.4826 * float(np.median(np.abs(finite - np.median(finite)))) if finite.size else 0.0


def trend_score(values: Floats) -> float:
    """Return the slope over time in standard errors, with the autocorrelation that the residuals show.

    Infinite for a straight line that rises.
    """
    count = len(values)
    times = np.arange(count) - (count - 1) / 2
    spread, product = max(float(times @ times), 1.0), float(times @ values)
    residuals = values - values.mean() - times * product / spread
    squares = float(residuals @ residuals)
    if squares <= ROUNDING * count:
        return math.inf if product > 0.0 else 0.0
    autocorrelation = float(residuals[1:] @ residuals[:-1]) / squares
    autocorrelation += (1 + 4 * autocorrelation) / count
    autocorrelation = min(max(autocorrelation, 0.0), MOST_PERSISTENT)
    variance = squares / max(count - 2, 1) * (1 + autocorrelation) / (1 - autocorrelation)
    return product / math.sqrt(variance * spread)


WINDOW = 10  # steps between two looks
RISES = 3  # in a row, of the means of a span's quarters
FACTOR = 2.0  # of the first of these means
NOTABLE = 1e-3  # nats per token: rounding in bfloat16 stays below
LEAST = 1e-5  # below it, logs tell rounding from rounding
# Steps looked at together, and the standard errors that the trend of their logs needs: noise with an
# autocorrelation of 0.9 reaches each in about 1 % of runs of 500 steps. Few steps tell little of that noise.
SPANS: Mapping[int, float] = {40: 14.5, 80: 9.5, 160: 5.6, 320: 3.5}


@dataclass
class MismatchTrend:
    """Follows from step to step whether trainer and sampler move away from each other, by `mismatch_kl`.

    They never agree exactly. A mean over many steps that rises several times in a row, to a multiple of what
    it was, is a sampler that computes something else than the trainer, and more so with each update: often
    the beginning of a collapse. Differences of successive steps are alike, so that their means wander without
    a cause: a rise counts if its trend stands out of such noise.
    """

    values: list[float] = field(default_factory=list)  # of the longest span, or since the last warning
    rise: str = ""  # the last one that was warned of

    def observe(self, mismatch_kl: float, step: int) -> str:
        """Take the value of a step; return a warning if it grows steadily, else ""."""
        self.values.append(mismatch_kl)
        if len(self.values) % WINDOW:
            return ""
        self.values = self.values[-max(SPANS) :]
        for span, certain in SPANS.items():
            values = self.values[-span:]
            if len(values) < span:
                continue
            size = span // (RISES + 1)
            means = [math.fsum(values[at : at + size]) / size for at in range(0, span, size)]
            rises = all(later > sooner for sooner, later in pairwise(means))
            is_notable = means[-1] >= max(NOTABLE, FACTOR * means[0])
            if rises and is_notable and trend_score(np.log(np.maximum(values, LEAST))) >= certain:
                self.values = values[-WINDOW:]  # the next warning needs another multiple
                self.rise = (
                    f"mismatch_kl rose steadily from {means[0]:.2g} to {means[-1]:.2g} nats per token in "
                    f"{span} steps, up to step {step}"
                )
                return self.rise
        return ""


NOTABLE_STEPS = 10  # steps in a row
CUT_OFF = 0.9  # share of completions
SAME = 0.01  # nats per token


@dataclass
class SignalWatch:
    """Follows how long no completion has done better than its group's others; sums are over these steps.

    A run goes on without a failure then, and its policy stays as it is.
    """

    steps: int = 0
    rewards: float = 0.0
    correct: float = 0.0
    truncated: float = 0.0
    unjudged: int = 0  # of these steps, those of which no completion could be judged

    def observe(self, step: int, rollouts: RolloutSummary, *, trained: bool, entropy: float | None) -> str:
        """Take a step; return how long there has been no signal and a likely reason, "" if not for long.

        A policy that has learned its task has nothing left to learn, which is not told.

        Args:
            trained: whether any completion entered the loss.
            entropy: nats per token, None if not known.
        """
        if trained and rollouts.zero_signal_group_fraction < 1:
            vars(self).update(asdict(SignalWatch()))
            return ""
        self.steps += 1
        if rollouts.mean_reward is None:
            self.unjudged += 1
        self.rewards += rollouts.mean_reward or 0.0
        self.correct += rollouts.correct_rate or 0.0
        self.truncated += rollouts.max_token_hit_rate
        first, judged = step - self.steps + 1, self.steps - self.unjudged
        if self.steps < NOTABLE_STEPS or (first > 1 and judged and self.correct == judged):
            return ""
        what = f"no learning signal in steps {first} to {step}"
        if not judged:
            return f"{what}: the reward can judge no completion; correct it, or use prompts that it can judge"
        why = self._why(entropy, from_start=first == 1)
        return f"{what}, with a mean reward of {self.rewards / judged:.3g}: {why}"

    def _why(self, entropy: float | None, *, from_start: bool) -> str:
        if self.correct == self.steps - self.unjudged:
            return "every completion has a reward of 1; use harder prompts, or check the reward"
        are_same, share = entropy is not None and entropy < SAME, self.truncated / self.steps
        if share >= CUT_OFF and (from_start or not are_same):
            other = "ask for shorter answers" if from_start else "lower [training].lr"
            what = "raise [training].max_tokens (or what limits an episode)"
            return f"{share:.0%} of completions were cut off; {what}, or {other}"
        if are_same:
            hint = "raise temperature or entropy_bonus"
            hint = hint if from_start else f"lower [training].lr, or {hint}"
            return f"completions hardly differ (entropy {entropy:.2g} nats per token); {hint}"
        if self.correct:
            return "prompts are always solved or never; raise [training].group_size, or use other prompts"
        other = "partial credit or [warmup]" if from_start else "a lower [training].lr"
        return f"no completion has a reward of 1; read `retrain samples`, and try easier prompts or {other}"


STRANGE = 0.1  # share of tokens that a teacher would hardly ever have written
FALLS = 0.9  # of the mean before; a policy that learns falls further


@dataclass
class TeacherSupport:
    """Follows whether a policy writes what its teacher never would, whose judgement is then worth little.

    Much of what a policy writes at its start may be that; it is a sign where the share does not fall.
    """

    outside: list[float] = field(default_factory=list)  # shares of the last steps

    def observe(self, outside: float, step: int) -> str:
        """Take a step's share of tokens outside the teacher's support; return what is notable, or ""."""
        self.outside = [*self.outside, outside][-2 * NOTABLE_STEPS :]
        before, now = self.outside[:-NOTABLE_STEPS], self.outside[-NOTABLE_STEPS:]
        mean = math.fsum(now) / NOTABLE_STEPS
        if len(before) < NOTABLE_STEPS or mean < max(STRANGE, FALLS * math.fsum(before) / NOTABLE_STEPS):
            return ""
        return (
            f"the teacher would hardly ever have written {mean:.0%} of the policy's tokens in steps "
            f"{step - NOTABLE_STEPS + 1} to {step}, no fewer than before; start from a better policy "
            "(model.adapter, [warmup]), lower [training].lr, or name a teacher that knows the task's form"
        )


STEPS = 10  # that are compared


@dataclass
class FirstSteps:
    """Follows the first steps of a run: whether two do the same, to the last digit, as one short text.

    Runs of one seed whose conditions differ in a way without effect take the same steps. The steps that count
    begin with the first update, since before it even a learning rate has no effect.
    """

    steps: int = 0
    digest: str = ""

    def observe(self, values: Iterable[float | None], *, trained: bool) -> str:
        """Take a step's results; return the digest of the first steps once all are known, "" before.

        Args:
            values: results that no clock decides.
            trained: whether any completion entered the loss.
        """
        if self.steps < STEPS and (trained or self.steps):
            self.steps += 1
            text = f"{self.digest} {list(values)!r}"
            self.digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return self.digest if self.steps == STEPS else ""
