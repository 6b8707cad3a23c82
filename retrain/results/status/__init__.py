"""Reads a log directory into rows of campaigns, their conditions and their runs.

It only reads files, so it works on a live, crashed or copied directory: small files and the ends of large
ones, never a whole history. Every text in the rows is safe to print (see `records.text`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from retrain.base.clock import utc_at, utc_now
from retrain.base.errors import ConfigError, RecordsError, first_line
from retrain.base.locks import is_held
from retrain.base.redaction import redacted
from retrain.records.campaign_state import AlertBook, why_stopped
from retrain.records.decision import Decision
from retrain.records.files import readable
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    campaign_of,
    files_of_runs,
    find_campaigns,
    is_single_run,
    refuse_links,
    require_own,
)
from retrain.records.manifest import Expectation, Manifest, entry_from_name, read_manifest
from retrain.records.metrics import mean, median, sample_std
from retrain.records.mirror import read_state
from retrain.records.provenance import known_origin, recorded_entry
from retrain.records.run_row import RunEntry, RunRow, read_run, unreadable_row
from retrain.records.run_state import UNREADABLE, WAITING, RunState, read_start
from retrain.records.rungs import (
    Searched,
    all_of,
    as_decided,
    as_expected,
    is_out,
    is_settled,
    read_proposals,
)
from retrain.records.text import (
    MISSING,
    as_typed,
    count_of,
    dollars,
    first_of,
    format_duration,
    number,
    plain,
)
from retrain.records.windows import Window

if TYPE_CHECKING:
    from retrain.control.semaphore import Holder


TimeLeft: TypeAlias = tuple[float, float] | tuple[None, None]  # P50 and P90 in seconds, where known
EVAL_REWARD = "eval_reward"
_NAME_LIMIT = 120
_LONGEST_COMMAND = 4000
_UNKNOWN = Manifest(0, "", "", "", None, "", "", "", "", ())  # of a campaign without a manifest


@dataclass(frozen=True)
class ConditionStatus:
    """One condition over its seeds."""

    condition: str
    runs: int
    done: int
    running: int
    failed: int  # ended badly: failed, infrastructure, timeout, stalled, died, unreadable
    reward_mean: float | None  # over done and running seeds, each by its last rows; fresh ones after a search
    reward_std: float | None  # sample standard deviation over those seeds; None below two
    step_time_s: float | None  # median over seeds
    cost_usd: float | None = None  # of all seeds; None where no price is known
    start: float | None = None  # what `[decision]` compares, else eval_reward, before training, over seeds
    reward_of: str = ""  # which seeds these are, where conditions have others; of a search, also the steps


@dataclass(frozen=True)
class PermitStatus:
    """A campaign's permits at present."""

    permits: int
    holders: tuple[Holder, ...]  # processes with an API call in flight
    waiting: int
    change: str  # the last automatic change of their number, with its reason; "" if there was none


@dataclass(frozen=True)
class MirrorStatus:
    """How far a campaign's copy is."""

    url: str
    copied_at: str  # when the directory was as the copy is, UTC; "" before the first copy
    behind_s: float | None  # 0 once all is copied; None before the first copy
    behind_steps: int  # that a resume from the copy repeats, over all runs
    behind_bytes: int  # not copied yet
    problem: str  # why nothing can be copied now


@dataclass(frozen=True)
class CampaignStatus:
    """One campaign, or one single run."""

    id: str  # name of its directory
    name: str
    state: str  # pending, running, done, failed (ended, not all done), interrupted (work left, none running)
    started_at: str
    ended_at: str  # "" while it is running
    conditions: tuple[ConditionStatus, ...]  # the matrix: these rows ...
    seeds: tuple[int | None, ...]  # ... and these columns
    runs: tuple[RunRow, ...]
    step_time_s: float | None  # median over runs
    steps_done: int
    steps_total: int | None
    eta_s: float | None  # time left, P50; None unless something is running
    permits: PermitStatus | None
    problem: str  # which of the campaign's own files cannot be read, and why
    eta_p90_s: float | None = None  # time left, P90
    searched: Searched | None = None  # what `[campaign.search]` has found; None without that table
    decision: Decision | None = None  # what `[decision]` has found; None without that table
    expected: Expectation | None = None  # of the whole campaign, and the actual time
    cost_usd: float | None = None  # of all runs; None where no price is known
    budget_usd: float | None = None  # `[budget].usd`
    stopped: str = ""  # why the campaign stopped by itself
    is_supervised: bool = False  # whether its orchestrator lives
    resume_with: str = ""  # the command that resumes it, unless all is done or its orchestrator lives
    alerts: str = ""  # how many alerts were not delivered, and why
    over: Window | None = None  # of the rewards in these rows; null: the last steps of each run
    over_note: str = ""  # why that is not all of the window that was named, or not known
    mirror: MirrorStatus | None = None  # how far its copy is; None without `[logging].mirror`


