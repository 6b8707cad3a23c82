"""What a campaign with `[decision]` has looked at and concluded; and how a run's final value is computed.

What was once looked at cannot be looked at again as if for the first time. So decision.jsonl, which is only
added to, has the design, written before the first look, and each round with the values that its look used: a
run that is repaired later, or runs again, changes no verdict. A line for a changed design begins the decision
anew.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from retrain.records.files import record_of
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, append_line, measured, number_in, parse_line, read_lines
from retrain.records.metrics import mean, read_metrics
from retrain.records.row_parts import Columns
from retrain.records.text import count_of, first_of, number, plain
from retrain.records.windows import AXES, STEPS, Window, amount, amounts

VERDICTS = {
    "better": "better than {}",
    "worse": "worse than {}",
    "no_difference": "no difference from {} found",
    "undecided": "not decided against {}",
    "continue": "still compared with {}",
}
OF_NEITHER_DIRECTION = {"better": "higher than {}", "worse": "lower than {}"}  # as of an entropy
OPEN = "continue"
DROPPED = "dropped"
HELD_OUT = "eval_"
FAULTS = (
    "_error_fraction",
    "unscored_fraction",
    "_timeout_fraction",
    "zero_signal_group_fraction",
    "max_token_hit_rate",
)
COUNTED_FAULTS = ("reward_faults", "reward_over_limits", "episode_errors", "episode_retries", "tool_errors")
LOWER_IS_BETTER = ("_time_s", "_wait_s", *FAULTS, *COUNTED_FAULTS)
UNSCORED = "unscored_fraction"  # of all completions sampled for training so far
MEASURE = re.compile(r"_(?:correct_rate|reward|pass_at_(?P<k>\d+))$")  # of an evaluation
HIGHER_IS_BETTER = re.compile(r"(reward|correct_rate|tokens_per_second|pass_at_\d+)$")
GONE = "decision: the table is gone"
ADDED = "decision: the table was added when runs had begun, so their number was not planned"
LAST_PART = Window()
TOLD = ("metric", "reference", "error", "smallest_difference", "max_seeds")  # keys that verdicts tell


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
    alone_low: float | None = None  # where `low` or `high` is null: Student's, of these seeds alone
    alone_high: float | None = None
    rung: float = 0.0  # to which it is about; 0: the whole window


@dataclass(frozen=True)
class QuestionNoise:
    """What would narrow a difference in an `[[eval]]`, over new seeds and new questions."""

    seeds: int
    questions: int  # that all their runs answered
    by_seeds: float  # share of its variance that twice the seeds would remove
    by_questions: float  # share that twice the questions would

    def __str__(self) -> str:
        worth_more = "questions are worth more than more seeds"
        if self.by_seeds > self.by_questions:
            worth_more = "seeds are worth more than more questions"
        elif self.by_seeds == self.by_questions:
            worth_more = "questions and more seeds are worth the same"
        return (
            f"more {worth_more}: twice the questions ({self.questions} now) would remove "
            f"{self.by_questions:.0%} of the variance of the difference, twice the seeds ({self.seeds} now) "
            f"{self.by_seeds:.0%}"
        )


@dataclass(frozen=True)
class Questions:
    """How many questions of an `[[eval]]` decide, as was chosen before the first look."""

    evaluation: str
    count: int  # that each run is asked at its end
    before: int  # that the evaluation asked until then, the first of them
    share: float | None  # of a seed's squared difference, from the choice of these; null: too few seeds

    @property
    def are_more(self) -> bool:
        return self.count > self.before

    def __str__(self) -> str:
        noise = "too few seeds tell whether further ones would help"
        if self.share is not None:
            noise = f"the choice of {self.before} was {self.share:.0%} of the noise of a seed's difference"
        if self.are_more:
            return f"{self.evaluation} asks {self.count} questions instead of {self.before}: {noise}"
        return f"{self.evaluation} goes on with {self.count} questions: {noise}"


@dataclass(frozen=True)
class Unreached:
    """Runs that ended before the end of the window that is compared; amounts in its unit."""

    runs: int
    least: float  # at which they ended
    most: float
    end: float  # of the window, or the first rung to which one of them did not come

    def told(self, per: str) -> str:
        """Return it as a sentence, with what to do."""
        ended = amount(self.least)
        if amount(self.most) != ended:
            ended += f" to {amount(self.most)}"
        return (
            f"{count_of(self.runs, 'run')} ended before the end of the window that is compared, at {ended} "
            f"of {amount(self.end)} {AXES[per].unit}, and their seeds are left out; raise max_steps, or "
            "end the window earlier"
        )


@dataclass(frozen=True)
class Decision:
    """The verdicts of a campaign with `[decision]`, and what they saved."""

    metric: str
    reference: str
    error: float
    max_seeds: int
    runs: int  # asked for so far
    saved_runs: int  # not needed of all conditions with all seeds; 0 until the end
    # decided, seeds or budget (used up), failed or unreached (runs), dropped (from the file); "": not yet
    ended: str
    smallest_difference: float | None = None
    conditions: tuple[ConditionDecision, ...] = ()  # all but the reference
    changes: tuple[str, ...] = ()  # to the design after looks; the last began the decision anew
    again: tuple[str, ...] = ()  # runs that ended in another way than when they were looked at
    unscored: Mapping[str, float] = field(default_factory=dict)  # by condition, if any; see `unscored_in`
    window: Window = LAST_PART  # over which runs are compared; of rungs, each ends one
    rungs: tuple[float, ...] = ()  # where conditions are looked at, in the unit of the window
    saved_share: float = 0.0  # of what all runs would take, by runs that stopped at rungs or the window's end
    last_steps: int = 0  # whose mean is a run's value; 0: not told, or it is a held-out value
    noise: QuestionNoise | None = None  # of an `[[eval]]` that decides, by the runs that are done
    questions: Questions | None = None  # with `max_questions`, once they are chosen
    asked_again: int = 0  # finished runs that have yet to answer the further ones
    unreached: Unreached | None = None

    def window_at(self, rung: float) -> Window:
        """Return the window that ends at a rung; 0 for the whole."""
        return replace(self.window, end=rung) if rung else self.window

    @property
    def shared_window(self) -> Window:
        """The window to whose end every run comes that is not lost: where the first verdict is."""
        return self.window_at(min((one.rung for one in self.conditions), default=0.0))

    def windows_of(self, conditions: Collection[str]) -> list[Window]:
        """Return the windows of the verdicts on these conditions."""
        return [self.window_at(one.rung) for one in self.conditions if one.condition in conditions]


def verdict_in_words(verdict: str, metric: str, reference: str) -> str:
    """Return how a condition compares with the reference, for readers."""
    words = VERDICTS if is_higher_better(metric) is not None else VERDICTS | OF_NEITHER_DIRECTION
    return words.get(verdict, verdict).format(reference)


def verdict_of(one: ConditionDecision, decision: Decision) -> str:
    """Return a verdict as a sentence, with its interval."""
    verdict = verdict_in_words(one.verdict, decision.metric, decision.reference)
    window = decision.window_at(one.rung)
    over = "" if window == Window() else f" over {window}"
    clauses = [f"{one.condition}: {verdict} in {decision.metric}{over}"]
    if not one.seeds and one.verdict == OPEN:
        clauses.append("not looked at yet")
    elif not one.seeds and one.rung and not one.reason:
        clauses.append("not looked at")
    else:
        clauses[0] += f" after {count_of(one.seeds, 'seed')}"
    if one.difference is not None:
        clauses[0] += f": difference {_signed(one.difference)} ({_interval_of(one, decision)})"
    if one.verdict in ("better", "worse") and one.seeds < decision.max_seeds:
        clauses[0] += ", found early, which overestimates differences"
    if decision.rungs and 0 < one.rung < decision.rungs[-1] and one.verdict not in (OPEN, "undecided"):
        clauses.append("what comes after is not compared, and curves may cross")
    if one.verdict == "no_difference" and (why := _why_no_difference(one, decision)):
        clauses.append(why)
    if one.reason:
        clauses.append(one.reason)
    return "; ".join(clauses)


def _why_no_difference(one: ConditionDecision, decision: Decision) -> str:
    smallest, matters = decision.smallest_difference, ""
    if smallest is not None:
        matters = f" of {smallest:g}, the smallest that matters"
        if one.low is not None and one.high is not None and max(-one.low, one.high) < smallest:
            return f"a difference{matters}, is excluded"
    if one.seeds >= decision.max_seeds:
        return ""
    return f"further seeds, at most {decision.max_seeds} in all, would probably show no difference{matters}"


def _interval_of(one: ConditionDecision, decision: Decision) -> str:
    level = f"{100 * (1 - decision.error):g} % interval"
    if one.low is not None and one.high is not None:
        least = 1e-9 * (one.high - one.low)  # a bound at 0 is found to a rounding error
        low, high = (0.0 if abs(bound) < least else bound for bound in (one.low, one.high))
        return f"{level} {_signed(low)} to {_signed(high)}"
    if one.alone_low == one.alone_high == 0:
        return "the same value with each seed"
    if one.alone_low is not None and one.alone_high is not None:
        bounds = f"{_signed(one.alone_low)} to {_signed(one.alone_high)}"
        return f"{level} {bounds}, which does not allow for the looks: too few seeds for one that does"
    return f"too few seeds for a {level}"


def _signed(value: float) -> str:
    if 0 < abs(value) < 0.01:
        return f"{value:+.3g}"
    return f"+{number(value)}" if value > 0 else number(value)


def ending_of(decision: Decision) -> str:
    """Return how far the campaign is, as a sentence."""
    if not decision.ended:
        still = [one.condition for one in decision.conditions if one.verdict == OPEN]
        what = f"for {first_of(still)} " if len(still) < len(decision.conditions) else ""
        most = f"at most {decision.max_seeds} of each condition"
        return f"seeds are added {what}until a verdict is found, {most}"
    if decision.ended == DROPPED:
        return "[decision] was taken out of campaign.toml after these verdicts: they stand as they were"
    unreached = decision.unreached.told(decision.window.per) if decision.unreached else "runs end too early"
    why = {
        "decided": "each comparison has its verdict, so no seeds are added",
        "seeds": f"all {count_of(decision.max_seeds, 'seed')} are used up",
        "failed": "no seeds are added while runs fail; `retrain resume DIR --failed` goes on",
        "unreached": f"no seeds are added, as {unreached}",
    }
    saved = f"{count_of(decision.saved_runs, 'run')} saved of {decision.runs + decision.saved_runs}"
    ends_early = decision.window.per == STEPS and decision.window.end is not None
    if decision.saved_share and (decision.rungs or ends_early):
        saved += f", and {decision.saved_share:.0%} of all {AXES[decision.window.per].unit}"
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
    lines = [verdict_of(condition, decision) for condition in decision.conditions]
    shares = [f"{100 * share:.3g} % ({name})" for name, share in decision.unscored.items()]
    if shares:
        lines.append(f"completions without a score: {', '.join(shares)}; values rest on the others")
    removed = {condition.condition: condition.variance_removed for condition in decision.conditions}
    pairing = [
        f"{abs(share):.0%} {'smaller' if share > 0 else 'larger'} ({name})"
        for name, share in removed.items()
        if share is not None and abs(share) >= 0.01
    ]
    if pairing:
        what = "comparing the same seeds made the variance of the difference"
        lines.append(f"{what} {', '.join(pairing)}")
    if decision.last_steps:
        lines.append(f"the {decision.metric} of a run is the mean of its last {decision.last_steps} steps")
    if decision.questions:
        line = str(decision.questions)
        if decision.asked_again:
            line += f"; {count_of(decision.asked_again, 'finished run')} still to ask"
        lines.append(line)
    if decision.noise:
        lines.append(str(decision.noise))
    if decision.unreached and decision.ended != "unreached":  # whose ending says it
        lines.append(decision.unreached.told(decision.window.per))
    if decision.changes:  # what was not as planned, so that the verdicts must be read with it
        lines.append(
            f"the design was changed after data were seen, and the decision made anew: "
            f"{'; '.join(decision.changes)}. The error of {decision.error:g} no longer holds"
        )
    if decision.again:
        runs = first_of(decision.again)
        lines.append(
            f"not part of the decision: what {runs} gave after the look at that seed; the look counts"
        )
    return tuple(plain(line, 500) for line in (*lines, ending_of(decision)))


def looks_of(decision: Decision | None, added_seeds: int) -> Iterator[str]:
    """Return what a comparison of all seeds must say of the looks at them."""
    if decision is not None:
        yield (
            "[decision] looked at the results to choose the number of seeds; its verdicts in "
            f"{plain(decision.metric)} allow for that. Intervals of the tables, and outcomes in "
            "other metrics, do not."
        )
    if added_seeds:
        yield (
            f"Seeds were added by hand afterwards ({added_seeds} to each condition). That look was not "
            "planned, so differences are found by chance more often than 1 in 20 times."
        )


def evaluation_of(metric: str) -> str:
    """Return the name of the `[[eval]]` whose record of questions has a metric; "" if there is none."""
    measure = MEASURE.search(metric) if metric.startswith(HELD_OUT) else None
    return "" if measure is None or measure["k"] else metric[len(HELD_OUT) : measure.start()]


def questions_key(metric: str) -> str:
    """Return the key of the number of questions that a metric's `[[eval]]` was asked, where not its own."""
    return f"{HELD_OUT}{evaluation_of(metric)}_questions"


