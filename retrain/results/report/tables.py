"""Results in tables, numbers and sentences, the same for terminals and pages; and facts on a campaign."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from retrain.records.decision import HELD_OUT, looks_of
from retrain.records.decision import lines_of as lines_of  # for the page
from retrain.records.run_state import before_training
from retrain.records.text import MISSING, count_of, first_of, format_duration, plain
from retrain.records.windows import Window
from retrain.results.report.compare import Comparison, Judged, MetricComparison, Outcome, SideResult
from retrain.results.report.compare import cost_lines as cost_lines
from retrain.results.report.gather import CampaignRecord
from retrain.results.report.sides import Side
from retrain.results.report.statistics import FEWEST_SEEDS, describe_sample
from retrain.results.status import table_of

DIRECTIONS = {True: "higher is better", False: "lower is better", None: ""}
MOST_NAMED = 5  # conditions in one sentence
MOST_RUNS = 300  # rows of the table of runs
MOST_REASONS = 20  # sentences under a comparison
MANY_CONDITIONS = 6  # whose values would not fit side by side
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
    columns = (">mean", ">difference", "95 % interval", ">runs", ">failed", ">IQM", ">P(higher)")
    rows = []
    for side, judged in zip(metric.sides, [None, *metric.differences], strict=True):
        sample, size, outcome = side.sample, "", ""
        limits = higher = bootstrap = MISSING if judged else ""
        if judged:
            gap, outcome = judged.difference, judgement(judged, metric)
            size = significant(gap.difference, signed=True)
            if judged.outcome != Outcome.OTHER_STEPS:
                limits, higher = interval(gap.low, gap.high), significant(gap.improvement)
                bootstrap = interval(gap.bootstrap_low, gap.bootstrap_high)
        runs = f"{sample.n} of {side.runs}" if sample.n < side.runs else str(sample.n)
        numbers = significant(sample.mean), size, limits, runs, str(side.failed), significant(sample.iqm)
        rows.append((side.label, *numbers, higher, bootstrap, outcome))
    return ("condition", *columns, "95 % bootstrap interval", "outcome"), rows


def heading(metric: MetricComparison) -> str:
    """Return how a metric's values are computed, and whether higher is better."""
    return "; ".join(filter(None, (metric.how, DIRECTIONS[metric.higher_is_better])))


def start_of(metric: MetricComparison) -> Iterator[str]:
    """Return what the sides had before training, and what they gained, where that is known."""
    starts, gains = ({side.label: getattr(side, name) for side in metric.sides} for name in ("start", "gain"))
    if start := before_training(starts, gains):
        yield start


def excluded(metric: MetricComparison) -> Iterator[str]:
    """Return which runs were left out, and which are judged after different numbers of steps."""
    sides, window = metric.sides, metric.window
    if metric.cut_off:
        yield metric.cut_off
    alike: dict[tuple[str, str], list[str]] = {}
    is_early = metric.metric.startswith(HELD_OUT) and not window.is_last
    silent = "without an evaluation up to there" if is_early else "without this metric"
    for side in sides:
        why = {"failed": side.failed, "not far enough": side.unfinished, silent: side.silent}
        if parts := [f"{count} {reason}" for reason, count in why.items() if count]:
            alike.setdefault((count_of(side.runs, "run"), " and ".join(parts)), []).append(side.label)
    for (runs, what), labels in alike.items():
        each = " each" if len(labels) > 1 else ""
        yield f"{first_of(labels)}: of {runs}{each}, {what}: left out"
    judged = [(side.label, *side.steps) for side in sides if side.steps and side.sample.n]
    steps = {step for _, *both in judged for step in both}
    if len(steps) > 1:
        (first, low, high), *others = judged
        rest = "".join(f", {label} {_range(*both)}" for label, *both in others[:MOST_NAMED])
        rest += ", and so on" if len(others) > MOST_NAMED else ""
        if not window.is_last:
            yield f"{first} came there in {_range(low, high)} steps{rest}"
            return
        advice = f"; --step {min(steps)} compares them after equally many" if min(steps) else ""
        yield f"{first} ran {_range(low, high)} steps{rest}{advice}"