# Returns the rows of a directory's runs with other rewards, over which window they are means, and what is
# cut off or not known
Average: TypeAlias = Callable[[Path, list[RunRow]], tuple[list[RunRow], Window, str]]


def survey(
    log_dir: Path, manifest: Manifest | None = None, average: Average | None = None
) -> tuple[CampaignStatus, ...]:
    """Return all campaigns and single runs in a directory, oldest first, or the directory's own.

    Files that cannot be read are reported in a run's message or a campaign's problem. `manifest` is that of
    the directory's own campaign, if neither it nor the runs that it knows to be over need be read.
    `average` makes rewards those of another window than the last steps; it reads whole histories.

    Raises:
        RecordsError: there is no such directory, or nothing in it can be read.
    """
    campaigns = []
    for files in map(CampaignFiles, find_campaigns(log_dir)):
        problems: list[str] = []
        its_manifest = manifest or readable(read_manifest, files.manifest, problems.append)
        rows: list[RunRow] = []
        for run, entry in runs_of(files, its_manifest, problems):
            try:
                reading = entry.reading if manifest else None
                rows.append((reading or read_run(entry, run, entry.reading)).row)
            except RecordsError as error:
                rows.append(unreadable_row(entry, error))
        over, note = None, ""
        if average is not None:
            rows, over, note = average(files.directory, rows)
        campaign = campaign_row(files, its_manifest, tuple(rows), problems)
        campaigns.append(replace(campaign, over=over, over_note=plain(note, 500)))
    if campaigns and all(run.state == UNREADABLE for campaign in campaigns for run in campaign.runs):
        problems = [c.problem or next((run.message for run in c.runs), "") for c in campaigns]
        if all(problems):
            raise RecordsError("\n".join(problems))
    return tuple(campaigns)


def campaign_row(
    files: CampaignFiles,
    manifest: Manifest | None,
    runs: tuple[RunRow, ...],
    problems: list[str],
    time_left: Callable[..., TimeLeft] | None = None,
) -> CampaignStatus:
    """Return a campaign's row from those of its runs, and from its lock and permits as they are now.

    `time_left` takes the place of `time_left_s`.
    """
    directory, is_supervised = files.directory, bool(readable(is_held, files.lock, problems.append))
    plan, name = manifest or _UNKNOWN, directory.resolve().name
    state = campaign_state(runs, plan, is_supervised=is_supervised)
    runs = tuple(as_decided(run, plan.searched, plan.decision) for run in runs)
    expected = as_expected(runs, plan.searched, plan.decision)
    steps = [run.max_steps for run in expected if run.max_steps is not None]
    eta_s, eta_p90_s = (time_left or time_left_s)(expected, plan, is_supervised=is_supervised)
    stopped = resume_with = ""
    if not is_supervised and state != "done":
        stopped = why_stopped(files)
        resume_with = _resume_with(files, runs, plan, problems)
    alerts = readable(AlertBook, files.alerts, problems.append) if files.alerts.exists() else None
    return CampaignStatus(
        id=plain(name, _NAME_LIMIT),
        name=plain(plan.name or name, _NAME_LIMIT),
        state=state,
        started_at=plain(plan.started_at, _NAME_LIMIT),
        ended_at=plain(plan.ended_at, _NAME_LIMIT),
        conditions=summarize(runs, plan.searched, _starts(files, runs, plan.decision)),
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        runs=runs,
        step_time_s=median(run.step_time_s for run in runs),
        steps_done=sum(run.step for run in runs),
        steps_total=sum(steps) if len(steps) == len(expected) else None,
        eta_s=eta_s,
        eta_p90_s=eta_p90_s,
        searched=plan.searched,
        decision=plan.decision,
        expected=plan.expected,
        permits=_permits(directory, plan.shared_permits, problems),
        problem=plain("; ".join(dict.fromkeys(problems)), 500),
        is_supervised=is_supervised,
        cost_usd=cost_of(runs),
        budget_usd=plan.budget_usd,
        stopped=stopped,
        resume_with=resume_with,
        alerts=alerts.problem() if alerts else "",
        mirror=_mirrored(files, runs, is_live=is_supervised),
    )