def is_higher_better(metric: str) -> bool | None:
    """Return whether higher is better; None if neither is."""
    if metric.endswith(LOWER_IS_BETTER):
        return False
    return True if HIGHER_IS_BETTER.search(metric) else None


def value_over(
    files: RunFiles, result: Columns, metric: str, window: Window = LAST_PART
) -> tuple[bool, float | None]:
    """Return whether a run has come to the end of a window, and its value in a metric there.

    Args:
        result: of a finished run; empty of others.
    """
    rows = [] if metric.startswith(HELD_OUT) and window == LAST_PART else read_metrics(files.directory)
    return value_of_rows(rows, result, metric, window)


def reach_of(files: RunFiles, per: str) -> float | None:
    """Return how much of an axis a run has come to; None if its rows do not tell."""
    ends = _ends_of(read_metrics(files.directory), per)
    return ends[-1] if ends else None


def value_of_rows(
    rows: Sequence[Row], result: Columns, metric: str, window: Window
) -> tuple[bool, float | None]:
    """Return what `value_over` does, of a run's rows."""
    if metric.startswith(HELD_OUT) and window == LAST_PART:
        return True, number_in(result, metric)
    ends, final = _ends_of(rows, window.per), number_in(result, metric)
    if not ends or (window.end is not None and ends[-1] < window.end):
        return False, None
    if not metric.startswith(HELD_OUT):
        return True, mean_over(rows, metric, window)
    made = {at: value for at, row in enumerate(rows) if (value := number_in(row, metric)) is not None}
    if final is not None:
        made.setdefault(len(rows) - 1, final)
    return True, mean(made[at] for at in window.evaluations(ends, list(made)))


