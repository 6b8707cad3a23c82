"""A run as one row, as `status`, its live view, `report`, `compare` and `--json` show it, and its reading.

Each column is declared once, in `RunRow`, with its unit and meaning. A reading holds the run's row, the
records that it follows from, and marks of the files. It is valid while the marks are: given to the next
reading, nothing that has not changed is read again. A manifest keeps the reading of a run that is over. A
run's whole history is never read, only its small files and the ends of its metrics.jsonl.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

from retrain.base.clock import posix_s, seconds_between
from retrain.base.errors import RecordsError
from retrain.base.locks import is_held
from retrain.base.redaction import redacted
from retrain.records.files import opened, readable
from retrain.records.layout import RunFiles
from retrain.records.lines import Mark, Row, mark_of, number_in, read_tail
from retrain.records.metrics import MetricsEnds, mean, median, read_ends
from retrain.records.row_parts import Columns, column
from retrain.records.run_state import (
    API_OUT,
    ENDINGS,
    UNREADABLE,
    WAITING,
    Attempt,
    Inspection,
    Progress,
    RunState,
    inspect_run,
    read_progress,
    read_start,
    rung_of,
    sealed_done,
)
from retrain.records.spending import columns_of, read_spending
from retrain.records.text import first_of, name_of_run, plain, without_score
from retrain.records.windows import steps_averaged, without_pauses

PAUSES = ("api_pause_s", "api_pauses_s")
PACE_KEYS = ("attempt", "timestamp", "step_time_s", *PAUSES)  # of the rows that `pace_of` reads

TAIL_ROWS = 10  # whose step times are shown
NAME_LIMIT = 200  # characters of an id, a condition (as many as its key allows), a phase or a regime
MESSAGE_LIMIT = 500  # characters; a damaged record names its path twice and the command that repairs it
CALM = (RunState.PENDING, RunState.RUNNING, RunState.DONE, RunState.INTERRUPTED, WAITING)
_FINAL = (RunState.DONE, RunState.FAILED, UNREADABLE)  # these take no more steps
AT_RUNG = "at rung "  # phase of a run that waits at a rung of a search; then the step

NAMED_RUNS = 3  # of those that have no signal for the same reason; the others are counted
FIGURE = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")
LONG_SILENCE = 10.0  # usual steps
LEAST_SILENCE_S = 5.0  # a worker says every second where it is; a loaded machine may delay that
ELSEWHERE_S = 60.0  # likewise, of another machine: clocks differ, and NFS shows a file as late as this
OF_PROGRESS = ("phase", "detail", "updated_at", "engine", "engine_server")  # of status.json of a running run

Marks: TypeAlias = tuple[tuple[int, int] | None, ...]  # bytes, time of the last change in ns; None: no file
MARKED = ("done.json", "attempts.jsonl", "metrics.jsonl")  # what a row of a run that is over depends on
NO_FILES: Marks = (None, None, None)
UNTOUCHED = Inspection(RunState.PENDING, (), None)
NO_MESSAGE = "ended without a message (killed?)"


@dataclass(frozen=True)
class RunEntry:
    """A run as the campaign planned it, and its state in the manifest: pending at first."""

    run_id: str
    condition: str
    seed: int  # -1 for none
    max_steps: int
    config_hash: str = ""  # of the run's resolved config; "" accepts any done.json
    state: str = RunState.PENDING  # or UNREADABLE
    attempts: int = 0
    started_at: str = ""
    ended_at: str = ""
    message: str = ""
    result: Columns | None = None
    reading: RunReading | None = None  # of a run that is over: its row and marks

    @property
    def name(self) -> str:
        """What it is called wherever it is shown."""
        return name_of_run(self.run_id, self.condition, self.seed)


def _of_last_step(default: Any) -> Any:
    """Declare a column with the value, and the meaning, of the same name in the last row of metrics.jsonl."""
    return field(default=default, metadata={**column("", "").metadata, "is_of_last_step": True})


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run. Figures are null until the run has rows with them, and texts empty.

    Every text is safe to print (see `records.text`).
    """

    run_id: str = column("", "name of its directory")
    condition: str = column("", "its name")
    seed: int | None = column("", "null if it has none, or neither manifest nor name gives it")
    state: str = column(
        "",
        "pending, running, done, failed, infrastructure, timeout, stalled, interrupted, "
        "waiting (at a rung of a search), died or unreadable",
    )
    phase: str = column(
        "",
        "last known phase of a running run; where a waiting one waits; from where a pending one goes on; "
        "whether a search has dropped one that is done, or ended it since it won",
        default="",
    )
    detail: str = column("", "how far a long phase is", default="")
    updated_at: str = column("", "when the worker of a running run last said where it is, UTC", default="")
    engine: str = column("", "load of the server that samples, as it said last", default="")
    engine_server: str = column("", "its log; its address if others started it", default="")
    step: int = column("steps", "steps that are complete", default=0)
    max_steps: int | None = column("steps", "steps of the whole run")
    attempt: int = column("", "number of its last attempt; 0 before the first", default=0)
    host: str = column("", "the machine of that attempt", default="")
    reward_first: float | None = column("reward", "mean reward of the first step", default=None)
    reward_last: float | None = column("reward", "mean reward of the last step", default=None)
    reward_mean: float | None = column(
        "reward", "mean over the last `reward_steps` steps, or over `--over`", default=None
    )
    reward_steps: int | None = column(
        "steps", "a tenth of those taken, at least 10 or all; null with `--over`", default=None
    )
    eval_reward: float | None = column(
        "reward",
        "of the last evaluation on held-out prompts; with `--over` the mean of those inside",
        default=None,
    )
    eval_reward_start: float | None = column("reward", "`eval_reward` before the first step", default=None)
    named_eval: str = column("", "the first `[[eval]]` of its last evaluations", default="")
    named_eval_reward: float | None = column(
        "reward", "its reward there; with `--over` the mean of those inside", default=None
    )
    named_eval_start: float | None = column("reward", "the same before the first step", default=None)
    eval_falling: str = column("", "each `[[eval]]` that fell although the reward rose", default="")
    step_time_s: float | None = column("s", "median over the last 10 steps", default=None)
    batch_size: int | None = _of_last_step(None)
    permit_wait_s: float | None = _of_last_step(None)
    bp_regime: str = _of_last_step("")
    bp_p_star: float | None = _of_last_step(None)
    bp_utilization: float | None = _of_last_step(None)
    throttle_level: str = _of_last_step("")
    unscored_fraction: float | None = _of_last_step(None)
    unscored_outage_fraction: float | None = _of_last_step(None)
    unscored_reason: str = _of_last_step("")
    mismatch_rise: str = _of_last_step("")
    no_signal: str = _of_last_step("")
    outside_teacher: str = _of_last_step("")
    sources: str = _of_last_step("")
    runaway: str = _of_last_step("")
    first_steps: str = _of_last_step("")
    sandbox: str = _of_last_step("")
    cost_usd: float | None = column(
        "$", "what all of its attempts cost; null where the price is not known", default=None
    )
    unsure_usd: float | None = column(
        "$", "part of it that is at most so much: calls that a kill or a failure cut off", default=None
    )
    prefill_tokens: int | None = column(
        "tokens", "billed for prompts read in full; null where none are billed", default=None
    )
    cached_tokens: int | None = column("tokens", "billed for prompts read before", default=None)
    sampled_tokens: int | None = column("tokens", "billed for sampling", default=None)
    trained_tokens: int | None = column("tokens", "billed for training", default=None)
    message: str = column(
        "", "why it failed or cannot be read: last line of the error; or rows that loggers lack", default=""
    )
    pace: Pace | None = column("", "[its pace](json.md#pace) so far", default=None)  # noqa: RUF009 - it is a field

    def silent_s(self, now: str) -> float | None:
        """Return for how long a running run has said nothing, once that is long for it; None before.

        A worker says where it is every second; one that is suspended, or whose process is stuck, does not.
        """
        if self.state != RunState.RUNNING:
            return None
        silent_s, usual_s = seconds_between(self.updated_at, now), self.step_time_s
        is_on_time = self.host == os.uname().nodename and usual_s is not None  # to load a model blocks it
        long_s = max(LONG_SILENCE * (usual_s or 0.0), LEAST_SILENCE_S if is_on_time else ELSEWHERE_S)
        return silent_s if silent_s is not None and silent_s >= long_s else None

    @property
    def name(self) -> str:
        """What it is called wherever it is shown."""
        return name_of_run(self.run_id, self.condition, self.seed)

    @property
    def steps_left(self) -> int:
        """Steps that an orchestrator would still have it take."""
        return 0 if self.state in _FINAL else max(0, (self.max_steps or 0) - self.step)

    @property
    def is_done(self) -> bool:
        return self.state == RunState.DONE

    @property
    def unscored(self) -> str:
        """Which share of its completions has no score and why; "" if all have one."""
        if not self.unscored_fraction:
            return ""
        return without_score(self.unscored_fraction, self.unscored_outage_fraction, self.unscored_reason)

    @property
    def waits_for_api(self) -> bool:
        """Whether the API that it calls has paused its calls, or is down."""
        return self.state == RunState.RUNNING and self.phase.startswith(API_OUT)

    @property
    def ended_badly(self) -> bool:
        """Whether it failed, died or cannot be read."""
        return self.state not in CALM