def _mirrored(files: CampaignFiles, runs: Sequence[RunRow], *, is_live: bool) -> MirrorStatus | None:
    if not files.mirror.exists() or (state := read_state(files)) is None:
        return None
    age_s = max(0.0, time.time() - state.copied_at) if state.copied_at else None
    return MirrorStatus(
        url=plain(redacted(state.url)),
        copied_at=utc_at(state.copied_at) if state.copied_at else "",
        behind_s=0.0 if age_s is not None and state.is_whole and not is_live else age_s,
        behind_steps=sum(max(0, run.step - state.steps.get(run.run_id, 0)) for run in runs),
        behind_bytes=state.behind_bytes,
        problem=plain(state.problem, 500),
    )


def _resume_with(files: CampaignFiles, runs: Sequence[RunRow], plan: Manifest, problems: list[str]) -> str:
    """Return the command that brings a campaign further; "" if none does."""
    directory = files.directory.absolute()
    if campaign_of(directory).directory != directory:
        return ""  # a run of a campaign is resumed with the others
    try:
        require_own(files)
    except RecordsError as error:
        problems.append(str(error))
        return ""
    left = [run for run in runs if not run.is_done]
    states = {run.state for run in left if not is_out(run, plan.searched)}
    if left and not states and is_settled(plan.searched, plan.decision):  # it was decided without them
        return ""
    failed = " --failed" if states and states <= {RunState.FAILED, UNREADABLE} else ""
    return f"retrain resume {plain(as_typed(files.directory), _LONGEST_COMMAND)}{failed}"


def runs_of(
    files: CampaignFiles, manifest: Manifest | None, problems: list[str]
) -> list[tuple[RunFiles, RunEntry]]:
    """List a campaign's runs as they were planned, by its manifest or its file.

    None if an id would lead out of the campaign or its directories cannot be listed: a problem then says so.
    """
    if is_single_run(files.directory):
        name, run = files.directory.resolve().name, RunFiles(files.directory)
        entries = manifest.runs if manifest else (recorded_entry(run),)
        by_id = {entry.run_id: entry for entry in entries}  # the manifest of a run's campaign has others too
        return [(run, by_id.get(name, entries[0] if len(entries) == 1 else entry_from_name(name)))]
    try:
        refuse_links(files.runs)
        if manifest:
            planned: Sequence[RunEntry] = manifest.runs
        else:  # what the file plans, in its order, as the first condition is compared with; then others
            from retrain.config.load import load_types  # imports pydantic, and is seldom needed
            from retrain.plan.build import planned_runs  # nor this

            planned, (origin, _) = (), known_origin(files)
            try:
                proposed = all_of(read_proposals(files.proposals))
                config = load_types(files.campaign_toml, origin.overrides, proposed)
                planned = planned_runs(config, origin.seed, origin.added_seeds)
            except (ConfigError, RecordsError) as error:
                problems.append(f"{files.campaign_toml}: what it plans is unknown: {first_line(error)}")
            names = {entry.run_id for entry in planned}
            others = {name: run for name, run in files_of_runs(files).items() if name not in names}
            planned = (*planned, *(replace(recorded_entry(run), run_id=name) for name, run in others.items()))
        runs = [(files.run(entry.run_id), entry) for entry in planned]
        refuse_links(*(run.directory for run, _ in runs))
        return runs
    except RecordsError as error:
        problems.append(str(error))
        return []


def _permits(directory: Path, shared: Sequence[str], problems: list[str]) -> PermitStatus | None:
    path = Path(shared[0]) if shared else campaign_of(directory).permits
    try:
        path.stat()  # since Python 3.14 `is_dir` hides that it cannot be looked at
        (path / "turnstile.lock").stat()  # made last, as they are opened for the first time
        from retrain.control.semaphore import (
            FileSemaphore,  # not at the top: only campaigns with permits need it
        )

        seen, why = FileSemaphore.inspect(path), ""
        if (path / "adaptive.jsonl").exists():
            from retrain.control.semaphore.adaptive import (
                last_change,  # not at the top: few campaigns adapt theirs
            )

            change = last_change(path)
            why = f"{change.before} -> {change.permits}, {change.reason}" if change else ""
    except FileNotFoundError:
        return None
    except (RecordsError, OSError, ValueError) as error:
        problems.append(str(error) if isinstance(error, RecordsError) else f"{path}: {error}")
        return None
    holders = tuple(replace(h, host=plain(h.host), label=plain(h.label)) for h in seen.holders)
    return PermitStatus(seen.permits, holders, seen.waiting, plain(why, 200))