def evaluations_over(rows: Sequence[Row], steps: Collection[int], window: Window) -> list[int]:
    """Return which evaluations count in a window, by the steps after which they were made.

    Args:
        rows: of the run.
        steps: of evaluations; those without a row, as at the start, do not count.
    """
    if not (ends := _ends_of(rows, window.per)):
        return []
    made = [at for at, row in enumerate(rows) if row["step"] in steps]
    return [rows[at]["step"] for at in window.evaluations(ends, made)]


def unscored_key(metric: str) -> str:
    """Return the key of the share without a score of the completions that a metric is of."""
    return f"{MEASURE.sub('', metric)}_unscored_fraction" if metric.startswith(HELD_OUT) else UNSCORED


def unscored_in(in_training: float | None, result: Columns, metric: str) -> float:
    """Return a run's share of completions without a score, in training or the metric's evaluation."""
    return max(in_training or 0.0, number_in(result, unscored_key(metric)) or 0.0)


def mean_over(rows: Sequence[Row], metric: str, window: Window) -> float | None:
    """Return the mean of a metric of rows over a window; None without a value there, or without its axis."""
    ends = _ends_of(rows, window.per)
    return window.mean(ends, _column(rows, metric)) if ends else None


def _ends_of(rows: Sequence[Row], per: str) -> Sequence[float] | None:
    """Return how much of an axis a run has come to after each of its rows; None if they do not tell."""
    return amounts([row["step"] for row in rows], [_column(rows, key) for key in AXES[per].keys], per)