OF_LAST_STEP = {each.name: str(each.type) for each in fields(RunRow) if "is_of_last_step" in each.metadata}
_UNKNOWN = {name: "" if kind == "str" else None for name, kind in OF_LAST_STEP.items()}
KEYS = (*PACE_KEYS, "mean_reward", "eval_reward", "eval_falling", *OF_LAST_STEP)  # of metrics.jsonl
_TEXTS = [c.name for c in fields(RunRow) if c.type == "str" and c.name != "message"]
_TEXTS_OF_STEPS = ["eval_falling", *(name for name, kind in OF_LAST_STEP.items() if kind == "str")]


@dataclass(frozen=True)
class RunReading:
    """A run as its files are; two are equal if they show the same."""

    row: RunRow
    rewards: tuple[float, ...] = ()  # mean reward over the steps so far, where a view follows them
    marks: Marks = field(default=NO_FILES, compare=False)  # taken before the files were read
    is_over: bool = field(default=False, compare=False)  # and recorded how: only `marks` can change the row
    seen: Inspection = field(default=UNTOUCHED, compare=False)  # not kept by a manifest
    ends: MetricsEnds = field(default=MetricsEnds(None, []), compare=False)
    progress: Progress | None = field(default=None, compare=False)
    worker: tuple[bool, Mark | None] = field(default=(False, None), compare=False)  # lives; its status.json


