"""Compares sides metric by metric, each with the first, and judges what the seeds support."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain, takewhile
from typing import Any

from retrain.base.errors import ConfigError
from retrain.config.digest import BESIDE_RESULTS
from retrain.config.keys import Tables, as_toml
from retrain.config.resolve import flatten
from retrain.config.schema import NO_REWARD
from retrain.records.decision import (
    HELD_OUT,
    UNSCORED,
    Decision,
    is_higher_better,
    questions_key,
    unscored_key,
)
from retrain.records.lines import number_in
from retrain.records.metrics import mean
from retrain.records.rungs import Searched
from retrain.records.text import count_of, dollars, plain, without_score
from retrain.records.windows import AXES, Window
from retrain.results.report.gather import RunHistory
from retrain.results.report.questions import ByQuestion, by_question, sentence
from retrain.results.report.sides import (
    Match,
    Side,
    at_equal_amounts,
    describe,
    end_step,
    final_value,
    is_counted,
    known_metrics,
    unscored_share,
)
from retrain.results.report.statistics import (
    LEVEL,
    Difference,
    SeedSummary,
    describe_sample,
    difference_of,
    holm,
)

SPEED = "step_time_s"
OF_A_STEP = ("_time_s", "_wait_s", "tokens_per_second")  # metrics that more steps do not improve

SEED = "training.seed"  # runs of a condition differ in it by definition
ABSENT = "(absent)"
VALUE_LIMIT = 80
CONTEXT = 20  # characters shown before the point where long values diverge


class Outcome(StrEnum):
    """What a test, or `[decision]`, says of a difference."""

    HIGHER = "higher"
    LOWER = "lower"
    IDENTICAL = "identical"  # run by run, to the last digit
    NOT_ENOUGH = "not enough seeds to tell"
    OTHER_STEPS = "not comparable"  # they ran for different numbers of steps
    NO_DIFFERENCE = "no difference found"  # this and the next two: by `[decision]`
    UNDECIDED = "not decided"
    OPEN = "still compared"


BY_DECISION = {
    "better": (Outcome.HIGHER, Outcome.LOWER),  # of the condition, then of the reference compared with it
    "worse": (Outcome.LOWER, Outcome.HIGHER),
    "no_difference": (Outcome.NO_DIFFERENCE, Outcome.NO_DIFFERENCE),
    "undecided": (Outcome.UNDECIDED, Outcome.UNDECIDED),
    "continue": (Outcome.OPEN, Outcome.OPEN),
}


@dataclass(frozen=True)
class SideResult:
    """One side in one metric."""

    label: str
    runs: int
    failed: int  # not counted
    unfinished: int  # did not get as far as the runs are judged: not counted
    silent: int  # finished, but without this metric
    steps: tuple[int, int] | None  # fewest and most steps of the runs that count; None without such runs
    values: tuple[tuple[int | None, float], ...]  # seed, value
    sample: SeedSummary
    start: float | None = None  # mean before training, of the runs that count; None: not known
    gain: float | None = None  # mean of a run's value, less its value before training


@dataclass(frozen=True)
class Judged:
    """A side's difference from the first side, and what its test says."""

    label: str
    difference: Difference
    p_adjusted: float | None  # Holm's, over this metric's differences
    outcome: Outcome
    by_question: ByQuestion | None = None
    is_of_decision: bool = (
        False  # whether the outcome is the verdict of `[decision]`, whatever the interval says
    )


@dataclass(frozen=True)
class MetricComparison:
    """All sides in one metric."""

    metric: str
    how: str  # how a run's value is computed
    higher_is_better: bool | None  # None: neither
    sides: tuple[SideResult, ...]
    differences: tuple[Judged, ...]  # of all sides but the first, from the first
    window: Window = field(default_factory=Window)  # over which a run's value is computed
    cut_off: str = ""  # why that is not all of the window that was named

    def by_question(self) -> Iterator[str]:
        """Iterate over what the questions of an evaluation tell, a sentence for each difference."""
        for judged in self.differences:
            if judged.by_question is not None:
                yield f"{judged.label} against {self.sides[0].label}, {sentence(judged.by_question)}"


@dataclass(frozen=True)
class Cost:
    """What one side's runs cost; of those that are compared, those with a price."""

    label: str
    runs: int
    cost_usd: float | None  # mean of a run; None where no price is known
    dearer_usd: float | None  # than a run of the first side