def _column(rows: Sequence[Row], key: str) -> list[float]:
    return [measured(row.get(key)) for row in rows]


def value_key(run_id: str, rung: float) -> str:
    """Return the name of a run's value at a rung, 0 for that at its end."""
    return f"{run_id}@{rung:.15g}" if rung else run_id


@dataclass(frozen=True)
class Round:
    """One round that was looked at."""

    asked: Mapping[str, int]  # seeds of each condition but the reference, from the first round on
    values: Mapping[str, float | None]  # new in it, by `value_key`; None: the run ended without one
    decided: tuple[ConditionDecision, ...] = ()  # conditions that are closed since
    ended: str = ""  # "budget": no further round begins
    rungs: Mapping[str, float] = field(default_factory=dict)  # of each condition
    promoted: tuple[str, ...] = ()  # conditions that go on to the next rung


@dataclass(frozen=True)
class Looks:
    """What a campaign has looked at so far."""

    design: Mapping[str, object]  # keys of `[decision]`; empty before the first look
    rounds: tuple[Round, ...] = ()
    changes: tuple[str, ...] = ()  # to the design after a look, each with when
    is_lost: bool = False  # there were looks, and their file is gone
    questions: Questions | None = None  # with `max_questions`, once they are chosen

    @property
    def was_begun(self) -> bool:
        """Whether there ever was a look."""
        return bool(self.design or self.changes)

    @property
    def values(self) -> dict[str, float | None]:
        """What was looked at, by `value_key`."""
        return {run_id: value for one in self.rounds for run_id, value in one.values.items()}

    @property
    def seeds(self) -> int:
        """Most seeds of a condition that were looked at."""
        return max((count for one in self.rounds for count in one.asked.values()), default=0)

    def differs(self, design: Mapping[str, object]) -> Iterator[str]:
        """Iterate over the keys in which a design differs from the one that was looked at."""
        if self.design and not design:
            yield GONE
        if design and self.was_begun and not self.design:
            yield "decision: the table is there again"
        for key, value in design.items():
            if key in self.design and self.design[key] != value:
                yield f"decision.{key}: {self.design[key]!r} -> {value!r}"