def read_run(
    planned: RunEntry,
    files: RunFiles,
    before: RunReading | None = None,
    read: Callable[[], MetricsEnds] | None = None,
    *,
    is_checked: bool = False,
    is_rolled_up: bool = False,
) -> RunReading:
    """Read a run's directory, which may be missing; return `before` itself if nothing changed since.

    Args:
        planned: the run; the same as `before` was read for.
        files: its files.
        before: an earlier reading.
        read: reads metrics.jsonl instead of `read_ends`, with at least what there is of `KEYS`.
        is_checked: whether a finished run's seal is checked even if its files have their marks.
        is_rolled_up: whether only the row of a run that is over matters; no rows of others are read.

    Raises:
        RecordsError: a file cannot be read, or metrics.jsonl changed after the run finished.
    """
    if before is None:  # in one system call, as most runs of a large campaign have not started
        with suppress(OSError):  # missing, or an error that reading its files will report
            if os.listdir(files.directory) == ["run.toml"]:  # noqa: PTH208 (only names are needed)
                return RunReading(row_of(planned, {"state": RunState.PENDING}))
    marks = _marks_of(files)
    is_same = before is not None and before.marks == marks
    if before is not None and is_same and before.is_over and not is_checked:
        return before
    worker = is_held(files.lock), mark_of(f"{files.directory}/status.json")
    if before is not None and is_same and not before.is_over and before.worker == worker:
        return before
    known = before if before is not None and not before.is_over else None
    if known is not None and known.marks[:2] == marks[:2] and known.worker[0] == worker[0]:
        seen = known.seen
    else:
        seen = inspect_run(files, planned.config_hash)
    is_over = seen.state in ENDINGS and (not seen.attempts or seen.attempts[-1].ending in ENDINGS)
    if before is not None and is_same and is_over and before.row.state == seen.state:
        spent = _spent(files, is_alive=False)
        row = replace(before.row, **spent) if spent else before.row
        return RunReading(row, before.rewards, marks, is_over=True, seen=seen)
    progress, problems = None, list[str]()
    if seen.state != RunState.DONE:
        # it is not synced, so a power loss may empty it: that loses a step count, not the run
        progress = readable(read_progress, files.status, problems.append)
    if known is not None and known.marks[2] == marks[2]:
        ends = known.ends
    elif is_rolled_up and not is_over:
        ends = MetricsEnds(None, [])
    else:
        ends = read() if read is not None else read_ends(files.metrics, TAIL_ROWS, with_late=True)
    row = _row(planned, files, seen, ends, progress, why(files, seen) or "".join(problems))
    return RunReading(row, ends.rewards, marks, is_over, seen, ends, progress, worker)


