"""What a campaign with `[decision]` has concluded so far; and how a run's final value is computed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

from retrain.records.evaluation_row import Evaluation, NamedEvaluation
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, number_in
from retrain.records.metrics import mean, read_metrics
from retrain.records.row_parts import Columns, keys_of
from retrain.records.step_row import EpisodeSummary, RolloutSummary, Timing, UpdateSummary
from retrain.records.text import count_of, first_of, number, plain

VERDICTS = {
    "better": "better than {}",
    "worse": "worse than {}",
    "no_difference": "not found to differ from {}",
    "undecided": "not decided against {}",
    "continue": "still compared with {}",
}
OPEN = "continue"
DROPPED = "dropped"
HELD_OUT = "eval_"
LAST_FRACTION = 0.1  # of the steps: enough to average out noise, few enough that learning has mostly ended
FEWEST_STEPS = 10
FAULTS = (
    "_error_fraction",
    "unscored_fraction",
    "_timeout_fraction",
    "zero_signal_group_fraction",
    "max_token_hit_rate",
)
COUNTED_FAULTS = ("reward_faults", "reward_over_limits", "episode_errors", "episode_retries", "tool_errors")
LOWER_IS_BETTER = ("_time_s", "_wait_s", *FAULTS, *COUNTED_FAULTS)
HIGHER_IS_BETTER = re.compile(r"(reward|correct_rate|tokens_per_second|pass_at_\d+)$")
UNDECIDING = ("_se", "prompts", "batch_size", "group_size", "lr", "updates")  # settings, and errors of others


@dataclass(frozen=True)
class ConditionDecision:
    """How a condition compares with the reference; figures are null while there are too few seeds."""

    condition: str
    verdict: str  # better, worse, no_difference, undecided; continue while it is open
    seeds: int  # that were compared: those that both conditions finished
    difference: float | None = None  # mean over seeds, condition minus reference
    low: float | None = None  # of the interval, which allows for all looks and conditions
    high: float | None = None
    p_value: float | None = None
    variance_removed: float | None = None  # share of the difference's variance, by comparing the same seeds
    reason: str = ""  # why it gets no more seeds although some are left


@dataclass(frozen=True)
class Decision:
    """The verdicts of a campaign with `[decision]`, and what they saved."""

    metric: str
    reference: str
    error: float
    max_seeds: int
    runs: int  # asked for so far
    saved_runs: int  # not needed of all conditions with all seeds; 0 until the end
    ended: str  # decided, seeds or budget (used up), failed (runs), dropped (from the file); "": not yet
    smallest_difference: float | None = None
    conditions: tuple[ConditionDecision, ...] = ()  # all but the reference
    changes: tuple[str, ...] = ()  # to the design after looks; the last began the decision anew
    again: tuple[str, ...] = ()  # runs that ended in another way than when they were looked at


def verdict_of(one: ConditionDecision, decision: Decision) -> str:
    """Return a verdict as a sentence, with its interval."""
    verdict = VERDICTS.get(one.verdict, one.verdict).format(decision.reference)
    said = f"{one.condition}: {verdict} in {decision.metric} after {count_of(one.seeds, 'seed')}"
    known = one.low is not None and one.high is not None
    bounds = f" ({number(one.low)} to {number(one.high)})" if known else ""
    figures = "" if one.difference is None else f": {number(one.difference)}{bounds}"
    return said + figures + f"; {one.reason}" * bool(one.reason)


def ending_of(decision: Decision) -> str:
    """Return how far the campaign is, as a sentence."""
    if not decision.ended:
        return f"seeds are added until all conditions are decided, at most {decision.max_seeds}"
    if decision.ended == DROPPED:
        return "[decision] was taken out of campaign.toml after these verdicts: they stand as they were"
    why = {
        "decided": "all conditions are decided",
        "seeds": "all seeds are used up",
        "failed": "no seeds are added while runs fail; `retrain resume DIR --failed` goes on",
    }
    saved = f"{count_of(decision.saved_runs, 'run')} saved of {decision.runs + decision.saved_runs}"
    return f"{why.get(decision.ended, 'the budget is used up')}: {saved}"


def dropped(decision: Decision) -> Decision:
    """Return the verdicts of a decision whose table was taken out of the file."""
    conditions = (
        replace(one, verdict="undecided") if one.verdict == OPEN else one for one in decision.conditions
    )
    return replace(decision, conditions=tuple(conditions), ended=DROPPED, saved_runs=0)


def lines_of(decision: Decision | None) -> tuple[str, ...]:
    """Return the verdicts and how far the campaign is, a sentence each, safe to print."""
    if decision is None:
        return ()
    verdicts = (verdict_of(one, decision) for one in decision.conditions)
    lines = (*verdicts, *_pairing(decision), *_departures(decision), ending_of(decision))
    return tuple(plain(line, 500) for line in lines)


def _pairing(decision: Decision) -> Iterator[str]:
    removed = {one.condition: one.variance_removed for one in decision.conditions}
    shares = [
        f"{abs(share):.0%} {'smaller' if share > 0 else 'larger'} ({name})"
        for name, share in removed.items()
        if share is not None
    ]
    if shares:
        yield f"the variance of differences is {', '.join(shares)} than if conditions had seeds of their own"


def _departures(decision: Decision) -> Iterator[str]:
    """Iterate over what was not as planned, so that the verdicts must be read with it."""
    if decision.changes:
        yield (
            f"the design was changed after data were seen, and the decision made anew: "
            f"{'; '.join(decision.changes)}. The error of {decision.error:g} no longer holds"
        )
    if decision.again:
        runs = first_of(decision.again)
        yield f"not part of the decision: what {runs} gave after the look at that seed; the look counts"


def looks_of(decision: Decision | None, added_seeds: int) -> Iterator[str]:
    """Return what a comparison of all seeds must say of the looks at them."""
    if decision is not None:
        yield (
            "Seeds were added until the conditions were decided. The decision's intervals allow for that; "
            "the verdicts of the metrics assume a number of seeds that was fixed beforehand."
        )
    if added_seeds:
        yield (
            f"Seeds were added by hand afterwards ({added_seeds} to each condition). That look was not "
            "planned, so differences are found by chance more often than 1 in 20 times."
        )


def is_higher_better(metric: str) -> bool | None:
    """Return whether higher is better; None if neither is."""
    if metric.endswith(LOWER_IS_BETTER):
        return False
    return True if HIGHER_IS_BETTER.search(metric) else None


def steps_averaged(end: int) -> int:
    """Return over how many of its last steps a run's value is averaged, if it ended after `end`."""
    return max(FEWEST_STEPS, round(LAST_FRACTION * end))