def _starts(
    files: CampaignFiles, runs: Sequence[RunRow], decision: Decision | None
) -> Mapping[str, float | None]:
    """Return what is compared before training, by run."""
    if decision is None or decision.metric == EVAL_REWARD:
        return {run.run_id: run.eval_reward_start for run in runs}
    begun = [run for run in runs if run.attempt]
    return {run.run_id: read_start(files.existing_run(run.run_id)).value(decision.metric) for run in begun}


def summarize(
    runs: Sequence[RunRow],
    searched: Searched | None = None,
    starts: Mapping[str, float | None] | None = None,
) -> tuple[ConditionStatus, ...]:
    """Return the row of each condition over its seeds, in order of appearance."""
    by_condition: dict[str, list[RunRow]] = {}
    for run in runs:
        by_condition.setdefault(run.condition, []).append(run)
    counted = {}
    for name, seeds in by_condition.items():
        # A winner was chosen for its luck as well; a run that ended early is not worse at the task for that.
        fresh = [run for run in seeds if searched and run.seed not in searched.seeds] or seeds
        counted[name] = [
            run
            for run in fresh
            if run.state in (RunState.DONE, RunState.RUNNING) and run.reward_mean is not None
        ]
    are_of_others = len({frozenset(run.seed for run in runs) for runs in counted.values() if runs}) > 1
    rows = []
    for name, seeds in by_condition.items():
        rewards = [run.reward_mean for run in counted[name] if run.reward_mean is not None]
        reward_of = ""
        if searched and rewards:
            steps = sorted({run.step for run in counted[name]})
            kind = "fresh seed" if counted[name][0].seed not in searched.seeds else "seed"
            until = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
            reward_of = f"{count_of(len(rewards), kind)}, step {until}"
        elif are_of_others and rewards:
            which = sorted(run.seed for run in counted[name] if run.seed is not None)
            reward_of = f"{count_of(len(rewards), 'seed')}: {first_of([str(seed) for seed in which], 8)}"
        row = ConditionStatus(
            condition=name,
            runs=len(seeds),
            done=sum(run.is_done for run in seeds),
            running=sum(run.state == RunState.RUNNING for run in seeds),
            failed=sum(run.ended_badly for run in seeds),
            reward_mean=mean(rewards),
            reward_std=sample_std(rewards),
            step_time_s=median(run.step_time_s for run in seeds),
            cost_usd=cost_of(seeds),
            start=mean((starts or {}).get(run.run_id) for run in seeds),
            reward_of=reward_of,
        )
        rows.append(row)
    return tuple(rows)


def campaign_state(runs: Sequence[RunRow], plan: Manifest = _UNKNOWN, *, is_supervised: bool) -> str:
    """Return a campaign's state: running if its orchestrator or any worker is alive."""
    states = {run.state for run in runs}
    if is_supervised or RunState.RUNNING in states:
        return "running"
    if states <= {RunState.PENDING}:
        return "pending"
    if states <= {RunState.DONE}:  # else it is between two rounds
        return "done" if is_settled(plan.searched, plan.decision) else "interrupted"
    left = {RunState.PENDING, RunState.INTERRUPTED, RunState.DIED, WAITING}
    return "interrupted" if states & left else "failed"


def cost_of(runs: Sequence[RunRow]) -> float | None:
    """Return what runs have cost; None if no price is known."""
    costs = [run.cost_usd for run in runs if run.cost_usd is not None]
    return math.fsum(costs) if costs else None


def time_left_s(runs: Sequence[RunRow], manifest: Manifest, *, is_supervised: bool) -> TimeLeft:
    """Estimate when the last run ends, P50 and P90; None if nothing runs or no pace is known."""
    running = [run for run in runs if run.state == RunState.RUNNING]
    time = utc_now()
    if not running or any(run.silent_s(time) is not None for run in running):
        return None, None  # nobody knows how long one stands still
    from retrain.plan.estimate.remaining import remaining  # here: only a live campaign needs these
    from retrain.plan.estimate.workload import ALONE, on_cores

    crowding = on_cores(manifest.shared_cores) if manifest.shared_cores else ALONE
    left = remaining(runs, manifest.workers, manifest.stagger_s, crowding, is_supervised=is_supervised)
    return (left.p50_s, left.p90_s) if left else (None, None)