def read_on(
    files: RunFiles, before: RunReading, read: Callable[[], MetricsEnds], now: str
) -> RunReading | None:
    """Return an earlier reading with the rows that came since; None if the run must be read as a whole.

    `read` returns the ends of `before` itself if there are none. Attempts that begin or end are noticed;
    whether its worker lives, what it does, its pace and cost are those of `before`, unless it is silent.
    """
    if _mark(files, "attempts.jsonl") != before.marks[1]:
        return None
    if before.seen.state != RunState.RUNNING:
        return before
    reading, ends = before, read()
    if ends is not before.ends:
        columns = _of_steps(ends, before.progress)
        safe = {name: plain(columns[name], NAME_LIMIT) for name in _TEXTS_OF_STEPS if columns[name]}
        row = RunRow(**{**vars(before.row), **columns, **safe})
        reading = replace(before, row=row, rewards=ends.rewards, ends=ends)
    return reading if reading.row.silent_s(now) is None else None


def is_still_done(planned: RunEntry, files: RunFiles) -> bool:
    """Whether its entry holds for a done run: files, rows and what it cost are as they were read.

    Raises RecordsError as `read_run` does.
    """
    before = planned.reading
    if before is None or before.row.state != RunState.DONE or before.marks != _marks_of(files):
        return False
    if sealed_done(files, planned.config_hash) is None:
        return False
    return all(getattr(before.row, name) == value for name, value in _spent(files, is_alive=False).items())


def _marks_of(files: RunFiles) -> Marks:
    """Return marks of the files that the row of a run that is over depends on."""
    return tuple(_mark(files, name) for name in MARKED)


def _mark(files: RunFiles, name: str) -> tuple[int, int] | None:
    change = mark_of(f"{files.directory}/{name}")  # a Path would double the cost
    return change and change[1:]


def _row(
    planned: RunEntry,
    files: RunFiles,
    seen: Inspection,
    ends: MetricsEnds,
    progress: Progress | None,
    message: str,
) -> RunRow:
    final = number_in(seen.done.result, "eval_reward") if seen.done else None
    start = read_start(files)
    columns: dict[str, Any] = {
        "state": str(seen.state),
        "attempt": seen.attempts[-1].number if seen.attempts else 0,
        "host": seen.attempts[-1].host if seen.attempts else "",
        "eval_reward_start": start.value("eval_reward"),
        "message": message,
        "pace": pace_of(ends, seen.attempts),
        "max_steps": progress.max_steps if progress is not None else None,
        "named_eval": named_eval(start.metrics),
        **_of_steps(ends, progress),
        **_spent(files, is_alive=seen.state == RunState.RUNNING),
    }
    if seen.done is not None:
        columns |= _last_named([seen.done.result])
        columns["eval_falling"] = str(seen.done.result.get("eval_falling", ""))
    if final is not None:
        columns["eval_reward"] = final
    if name := columns["named_eval"]:
        columns["named_eval_start"] = start.value(f"eval_{name}_reward")
    if progress is not None and seen.state == RunState.RUNNING:
        columns |= {name: getattr(progress, name) for name in OF_PROGRESS}
        if seen.attempts:  # what an attempt before it said is no silence of the worker that starts
            last = seen.attempts[-1]
            columns["updated_at"] = max(progress.updated_at, last.started_at) if last.ended_at is None else ""
    rung = rung_of(seen.attempts[-1].message) if seen.attempts else ""
    if rung and seen.state == RunState.INTERRUPTED:
        columns |= {"state": WAITING, "phase": f"{AT_RUNG}{rung}"}
    return row_of(planned, columns)


def _of_steps(ends: MetricsEnds, progress: Progress | None) -> dict[str, Any]:
    """Return the columns that follow from the rows of steps."""
    last: Row = ends.last[-1] if ends.last else {}
    step = last.get("step", 0)
    rewards = [reward for _, reward in ends.late if reward is not None]
    held_out = (number_in(row, "eval_reward") for row in reversed(ends.last))
    return {
        "step": step if progress is None else max(progress.step, step),
        "reward_first": number_in(ends.first, "mean_reward"),
        "reward_last": rewards[-1] if rewards else None,
        "reward_mean": mean(rewards),
        "reward_steps": min(step, steps_averaged(step)) if rewards else None,
        "eval_reward": next((reward for reward in held_out if reward is not None), None),
        "eval_falling": str(last.get("eval_falling", "")),
        "step_time_s": median(number_in(row, "step_time_s") for row in ends.last),
        **_last_named(ends.last),
        **_UNKNOWN,
        **{name: _value(last, name, kind) for name, kind in OF_LAST_STEP.items() if name in last},
    }