def read_looks(path: Path) -> Looks:
    """Read decision.jsonl; lines that are no design, no round and no choice of questions are skipped."""
    looks = Looks({})
    for line in read_lines(path):
        row = parse_line(line) or {}
        with suppress(ValueError):
            if row.get("event") == "design":
                looks = record_of(Looks, row)
            elif row.get("event") == "round":
                looks = replace(looks, rounds=(*looks.rounds, record_of(Round, row)))
            elif row.get("event") == "questions":
                looks = replace(looks, questions=record_of(Questions, row))
    return looks


def known_looks(path: Path, told: Decision | None) -> Looks:
    """Read decision.jsonl; if it is lost, its design is known by the verdicts that were told."""
    looks = read_looks(path)
    if looks.was_begun or told is None:
        return looks
    if told.ended == DROPPED:
        return Looks({}, changes=(GONE,))
    is_looked_at = told.ended or any(one.seeds for one in told.conditions)
    return Looks({key: getattr(told, key) for key in TOLD}, is_lost=True) if is_looked_at else looks


def begin_design(path: Path, design: Mapping[str, object], changes: Sequence[str]) -> None:
    """Write the design of the looks that follow, and how it differs from those before."""
    append_line(path, {"event": "design", "design": dict(design), "changes": list(changes)})


def append_questions(path: Path, questions: Questions) -> None:
    """Write how many questions are asked from now on, once after a design and before its first round."""
    append_line(path, {"event": "questions", **asdict(questions)})


def append_round(path: Path, one: Round) -> None:
    """Write a round."""
    append_line(path, {"event": "round", **asdict(one)})