def final_value(files: RunFiles, result: Columns, metric: str) -> float | None:
    """Return a finished run's value in a metric; None if it has none."""
    if metric.startswith(HELD_OUT):
        return number_in(result, metric)
    rows = read_metrics(files.directory)
    return _late_mean(rows, rows[-1]["step"] if rows else 0, metric)


def value_at(files: RunFiles, metric: str, step: int) -> tuple[bool, float | None]:
    """Return whether a run has taken a step, and its value as if it had ended there."""
    rows = [row for row in read_metrics(files.directory) if row["step"] <= step]
    if not rows or rows[-1]["step"] < step:
        return False, None
    is_held_out = metric.startswith(HELD_OUT)
    return True, number_in(rows[-1], metric) if is_held_out else _late_mean(rows, step, metric)


def _late_mean(rows: Sequence[Row], last: int, metric: str) -> float | None:
    return mean(number_in(row, metric) for row in rows if row["step"] > last - steps_averaged(last))


def metrics_of_rows(samples: int, evals: Mapping[str, int], *, has_environment: bool) -> tuple[str, ...]:
    """List the numbers that every run measures and that may decide.

    Args:
        samples: answers per held-out prompt for pass@k, 1 for none.
        evals: the same of each `[[eval]]`, by name.
        has_environment: whether rows describe episodes.
    """
    named = {f"eval_{name}_": count for name, count in evals.items()}
    own = [key.replace("eval_NAME_", name) for name in named for key in _numbers_of(NamedEvaluation)]
    parts: list[Any] = [Evaluation, RolloutSummary, Timing, UpdateSummary]
    always = [key for part in parts + [EpisodeSummary] * has_environment for key in _numbers_of(part)]
    counts = {HELD_OUT: samples, **named}
    pass_at = [f"{name}pass_at_{k}" for name, count in counts.items() if count > 1 for k in (1, count)]
    return tuple(dict.fromkeys(key for key in (*own, *always, *pass_at) if not key.endswith(UNDECIDING)))


def _numbers_of(part: Any) -> Iterator[str]:
    """Iterate over the keys of a part of a row whose values are single numbers."""
    hints = get_type_hints(part)
    for name, key, is_optional in keys_of(part):
        kinds = get_args(hints[name]) or (hints[name],)
        if not is_optional and (float in kinds or int in kinds):
            yield key