def _last_named(rows: Sequence[Columns]) -> dict[str, Any]:
    """Return the columns of the first `[[eval]]` in the last row that has one."""
    for row in reversed(rows):
        if name := named_eval(row):
            return {"named_eval": name, "named_eval_reward": number_in(row, f"eval_{name}_reward")}
    return {}


def named_eval(row: Mapping[str, object]) -> str:
    """Return the name of the first `[[eval]]` that was made for a row; "" if there is none."""
    of_named = (key for key in row if key.endswith("_reward_se"))  # which other evaluations lack
    return next(of_named, "").removeprefix("eval_").removesuffix("_reward_se")


def row_of(planned: RunEntry, columns: Mapping[str, Any]) -> RunRow:
    """Return the row of a planned run; texts are made safe to print."""
    row = {**columns, "run_id": planned.run_id, "condition": planned.condition}
    row |= {name: plain(row[name], NAME_LIMIT) for name in _TEXTS if row.get(name)}
    row["message"] = plain(row.get("message", ""), MESSAGE_LIMIT)
    row["seed"] = planned.seed if planned.seed >= 0 else None
    row["max_steps"] = planned.max_steps or row.get("max_steps")
    return RunRow(**row)


def unreadable_row(planned: RunEntry, error: RecordsError) -> RunRow:
    """Return the row of a run whose files cannot be read."""
    return row_of(planned, {"state": UNREADABLE, "message": str(error)})


def _spent(files: RunFiles, *, is_alive: bool) -> dict[str, Any]:
    spending = read_spending(files)
    return columns_of(spending, is_alive=is_alive) if spending is not None else {}


def _value(row: Row, key: str, kind: str) -> str | int | float | None:
    """Return a value of a row, converted to a column's type."""
    if kind == "str":
        return str(row[key])
    if kind == "int | None":
        return row[key] if isinstance(row[key], int) else None
    return number_in(row, key)


def why(files: RunFiles, seen: Inspection) -> str:
    """Return why a run failed (the last line of its error), or the message of a finished run.

    A worker that was killed records no error; then its last output is quoted as what it is.
    """
    if seen.state == RunState.DONE and seen.attempts:
        return seen.attempts[-1].message
    if seen.state in CALM:
        return ""
    lines = seen.attempts[-1].message.strip().splitlines()
    if lines:
        return lines[-1]
    output = last_output(files, 1)
    return NO_MESSAGE + (f"; last output: {output[-1]}" if output and output[-1].strip() else "")


def last_output(files: RunFiles, count: int) -> list[str]:
    """Return the last lines of a run's output, as they are but for secrets; none without a file."""
    try:
        with opened(files.output_log) as fd:
            return [redacted(line.decode(errors="replace")) for line in read_tail(fd, count)]
    except FileNotFoundError:
        return []


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run takes its steps."""

    steps: int  # measured
    step_s: float  # mean, including the time between steps
    recent_s: tuple[float, ...]  # times of the last steps alone
    startup_s: float | None
    since_s: float | None = None  # start and end of the measurement, in seconds since 1970
    until_s: float | None = None
    late_s: float | None = None  # mean step time since the middle, in the same attempt, as `step_s`
    middle_s: float | None = None  # its time, in seconds since 1970
    closing_s: float | None = None  # from the last step to the end of a run that is done

    @property
    def late_steps(self) -> float:
        """The steps behind `late_s`; 0 if the middle is not known."""
        if self.late_s is None or self.middle_s is None or self.until_s is None or self.late_s <= 0:
            return 0.0
        return max(0.0, (self.until_s - self.middle_s) / self.late_s)


def pace_of(ends: MetricsEnds, attempts: Sequence[Attempt]) -> Pace | None:
    """Return a run's pace from the first and the last rows (with `PACE_KEYS`); None before a whole step."""
    recent = tuple(s for row in ends.last if (s := active_s(row)) is not None and s >= 0)
    first = ends.first
    if not recent or first is None:
        return None
    steps, took_s = len(recent), math.fsum(recent)
    last = ends.last[-1]
    until_s = posix_s(last.get("timestamp"))
    since = int(last["step"]) - int(number_in(first, "step") or 0)
    whole_s = seconds_between(first.get("timestamp"), last.get("timestamp"))
    whole_s = whole_s and whole_s - paused_between_s(first, last)  # with the time between steps
    # less than 0 where the clock was set back meanwhile
    if since > 0 and whole_s is not None and whole_s >= 0 and first.get("attempt") == last.get("attempt"):
        steps, took_s = since, whole_s
    since_s = until_s - took_s if until_s is not None else None
    startup_s = _startup_s(first, attempts, recent)
    closing_s = None
    if attempts and attempts[-1].ending == RunState.DONE:
        whole_s = seconds_between(last.get("timestamp"), attempts[-1].ended_at)
        closing_s = whole_s if whole_s is not None and whole_s >= 0 else None
    late_s, middle_s = _late(ends)
    return Pace(steps, took_s / steps, recent, startup_s, since_s, until_s, late_s, middle_s, closing_s)