@dataclass(frozen=True)
class UnscoredShare:
    """Completions of one side that have no score, so that its values rest on the others."""

    label: str
    metric: str  # a held-out metric, if they are of its evaluation; "" of those sampled for training
    fraction: float  # mean over the runs that are compared
    outage_fraction: float | None  # part of it whose scorer failed or timed out; None: not known
    reason: str  # why the first of them has none
    left_out: int = 0  # runs, if these are completions of failed ones, which are not compared

    def __str__(self) -> str:
        where = f" of the evaluation of {self.metric}" if self.metric else " sampled for training"
        where += f" by {count_of(self.left_out, 'failed run')}" if self.left_out else ""
        return f"{self.label}: {without_score(self.fraction, self.outage_fraction, self.reason, where)}"


@dataclass(frozen=True)
class KeyDifference:
    """A key, and its value on each side; several values if runs of one side differ."""

    key: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """Sides compared with the first."""

    title: str
    level: float
    metrics: tuple[MetricComparison, ...]
    config: tuple[KeyDifference, ...]
    costs: tuple[Cost, ...] = ()  # none if no run has a price
    unscored: tuple[UnscoredShare, ...] = ()  # none if all completions have a score
    searched: Searched | None = None  # what the campaign's `[campaign.search]` has found
    decision: Decision | None = None  # what the campaign's `[decision]` has found
    added_seeds: int = 0  # added to the campaign by hand, after it had begun


def compare(
    match: Match, metrics: Sequence[str] = (), window: Window | None = None, *, paired: bool = True
) -> Comparison:
    """Compare sides with the first, in these metrics or the usual ones.

    Without a window they are compared over that of the campaign's `[decision]`, or over their last steps.
    `paired` compares seed by seed where most seeds match.
    """
    manifest = match.campaign.manifest if match.campaign else None
    decision = manifest.decision if manifest else None
    chosen = tuple(metrics) or usual_metrics([run for side in match.sides for run in side.runs], decision)
    declared = decision.shared_window if decision else Window()
    try:
        over = at_equal_amounts(window or declared, match.sides)
    except ConfigError:
        if window is not None:
            raise
        over = Window(), ""  # a run ended before what was declared begins
    if not over[1] and (window or declared) == declared != Window():
        over = declared, ""
    return Comparison(
        title=match.title,
        level=LEVEL,
        metrics=tuple(_metric(name, match.sides, *over, decision, paired=paired) for name in chosen),
        config=_differences(match.sides),
        costs=_costs(match.sides, over[0]),
        unscored=tuple(_unscored(match.sides, chosen, over[0])),
        searched=manifest.searched if manifest else None,
        decision=decision,
        added_seeds=manifest.added_seeds if manifest else 0,
    )


USUAL = ("eval_reward", "mean_reward", SPEED)


def needed_metrics(metrics: Sequence[str]) -> set[str]:
    """Return the metrics of rows that a comparison of these metrics, or of the usual ones, reads."""
    names = metrics or USUAL
    return {
        *names,
        UNSCORED,
        *map(unscored_key, names),
        *(key for axis in AXES.values() for key in axis.keys),
    }


def usual_metrics(runs: Sequence[RunHistory], decision: Decision | None = None) -> tuple[str, ...]:
    """Return the default metrics: held-out reward, training reward and step time, if known.

    Before them the one that decides, and, where some run has no reward of its own, those of its `[[eval]]`.
    """
    every_metric, first = known_metrics(runs), dict[str, None]()
    if decision:
        first[decision.metric] = None
    for run in runs:
        if run.config.get("reward", {}).get("reward") == NO_REWARD:
            tables = run.config.get("eval", {}).get("tables", ())
            first |= dict.fromkeys(f"{HELD_OUT}{table['name']}_reward" for table in tables)
    return tuple(name for name in dict.fromkeys((*first, *USUAL)) if name in every_metric)