def _rewards(run: RunRow) -> str:
    if run.reward_first is None and run.reward_mean is None:
        return MISSING
    return f"{number(run.reward_first, 2)} -> {number(run.reward_mean, 2)}"


def _held_out(run: RunRow) -> str:
    """Return the held-out reward before training, where that is known, and the last one.

    Of a run without these, those of an `[[eval]]`, with its name.
    """
    name, first, last = "", run.eval_reward_start, run.eval_reward
    if first is None and last is None and run.named_eval:
        name, first, last = f"{run.named_eval} ", run.named_eval_start, run.named_eval_reward
    start = "" if first is None else f"{number(first, 2)} -> "
    return f"{name}{start}{number(last, 2)}"


def _back_pressure(run: RunRow) -> str:
    if not run.bp_regime:
        return ""
    return f"{run.bp_regime}, p* {number(run.bp_p_star, 0)}, used {number(run.bp_utilization, 2)}"


@dataclass(frozen=True, slots=True)
class RunColumn:
    """A column of a table of runs."""

    name: str  # `{last}` stands for what rewards are means over
    cell: Callable[[RunRow], str]
    is_right: bool = True
    is_optional: bool = False  # left out if all its cells are empty


STEPS = RunColumn("steps", lambda run: f"{run.step}/{run.max_steps or '?'}")
STEP_TIME = RunColumn("step time", lambda run: format_duration(run.step_time_s))
HELD_OUT = RunColumn("held-out", _held_out)
REWARDS = RunColumn("reward, step 1 -> {last}", _rewards)
REWARD = RunColumn("reward", lambda run: number(run.reward_mean, 2))
# Columns are declared once for `status`, its live view and the report; of each table the first stay longest
NARROW_COLUMNS = (  # where those of `STATUS_COLUMNS` up to the reward do not fit
    RunColumn("run", lambda run: run.name, is_right=False),
    RunColumn("state", lambda run: run.state, is_right=False),
    REWARD,
    STEPS,
    HELD_OUT,
    STEP_TIME,
)
STATUS_COLUMNS = (
    RunColumn("condition", lambda run: run.condition, is_right=False),
    RunColumn("seed", lambda run: MISSING if run.seed is None else str(run.seed)),
    RunColumn("state", lambda run: f"{run.state} {run.phase}".rstrip(), is_right=False),
    STEPS,
    REWARDS,
    HELD_OUT,
    STEP_TIME,
    RunColumn("cost", lambda run: "" if run.cost_usd is None else dollars(run.cost_usd), is_optional=True),
    RunColumn("back pressure", _back_pressure, is_right=False, is_optional=True),
    RunColumn("sandbox", lambda run: run.sandbox, is_right=False, is_optional=True),
)
WATCH_COLUMNS = (
    RunColumn("{last}", REWARD.cell),  # beside the curve
    STEPS,
    RunColumn("doing", lambda run: run.phase or run.state, is_right=False),
    RunColumn("batch", lambda run: MISSING if run.batch_size is None else str(run.batch_size)),
    RunColumn("regime", lambda run: run.bp_regime, is_right=False),
    RunColumn("throttle", lambda run: run.throttle_level, is_right=False),
    STEP_TIME,
    RunColumn("calls waited", lambda run: format_duration(run.permit_wait_s) if run.permit_wait_s else ""),
)


def last_steps(runs: Sequence[RunRow]) -> str:
    """Return in words which steps the rewards of runs are means of."""
    counts = sorted({run.reward_steps for run in runs if run.reward_steps})
    if len(counts) > 1:
        return f"last {counts[0]} to {counts[-1]}"
    return f"last {counts[0]}" if counts else "last"


def table_of(
    runs: Sequence[RunRow], columns: Sequence[RunColumn] = STATUS_COLUMNS, over: Window | None = None
) -> tuple[list[str], list[list[str]]]:
    """Return the headers of a table of runs, of which '>' aligns a column right, and its rows.

    Args:
        over: of the rewards; None: the last steps of each run.
    """
    shown = [column for column in columns if not column.is_optional or any(map(column.cell, runs))]
    last = last_steps(runs) if over is None else str(over)
    names = [column.name.format(last=last) for column in shown]
    headers = [f">{name}" if column.is_right else name for name, column in zip(names, shown, strict=True)]
    return headers, [[column.cell(run) for column in shown] for run in runs]
