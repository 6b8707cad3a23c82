"""Campaigns as tables: the result of one, or the state of all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from rich.console import Console
from rich.text import Text

from retrain.base.clock import utc_now
from retrain.cli import MOST_CONDITIONS
from retrain.cli.render.tables import BAD, fitted, left_out, spread, state, table, width_of
from retrain.records.decision import lines_of
from retrain.records.manifest import Expectation
from retrain.records.run_row import RunRow, signs_of
from retrain.records.run_state import before_training
from retrain.records.rungs import lines_of_search
from retrain.records.text import about, count_of, dollars, first_of, format_duration, plain
from retrain.records.windows import Window, amount
from retrain.results.status import (
    NARROW_COLUMNS,
    REWARDS,
    STATUS_COLUMNS,
    CampaignStatus,
    ConditionStatus,
    MirrorStatus,
    PermitStatus,
    last_steps,
    table_of,
)

MATRIX_RUNS = 60  # more runs than this are shown by condition only
RECENT = 5  # campaigns shown in full; older ones get a line each
NAMED_RUNS = 3  # of those that failed alike; the others are counted
MOST_MESSAGES = 20  # that differ
MOST_DETAILED = 3  # running runs whose phase is shown in detail


def show_all(campaigns: Sequence[CampaignStatus], console: Console) -> None:
    """Print every campaign, the latest last and in full."""
    older, recent = campaigns[:-RECENT], campaigns[-RECENT:]
    if older:
        rows = [(c.id, state(c.state), _progress(c), c.started_at) for c in older]
        console.print(table("earlier", ("campaign", "state", ">steps", "started"), rows))
    for campaign in older:
        if campaign.problem:
            console.print(f"{campaign.id}: {campaign.problem}", style=BAD, soft_wrap=True)
    for campaign in recent:
        show(campaign, console)
        for line in resume_lines(campaign):
            console.print(line, style="yellow", soft_wrap=True)


def show(campaign: CampaignStatus, console: Console) -> None:
    """Print one campaign: its runs, its conditions, what is left and what went wrong."""
    console.print(
        Text.assemble((campaign.id, "bold"), "  ", state(campaign.state), f"  {_progress(campaign)} steps")
    )
    if campaign.problem:
        console.print(campaign.problem, style=BAD, soft_wrap=True)
    has_legend = len(campaign.runs) > MATRIX_RUNS or len(campaign.seeds) > 1
    if len(campaign.runs) <= MATRIX_RUNS:
        headers, texts = table_of(campaign.runs, over=campaign.over)
        if width_of(headers[: STATUS_COLUMNS.index(REWARDS) + 1], texts) > console.width:
            headers, texts = table_of(campaign.runs, NARROW_COLUMNS, campaign.over)
            has_legend = True
        rows: list[list[str | Text]] = [[*row] for row in texts]
        at = headers.index("state")
        for run, row in zip(campaign.runs, rows, strict=True):
            row[at] = state(run.state).append(str(row[at]).removeprefix(run.state))
        console.print(fitted("", headers, rows, console.width))
    if len(campaign.runs) > MATRIX_RUNS or len(campaign.seeds) > 1:
        console.print(_conditions(campaign.conditions[:MOST_CONDITIONS], console.width))
        for more in left_out(len(campaign.conditions)):
            console.print(more)
    if has_legend and any(run.reward_mean is not None for run in campaign.runs):
        decision, over = campaign.decision, campaign.over
        legend = f"reward: mean over {over or f'the {last_steps(campaign.runs)} steps'}"
        if decision and (decision.rungs or decision.window != (over or Window())):
            rungs = f", at rungs {', '.join(map(amount, decision.rungs))}" if decision.rungs else ""
            legend += f"; [decision] compares {plain(decision.metric)} over {decision.window}{rungs}"
        console.print(legend, style="dim", soft_wrap=True)
    if campaign.over_note:
        console.print(campaign.over_note, style="yellow", soft_wrap=True)
    if campaign.decision and not campaign.searched and any(c.reward_of for c in campaign.conditions):
        what = "these means are of different seeds; a verdict's difference is of the seeds that both have"
        console.print(what, style="dim", soft_wrap=True)
    for line in _lines(campaign):
        console.print(line, soft_wrap=True)


def _lines(campaign: CampaignStatus) -> Iterator[str | Text]:
    """Iterate over what is left, what went wrong and what was found: verdicts last, where a reader looks."""
    yield from detailed(campaign.runs)
    sources = [f"{run.name}: {run.sources}" for run in campaign.runs if run.sources]
    yield from (Text(f"last step of {line}", style="dim") for line in sources[:MOST_MESSAGES])
    yield from warnings(campaign.runs)
    if campaign.eta_s is not None:
        from retrain.plan.estimate.remaining import without_ends  # here: only a live campaign needs it

        yield time_left(campaign) + without_ends(campaign.runs)
    if campaign.cost_usd is not None:
        of = "" if campaign.budget_usd is None else f" of a budget of {dollars(campaign.budget_usd)}"
        unsure = math.fsum(run.unsure_usd or 0.0 for run in campaign.runs)
        at_most = f"; of it at most {dollars(unsure)} for calls that were cut off" if unsure else ""
        yield f"cost {dollars(campaign.cost_usd)}{of}{at_most}"
    if campaign.stopped:
        yield Text(f"stopped by itself: {campaign.stopped}", style="yellow")
        yield f"left undone: {left_undone(campaign.runs)}"
    if campaign.alerts:
        yield Text(f"alerts: {campaign.alerts}", style="yellow")
    if campaign.mirror is not None:
        yield _mirrored(campaign.mirror)
    if campaign.expected is not None:
        yield expectation(campaign.expected)
    permits = campaign.permits
    if permits is not None and (permits.holders or permits.waiting or permits.change):
        yield permit_line(permits)
    yield from _failures(campaign.runs)
    yield from lines_of_search(campaign.searched)
    lines = lines_of(campaign.decision)
    count = len(campaign.decision.conditions) if campaign.decision else 0
    yield from lines[count:]
    if campaign.decision and (start := before_training({c.condition: c.start for c in campaign.conditions})):
        yield f"{plain(campaign.decision.metric)} {start}"
    yield from (Text(verdict, "bold") for verdict in lines[:count])


def _mirrored(mirror: MirrorStatus) -> Text:
    """Return how far a copy is behind, and what keeps it from going on."""
    lag = "all is copied"
    if mirror.behind_s != 0:
        since = format_duration(mirror.behind_s) if mirror.copied_at else "nothing copied yet"
        steps = f", {count_of(mirror.behind_steps, 'step')}" if mirror.behind_steps else ""
        size = f", {mirror.behind_bytes / 1e6:.1f} MB" if mirror.behind_bytes else ""
        lag = f"{since}{steps}{size} behind"
    problem = f": {mirror.problem}" if mirror.problem else ""
    return Text(f"mirror {mirror.url}: {lag}{problem}", style="yellow" if problem else "dim")


def _failures(runs: Sequence[RunRow]) -> Iterator[Text]:
    """Iterate over failures and missing logger rows, once for all runs with the same message."""
    alike: dict[tuple[str, str], list[RunRow]] = {}
    for run in runs:
        if run.message and (run.ended_badly or run.is_done):
            alike.setdefault((run.state, run.message), []).append(run)
    for (how, message), failed in list(alike.items())[:MOST_MESSAGES]:
        names = first_of([run.name for run in failed], NAMED_RUNS)
        yield Text.assemble((f"{names} {how}: ", BAD if failed[0].ended_badly else ""), message)
    if len(alike) > MOST_MESSAGES:
        yield Text(f"and {len(alike) - MOST_MESSAGES} other messages: --json has them all", style="dim")


def _progress(campaign: CampaignStatus) -> str:
    return f"{campaign.steps_done}/{campaign.steps_total or '?'}"


def _conditions(conditions: Sequence[ConditionStatus], width: int) -> object:
    has_cost = any(c.cost_usd is not None for c in conditions)
    has_others = any(c.reward_of for c in conditions)
    rows: list[list[str | Text]] = [
        [
            c.condition, spread(c.reward_mean, c.reward_std), *([c.reward_of] if has_others else []),
            f"{c.done}/{c.runs}", str(c.running),
            Text(str(c.failed), style=BAD if c.failed else ""), format_duration(c.step_time_s),
            *([dollars(c.cost_usd)] if has_cost else []),
        ]
        for c in conditions
    ]  # fmt: skip
    over = ["of"] if has_others else []
    columns = ["condition", ">reward ± sd", *over, ">done", ">running", ">failed", ">step time"]
    return fitted("", columns + [">cost"] * has_cost, rows, width)


def doing(run: RunRow) -> str:
    """Return what a run is doing, and how far it is."""
    return f"{run.phase}: {run.detail}" if run.detail else run.phase


def detailed(runs: Sequence[RunRow]) -> list[str]:
    """Return a line for each of the first runs in a phase that takes long, and one for each engine."""
    engines = {run.engine_server: run.engine for run in runs if run.engine}  # runs share one
    long = [f"{run.name} {doing(run)}" for run in runs if run.detail]
    loads = [f"engine: {load}; {server}" for server, load in engines.items()]
    return long[:MOST_DETAILED] + loads[:MOST_DETAILED]


def left_undone(runs: Sequence[RunRow]) -> str:
    """Return which runs are not done, and how many steps each has left; unstarted ones are counted."""
    begun, unstarted = [], []
    for run in runs:
        if run.is_done:
            continue
        if not run.step:
            unstarted.append(run.name)
            continue
        steps = (run.max_steps or run.step) - run.step
        left = count_of(steps, "step") if steps else "the evaluation at its end"
        begun.append(f"{run.name} ({left} left)")
    return first_of([*begun, *unstarted], NAMED_RUNS * 2)


def warnings(runs: Sequence[RunRow], most: int = MOST_MESSAGES) -> Iterator[Text]:
    """Iterate over what is wrong with runs that go on, a line each, at most so many of a kind.

    An evaluation falls while the reward rises; completions have no score, in most of the first runs; the
    trainer moves steadily away from its sampler; the policy writes what its teacher never would; no step has
    a learning signal any more; nothing happens; runs of two conditions are identical; a thread did not end.
    """
    falling = {run.name: f"the reward rises, but {run.eval_falling}" for run in runs if run.eval_falling}
    silent, now = {}, utc_now()
    for run in runs:
        if (silent_s := run.silent_s(now)) is not None:
            usual = f", where a step takes {about(run.step_time_s)}" if run.step_time_s else ""
            silent[run.name] = f"nothing has happened for {about(silent_s)}{usual}; is its worker suspended?"
    moved = {run.name: f"{run.runaway} {RUNAWAY}" for run in runs if run.runaway}
    for problems in (moved, silent, falling, *signs_of(runs)):
        lines = (f"{name}: {problem}" for name, problem in problems.items())
        yield from (Text(line, style="yellow") for line in islice(lines, most))
        if len(problems) > most:
            yield Text(f"and {len(problems) - most} other runs: --json has them all", style="dim")


RUNAWAY = "computed on after its time was over: processes play the episodes now, which costs time"


def permit_line(permits: PermitStatus) -> Text:
    """Return how many permits are held and by whom, and the last automatic change of their number."""
    holders = [f"{h.label or h.pid} for {format_duration(h.held_s)}" for h in permits.holders]
    line = Text(f"permits {len(holders)}/{permits.permits} held")
    line.append(f", {permits.waiting} waiting", style="yellow" if permits.waiting else "")
    change = f"  (last change: {permits.change})" if permits.change else ""
    return line.append(f"  {first_of(holders, NAMED_RUNS)}{change}".rstrip(), style="dim")


def resume_lines(campaign: CampaignStatus) -> Iterator[str]:
    """Iterate over the lines for a campaign that is not done and has no orchestrator, with the command."""
    if campaign.resume_with and campaign.state == "running":
        yield "its orchestrator has exited: workers continue, but no run is started or retried"
    if campaign.resume_with:
        more = " --budget-usd DOLLARS" if campaign.stopped else ""
        yield f"continue with: {campaign.resume_with}{more}"


def time_left(campaign: CampaignStatus) -> str:
    """Return the time left of a campaign: its median and P90."""
    if campaign.eta_s is None:
        return ""
    p90 = f" (P90 {about(campaign.eta_p90_s)})" if campaign.eta_p90_s is not None else ""
    is_searching = campaign.searched is not None and not campaign.searched.winner  # fresh seeds follow
    of = " of the search" if is_searching else ""
    cost_usd, steps, total, money = campaign.cost_usd, campaign.steps_done, campaign.steps_total, ""
    if campaign.budget_usd is not None and cost_usd and steps and total:
        left_usd = cost_usd / steps * max(total - steps, 1)  # at the mean cost of a step
        share = (campaign.budget_usd - cost_usd) / left_usd  # of the steps left
        if share < 1:
            money = f", but the budget ends it in about {about(campaign.eta_s * max(share, 0.0))}"
    waiting = [run for run in campaign.runs if run.waits_for_api]
    outage = f", not counting this wait ({doing(waiting[0])})" if waiting else ""
    return f"about {about(campaign.eta_s)} left{of}{p90}{money}{outage}"


def expectation(expected: Expectation) -> str:
    """Return the forecast of a campaign's wall time, and the actual time once it is done."""
    when = f"after {about(expected.made_after_s)}" if expected.made_after_s else "at the start"
    forecast = f"expected {when}: {about(expected.p50_s)}, P90 {about(expected.p90_s)}"
    if expected.actual_s is None:
        return f"{forecast} (from {plain(expected.made_from)})"
    off = f" ({expected.actual_s / expected.p50_s - 1:+.0%})" if expected.p50_s else ""
    return f"{forecast}; took {about(expected.actual_s)}{off}"