def _metric(
    name: str, sides: Sequence[Side], window: Window, cut_off: str, decision: Decision | None, *, paired: bool
) -> MetricComparison:
    by_seed = [_by_seed(side.runs, name, window, unmatched=-1 - i) for i, side in enumerate(sides)]
    results = tuple(_side(side, name, values, window) for side, values in zip(sides, by_seed, strict=True))
    first, *others = by_seed
    gaps = [difference_of(first, other, paired=paired, of_few=decision is not None) for other in others]
    are_alike = [not window.is_last or _are_alike(name, results[0], other) for other in results[1:]]
    adjusted = holm([gap.p if alike else None for gap, alike in zip(gaps, are_alike, strict=True)])

    differences = []
    for side, gap, p, alike in zip(sides[1:], gaps, adjusted, are_alike, strict=True):
        is_its_question = decision is not None and window in decision.windows_of({side.label, sides[0].label})
        decided = _decided(decision, name, sides[0].label, side.label) if is_its_question else None
        outcome = decided or (_outcome(gap, p) if alike else Outcome.OTHER_STEPS)
        questions = by_question(sides[0], side, name, window) if alike and paired else None
        differences.append(Judged(side.label, gap, p, outcome, questions, decided is not None))
    return MetricComparison(
        metric=name,
        how=describe(name, window, [run for side in sides for run in side.runs]),
        window=window,
        cut_off=cut_off,
        higher_is_better=is_higher_better(name),
        sides=results,
        differences=tuple(differences),
    )


def _decided(decision: Decision | None, metric: str, base: str, side: str) -> Outcome | None:
    """Return what `[decision]` says of a side against the first one; None if that is not its question."""
    if decision is None or decision.metric != metric or decision.reference not in (base, side):
        return None
    is_reversed = side == decision.reference
    condition = base if is_reversed else side
    by_condition = {decided.condition: decided.verdict for decided in decision.conditions}
    if by_condition.get(condition) not in BY_DECISION:
        return None
    outcome = BY_DECISION[by_condition[condition]][is_reversed]
    if is_higher_better(metric) is False:  # better is lower then
        outcome = {Outcome.HIGHER: Outcome.LOWER, Outcome.LOWER: Outcome.HIGHER}.get(outcome, outcome)
    return outcome


def _are_alike(metric: str, base: SideResult, other: SideResult) -> bool:
    """Whether sides ran for equally many steps: what is learned depends on them, so they may be why."""
    return metric.endswith(OF_A_STEP) or not (base.steps and other.steps) or base.steps == other.steps


def _by_seed(runs: Sequence[RunHistory], metric: str, window: Window, unmatched: int) -> dict[int, float]:
    """Return values by seed; an unknown or repeated seed gets a negative key that matches no other side's."""
    values: dict[int, float] = {}
    for i, run in enumerate(runs):
        value = final_value(run, metric, window)
        if value is not None:
            key = unmatched * (len(runs) + 10**6) - i
            values[key if run.seed is None or run.seed in values else run.seed] = value
    return values


def _side(side: Side, metric: str, values: Mapping[int, float], window: Window) -> SideResult:
    failed = sum(run.has_failed and not is_counted(run, window) for run in side.runs)
    there = [run for run in side.runs if is_counted(run, window)]
    ends = [end_step(run, window) for run in there]
    starts = [
        (start, value)
        for run in there
        if number_in(run.result, questions_key(metric)) is None  # it had others at its end
        and (start := run.start.value(metric)) is not None
        and (value := final_value(run, metric, window)) is not None
    ]
    return SideResult(
        label=side.label,
        runs=len(side.runs),
        failed=failed,
        unfinished=len(side.runs) - len(there) - failed,
        silent=len(there) - len(values),
        steps=(min(ends), max(ends)) if ends else None,
        values=tuple((seed if seed >= 0 else None, value) for seed, value in values.items()),
        sample=describe_sample(tuple(values.values())),
        start=mean(start for start, _ in starts),
        gain=mean(value - start for start, value in starts),
    )


def _outcome(gap: Difference, p: float | None) -> Outcome:
    if gap.difference is None or p is None:
        return Outcome.NOT_ENOUGH
    if gap.low == gap.high == 0.0:
        return Outcome.IDENTICAL
    if p > 1 - LEVEL:
        return Outcome.NOT_ENOUGH
    return Outcome.HIGHER if gap.difference > 0 else Outcome.LOWER


