"""Puts the results of a comparison into numbers, a table and sentences, the same for terminals and pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrain.records.text import MISSING, count_of, first_of
from retrain.report.compare import Comparison, Judged, MetricComparison, SideResult, Verdict
from retrain.report.statistics import FEWEST_SEEDS

DIRECTIONS = {True: "higher is better", False: "lower is better", None: ""}
MOST_NAMED = 5  # conditions in one sentence
Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # headers, of which '>' aligns the column right; rows


def significant(value: float | None, *, signed: bool = False) -> str:
    """Return three significant digits, or a dash."""
    if value is None or not math.isfinite(value):
        return MISSING
    sign = "+" if signed and value > 0 else ""
    if value == 0 or abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{sign}{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{sign}{value:,.{digits}f}"


def interval(low: float | None, high: float | None, *, signed: bool = True) -> str:
    """Return an interval, or a dash."""
    if low is None or high is None:
        return MISSING
    return f"{significant(low, signed=signed)} to {significant(high, signed=signed)}"


def results(metric: MetricComparison) -> Table:
    """Return one row per side, its values and its difference from the first; important columns come first.

    Of sides that ran for different numbers of steps, all that is known of the difference is its size.
    """
    known = (">mean", ">difference", "95 % interval", ">runs", ">failed", ">IQM", ">P(higher)")
    judged = [None, *metric.differences]
    rows = [_result(side, one, metric) for side, one in zip(metric.sides, judged, strict=True)]
    return ("condition", *known, "bootstrap interval", "verdict"), rows


def _result(side: SideResult, judged: Judged | None, metric: MetricComparison) -> tuple[str, ...]:
    sample, size = side.sample, ""
    limits = higher = bootstrap = MISSING if judged else ""
    if judged:
        gap = judged.difference
        size = significant(gap.difference, signed=True)
        if judged.verdict != Verdict.OTHER_STEPS:
            limits, higher = interval(gap.low, gap.high), significant(gap.improvement)
            bootstrap = interval(gap.bootstrap_low, gap.bootstrap_high)
    runs = f"{sample.n} of {side.runs}" if sample.n < side.runs else str(sample.n)
    own = significant(sample.mean), size, limits, runs, str(side.failed), significant(sample.iqm)
    return (side.label, *own, higher, bootstrap, judgement(judged, metric) if judged else "")


def heading(metric: MetricComparison) -> str:
    """Return how a metric's values are computed, and whether higher is better."""
    return "; ".join(filter(None, (metric.how, DIRECTIONS[metric.higher_is_better])))


def left_out(sides: Sequence[SideResult]) -> Iterator[str]:
    """Return which runs were left out, and which are judged after different numbers of steps."""
    alike: dict[tuple[str, str], list[str]] = {}
    for side in sides:
        why = {"failed": side.failed, "not finished": side.unfinished, "without this metric": side.silent}
        if parts := [f"{count} {reason}" for reason, count in why.items() if count]:
            alike.setdefault((count_of(side.runs, "run"), " and ".join(parts)), []).append(side.label)
    for (runs, what), labels in alike.items():
        each = " each" if len(labels) > 1 else ""
        yield f"{first_of(labels)}: of {runs}{each}, {what}: left out"
    yield from _other_steps(sides)


def _other_steps(sides: Sequence[SideResult]) -> Iterator[str]:
    judged = [(side.label, *side.steps) for side in sides if side.steps and side.sample.n]
    steps = {step for _, *both in judged for step in both}
    if len(steps) > 1:
        (first, low, high), *others = judged
        rest = "".join(f", {label} {_range(*both)}" for label, *both in others[:MOST_NAMED])
        rest += ", and so on" if len(others) > MOST_NAMED else ""
        advice = f"; --step {min(steps)} compares them after equally many" if min(steps) else ""
        yield f"{first} ran {_range(low, high)} steps{rest}{advice}"


def judgement(judged: Judged, metric: MetricComparison) -> str:
    """Return the verdict, and whether it is better or worse."""
    if judged.verdict not in (Verdict.HIGHER, Verdict.LOWER) or metric.higher_is_better is None:
        return str(judged.verdict)
    is_better = (judged.verdict == Verdict.HIGHER) == metric.higher_is_better
    return f"{judged.verdict}, {'better' if is_better else 'worse'}"


@dataclass(frozen=True)
class Ground:
    """The reason for the same verdict on one or several sides."""

    names: str
    verdict: Verdict
    judgement: str
    because: str


def grounds(metric: MetricComparison) -> tuple[Ground, ...]:
    """Return the reason for each verdict."""
    base, *others = metric.sides
    alike: dict[tuple[Verdict, str, str], list[str]] = {}
    for side, judged in zip(others, metric.differences, strict=True):
        reason = judged.verdict, judgement(judged, metric), _because(base, side, judged)
        alike.setdefault(reason, []).append(side.label)
    return tuple(Ground(first_of(labels), *reason) for reason, labels in alike.items())


def _because(base: SideResult, side: SideResult, judged: Judged) -> str:
    if judged.verdict == Verdict.OTHER_STEPS and base.steps and side.steps:
        return f"{_range(*base.steps)} and {_range(*side.steps)} steps cannot be compared"
    gap, alone = judged.difference, base.sample.n + side.sample.n
    if gap.n is None and min(base.sample.n, side.sample.n) < FEWEST_SEEDS:
        return f"{base.sample.n} and {side.sample.n} finished runs; at least {FEWEST_SEEDS} each are needed"
    if gap.n is not None and gap.n < FEWEST_SEEDS:
        return f"{count_of(gap.n, 'seed')} finished in both; at least {FEWEST_SEEDS} are needed"
    if not gap.n:
        seeds = f"{base.sample.n} and {side.sample.n} seeds, not paired"
    else:
        alone -= 2 * gap.n
        seeds = f"{gap.n} pairs of seeds" + (f", {count_of(alone, 'unpaired run')} left out" if alone else "")
    if judged.verdict == Verdict.IDENTICAL:
        return seeds
    is_adjusted = judged.p_adjusted != gap.p
    parts = [seeds, f"p {significant(gap.p)}"]
    if is_adjusted:
        parts.append(f"{significant(judged.p_adjusted)} after Holm's adjustment")
    if judged.verdict == Verdict.NOT_ENOUGH and gap.detectable is not None:
        single = " in a single comparison" if is_adjusted else ""
        least = significant(gap.detectable)
        parts.append(f"seeds like these detect a difference of {least} with 80 % power{single}")
    return "; ".join(parts)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def footnotes(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Return how to read a comparison."""
    metrics = sum(len(comparison.metrics) for comparison in comparisons)
    if metrics:
        yield (
            "Verdicts follow the 95 % interval (Student's t), which holds its level with few seeds; the "
            "bootstrap interval (BCa) is then too narrow."
        )
    if any(len(comparison.metrics[0].differences) > 1 for comparison in comparisons if comparison.metrics):
        yield (
            "With several comparisons one may look significant by chance, so p-values are adjusted (Holm): "
            "an interval that excludes 0 may not suffice."
        )
    if metrics > 1:
        yield "Metrics are judged separately: 1 in 20 will differ by chance. Decide by the first."