def _late(ends: MetricsEnds) -> tuple[float, float] | tuple[None, None]:
    """Return the mean step time since the middle, and when that was; None where they are not known."""
    middle, last = ends.middle, ends.last[-1]
    if middle is None or middle.get("attempt") != last.get("attempt"):
        return None, None
    whole_s = seconds_between(middle.get("timestamp"), last.get("timestamp"))
    took_s = whole_s and whole_s - paused_between_s(middle, last)
    middle_s, steps = posix_s(middle.get("timestamp")), int(last["step"]) - int(middle["step"])
    if took_s is None or took_s <= 0 or middle_s is None or not 0 < steps < int(last["step"]):
        return None, None
    return took_s / steps, middle_s


def _startup_s(first: Row, attempts: Sequence[Attempt], recent_s: Sequence[float]) -> float | None:
    if not attempts or first.get("attempt") != attempts[0].number:
        return None
    whole_s = seconds_between(attempts[0].started_at, first.get("timestamp"))
    if whole_s is None:
        return None
    return max(0.0, whole_s - (number_in(first, PAUSES[1]) or 0.0) - sorted(recent_s)[len(recent_s) // 2])


def active_s(row: Row) -> float | None:
    """Return a step's time without pauses of its API; None if it is not known."""
    step_s = number_in(row, "step_time_s")
    return step_s and without_pauses(step_s, number_in(row, PAUSES[0]) or 0.0)


def paused_between_s(first: Row, last: Row) -> float:
    """Return the pauses of the API between the ends of two steps of an attempt."""
    ends = number_in(first, PAUSES[1]), number_in(last, PAUSES[1])
    return max(0.0, (ends[1] or 0.0) - (ends[0] or 0.0))


def signs_of(runs: Sequence[RunRow]) -> tuple[dict[str, str], ...]:
    """Return what the rows of runs show to be wrong with them, each kind by the runs or conditions."""
    worst = sorted(runs, key=lambda run: -(run.unscored_fraction or 0.0))
    return (
        {run.name: run.unscored for run in worst if run.unscored},
        {run.name: run.mismatch_rise for run in runs if run.mismatch_rise},
        {run.name: run.outside_teacher for run in runs if run.outside_teacher},
        without_signal(runs),
        _identical(runs),
    )


def without_signal(runs: Iterable[RunRow]) -> dict[str, str]:
    """Return why runs have no learning signal, once for each condition and reason, by the runs' names.

    A reason is the same with other figures: those shown are the first run's.
    """
    alike: dict[tuple[str, str], list[RunRow]] = {}
    for run in runs:
        if run.no_signal:
            reason = FIGURE.sub("", run.no_signal.partition(": ")[2])
            alike.setdefault((run.condition, reason), []).append(run)
    return {first_of([run.name for run in same], NAMED_RUNS): same[0].no_signal for same in alike.values()}


def _identical(runs: Iterable[RunRow]) -> dict[str, str]:
    """Return what is to be known of conditions whose runs agree to the last digit, by these conditions."""
    alike: dict[tuple[int | None, str], dict[str, None]] = {}
    for run in runs:
        if run.first_steps:
            alike.setdefault((run.seed, run.first_steps), {})[run.condition] = None
    seeds: dict[str, list[int | None]] = {}
    for (seed, _), conditions in alike.items():
        if len(conditions) > 1:
            seeds.setdefault(first_of(list(conditions), NAMED_RUNS), []).append(seed)
    return {
        names: f"10 steps of seed {first_of(list(map(str, equal)), NAMED_RUNS)} agree to the last digit: "
        "what sets these conditions apart had no effect in them"
        for names, equal in seeds.items()
    }