def _unscored(sides: Sequence[Side], metrics: Sequence[str], window: Window) -> Iterator[UnscoredShare]:
    evaluated = {unscored_key(metric): metric for metric in metrics if metric.startswith(HELD_OUT)}
    for side in sides:
        runs = [run for run in side.runs if is_counted(run, window)]
        for metric in ("", *evaluated.values()):
            share = mean([unscored_share(run, metric, window) for run in runs])
            if not share:
                continue
            outages = [run.unscored_outage_fraction for run in runs if run.unscored_fraction]
            of_outages = None if metric or None in outages else math.fsum(filter(None, outages)) / len(runs)
            reason = "" if metric else next((run.unscored_reason for run in runs if run.unscored_reason), "")
            yield UnscoredShare(side.label, metric, share, of_outages, reason)
        failed = [run for run in side.runs if run.has_failed and not is_counted(run, window)]
        shares = [_share_of_failed(run) for run in failed]
        if any(shares):
            reasons = (run.unscored_reason or run.message for run in failed if _share_of_failed(run))
            yield UnscoredShare(side.label, "", mean(shares) or 0.0, None, next(reasons), len(failed))


def _share_of_failed(run: RunHistory) -> float:
    """Return a failed run's share of completions without a score; its last step may have no row."""
    without_row = 1.0 if run.attempts and run.attempts[-1].is_unscored else 0.0
    return run.unscored_fraction or without_row


def _costs(sides: Sequence[Side], window: Window) -> tuple[Cost, ...]:
    """Return what a run of each side cost; none if no price is known."""
    first, costs = None, []
    for side in sides:
        prices = [run.cost_usd for run in side.runs if is_counted(run, window) and run.cost_usd is not None]
        price = mean(prices)
        first = price if side is sides[0] else first
        more = None if price is None or first is None else price - first
        costs.append(Cost(side.label, len(prices), price, more))
    return tuple(costs) if any(cost.runs for cost in costs) else ()


def cost_lines(comparison: Comparison) -> Iterator[str]:
    """Iterate over what a run of each side cost, and what its differences cost, a line each."""
    for cost in comparison.costs:
        parts, more = [dollars(cost.cost_usd)], cost.dearer_usd or 0.0
        if more:
            parts.append(f"{dollars(abs(more))} {'more' if more > 0 else 'less'}")
        for metric in comparison.metrics if more > 0 and comparison.metrics[0].window.is_last else ():
            for judged in metric.differences:
                gap = judged.difference.difference
                if judged.label == cost.label and gap is not None:
                    parts.append(f"{metric.metric} {gap / more:+.3g} per further dollar")
        yield f"{cost.label}: {'; '.join(parts)}"


def _differences(sides: Sequence[Side]) -> tuple[KeyDifference, ...]:
    """List the keys that differ between runs of any side, without seeds and paths."""
    flat = [[dict(deciding_keys(tables)) for tables in _distinct(side.runs)] for side in sides]
    differing = []
    for key in sorted({key for tables in chain(*flat) for key in tables} - {SEED}):
        by_side = [
            list(dict.fromkeys(as_toml(tables[key]) if key in tables else ABSENT for tables in side))
            for side in flat
        ]
        if len({*chain(*by_side)}) > 1:
            differing.append(KeyDifference(key, _shown(by_side)))
    return tuple(differing)


def _distinct(runs: Sequence[RunHistory]) -> Iterator[Tables]:
    """Iterate over the configurations of runs, without one that equals the last but for its seed."""
    last: Tables = {}
    for run in runs:
        tables = {name: table for name, table in run.config.items() if name not in BESIDE_RESULTS}
        if isinstance(training := tables.get("training"), dict):
            tables["training"] = {key: value for key, value in training.items() if key != "seed"}
        if tables and tables != last:
            last = tables
            yield tables


def deciding_keys(tables: Tables) -> Iterator[tuple[str, Any]]:
    """Iterate over `section.key` and value of every key that affects a run's result."""
    return flatten({name: table for name, table in tables.items() if name not in BESIDE_RESULTS})


def _shown(by_side: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Shorten values; of long ones with a common prefix, show where they diverge."""
    letters = zip(*chain(*by_side), strict=False)
    alike = sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, letters))
    start = max(0, alike - CONTEXT) if alike > VALUE_LIMIT - CONTEXT else 0
    cut = "…" if start else ""
    return tuple(
        " | ".join(cut + plain(value[start:], VALUE_LIMIT) for value in values) or ABSENT
        for values in by_side
    )