def partly_paired(metric: MetricComparison) -> Iterator[str]:
    """Return the means behind differences of pairs where those of the table are over further seeds."""
    base, *others = metric.sides
    for side, judged in zip(others, metric.differences, strict=True):
        pairs = judged.difference.n
        if pairs is None or pairs == base.sample.n == side.sample.n:
            continue
        values, of_base = dict(side.values), dict(base.values)
        both = [seed for seed in values if seed is not None and seed in of_base]
        means = [significant(sum(by_seed[seed] for seed in both) / pairs) for by_seed in (values, of_base)]
        seeds = first_of([str(seed) for seed in sorted(both)], MOST_NAMED)
        yield (
            f"{side.label}: the difference is over the {count_of(pairs, 'seed')} that {base.label} has too "
            f"({seeds}; means {means[0]} and {means[1]}), the means of the table over all"
        )


def judgement(judged: Judged, metric: MetricComparison) -> str:
    """Return the outcome, and whether it is better or worse."""
    if judged.outcome not in (Outcome.HIGHER, Outcome.LOWER) or metric.higher_is_better is None:
        return str(judged.outcome)
    is_better = (judged.outcome == Outcome.HIGHER) == metric.higher_is_better
    return f"{judged.outcome}, {'better' if is_better else 'worse'}"


class Ground(NamedTuple):
    """The reason for the same outcome of one or several sides."""

    names: str
    outcome: Outcome
    judgement: str
    because: str


def grounds(metric: MetricComparison) -> list[Ground]:
    """Return the reason for each outcome."""
    base, *others = metric.sides
    alike: dict[tuple[Outcome, str, str], list[str]] = {}
    for side, judged in zip(others, metric.differences, strict=True):
        reason = judged.outcome, judgement(judged, metric), _because(base, side, judged)
        alike.setdefault(reason, []).append(side.label)
    return [Ground(first_of(labels), *reason) for reason, labels in alike.items()]


def _because(base: SideResult, side: SideResult, judged: Judged) -> str:
    if judged.outcome == Outcome.OTHER_STEPS and base.steps and side.steps:
        return f"{_range(*base.steps)} and {_range(*side.steps)} steps cannot be compared"
    if judged.is_of_decision:
        p = judged.difference.p
        by_these = "" if p is None else f"; of these seeds without its looks: {_significance(judged)}"
        return f"by [decision], which allows for its looks{by_these}"
    gap, finished = judged.difference, (base.sample.n, side.sample.n)
    if (min(finished) if gap.n is None else gap.n) < FEWEST_SEEDS:
        runs = "runs with a value" if base.silent or side.silent else "finished runs"
        unpaired = f"{finished[0]} and {finished[1]} {runs}; at least {FEWEST_SEEDS} each"
        paired = f"{count_of(gap.n or 0, 'seed')} finished in both; at least {FEWEST_SEEDS}"
        return f"{unpaired if gap.n is None else paired} are needed"
    seeds = f"{finished[0]} and {finished[1]} seeds, not paired"
    if gap.n is not None:
        alone = sum(finished) - 2 * gap.n
        seeds = f"{gap.n} pairs of seeds" + (f", {count_of(alone, 'unpaired run')} left out" if alone else "")
    return seeds if judged.outcome == Outcome.IDENTICAL else f"{seeds}; {_significance(judged)}"


def _significance(judged: Judged) -> str:
    gap = judged.difference
    is_adjusted = judged.p_adjusted != gap.p
    parts = [f"p {significant(gap.p)}"]
    if is_adjusted:
        parts.append(f"{significant(judged.p_adjusted)} after Holm's adjustment")
    if judged.outcome == Outcome.NOT_ENOUGH and gap.detectable is not None:
        single = " in a single comparison" if is_adjusted else ""
        least = significant(gap.detectable)
        parts.append(f"seeds like these detect a difference of {least} with 80 % power{single}")
    return "; ".join(parts)


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


def footnotes(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Return how to read a comparison."""
    named = [comparison.decision.metric for comparison in comparisons if comparison.decision]
    decisive = f"{plain(named[0])}, which [decision] names" if named else "the first"
    metrics = sum(len(comparison.metrics) for comparison in comparisons)
    for comparison in comparisons:
        yield from looks_of(comparison.decision, comparison.added_seeds)
        decided = comparison.decision.shared_window if comparison.decision else None
        others = [metric.window for metric in comparison.metrics if metric.window != decided]
        if decided and comparison.decision and comparison.decision.rungs:
            over = f"over {(others or [decided])[0]}"
            yield f"Verdicts of [decision] hold at their rungs; tables compare all {over}."
        elif decided and others:
            asked = "the ends of runs" if decided == Window() else f"them over {decided}"
            yield (
                f"The tables ask another question than [decision], over {others[0]} where it compares "
                f"{asked}: its verdicts hold for its own question only."
            )
        if (searched := comparison.searched) and searched.rungs and not searched.decides:
            yield "The search chose by the seeds of these tables, so what went on looks better than it is."
    if metrics:
        yield (
            "Outcomes follow the 95 % interval (Student's t), which holds its level with few seeds unless "
            "differences are skewed; the bootstrap interval (BCa) is then too narrow."
        )
    if any(len(comparison.metrics[0].differences) > 1 for comparison in comparisons if comparison.metrics):
        yield (
            "With several comparisons one may look significant by chance, so p-values are adjusted (Holm): "
            "an interval that excludes 0 may not suffice."
        )
    if metrics > 1:
        yield f"Metrics are judged separately: 1 in 20 seems to differ by chance. Decide by {decisive}."


def conditions(sides: Sequence[Side], comparison: Comparison) -> Table:
    """Return one row per condition: runs, steps, and the final score."""
    score = comparison.metrics[0] if comparison.metrics else None
    rows, samples = [], {result.label: result.sample for result in score.sides} if score else {}
    for side in sides:
        sample = samples.get(side.label) or describe_sample(())
        done = sum(run.is_done for run in side.runs)
        failed = sum(run.has_failed for run in side.runs)
        steps = sum(run.last_step for run in side.runs)
        rows.append(
            (
                side.label, f"{done} of {len(side.runs)}", str(failed), f"{steps:,}",
                significant(sample.mean), interval(sample.low, sample.high, signed=False),
            )
        )  # fmt: skip
    final = "final " if not score or score.window.is_last else ""
    name = f">{final}{score.metric if score else ''}".rstrip()
    return ("condition", ">done", ">failed", ">steps", name, "95 % interval"), rows


def runs(campaign: CampaignRecord) -> Table:
    """Return one row per run, up to `MOST_RUNS`: the columns of `status`, its attempts and its message."""
    shown = campaign.runs[:MOST_RUNS]
    headers, rows = table_of(shown)
    for run, row in zip(shown, rows, strict=True):
        took_s = sum(attempt.duration_s or 0.0 for attempt in run.attempts)
        row += [str(len(run.attempts)), format_duration(took_s), plain(run.message, 160)]
    return [*headers, ">attempts", ">time", "message"], rows


def remarks(metric: MetricComparison) -> Iterator[str]:
    """Return which runs were left out, and what each outcome rests on."""
    yield from start_of(metric)
    yield from excluded(metric)
    yield from partly_paired(metric)
    for ground in islice(grounds(metric), MOST_REASONS):
        yield f"{ground.names} against {metric.sides[0].label}: {ground.judgement} ({ground.because})."
    yield from metric.by_question()


def differences(sides: Sequence[Side], comparison: Comparison) -> Table:
    """Return one row per key that differs; with many conditions, one row per condition."""
    labels, config = [side.label for side in sides], comparison.config
    if len(labels) <= MANY_CONDITIONS:
        return ("key", *labels), [(row.key, *row.values) for row in config]
    by_condition = zip(*(row.values for row in config), strict=True)
    rows = [(label, *values) for label, values in zip(labels, by_condition, strict=True)]
    return ("condition", *(row.key for row in config)), rows
