"""What limits a campaign, and which change would help most, found by simulation.

Each limit is removed in turn; the one whose removal saves the most is reported. The advice is the
smallest change that a user can make. It is simulated as well, so its saving is not a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from retrain.plan.durations import about
from retrain.plan.estimate.workload import RunWork, Workload
from retrain.records.text import count_of

Limit = Literal["workers", "permits", "last wave", "slowest condition", "stagger"]
Simulate = Callable[[Workload], float]  # returns a makespan in seconds
Option = tuple[Limit, str, str, Workload]  # limit, setting and text as in `Change`, and the workload with it

NAMED = 0.05  # of the makespan: a limit whose removal saves less is not reported
WORTH_SAYING = 0.01  # of the makespan: a smaller saving is within the estimate's error
ROOM = 1.25  # times the demand: with fewer permits, calls still wait when step times vary


@dataclass(frozen=True)
class Change:
    """One change, and the time that it would save."""

    limit: Limit
    setting: str  # `key = value`, or text if it is not a key
    text: str
    makespan_s: float
    saves_s: float


def find_limit(workload: Workload, expected_s: float, simulate: Simulate) -> tuple[Limit, tuple[Change, ...]]:
    """Return what limits a campaign of this makespan, and the changes worth making, the best first."""
    if not workload.runs or expected_s <= 0:
        return "slowest condition", ()
    changes = []
    for limit, setting, text, other in _options(workload):
        makespan_s = simulate(other)
        saves_s = expected_s - makespan_s
        if saves_s > WORTH_SAYING * expected_s:
            changes.append(Change(limit, setting, f"{text} and save {about(saves_s)}", makespan_s, saves_s))
    changes.sort(key=lambda change: change.makespan_s)
    return _limit(workload, expected_s, simulate), tuple(changes)


def _limit(workload: Workload, expected_s: float, simulate: Simulate) -> Limit:
    free = _with(workload, permits=None)
    free_s = simulate(free) if workload.launching.permits is not None else expected_s
    together_s = simulate(_with(free, stagger_s=0.0)) if workload.launching.stagger_s else free_s
    idle_s = together_s - _even_s(free)
    evened = _without_slowest(free)
    own_idle_s = simulate(_with(evened, stagger_s=0.0)) - _even_s(evened) if evened is not None else idle_s
    lifted: dict[Limit, float] = {
        "permits": expected_s - free_s,
        "stagger": free_s - together_s,
        "slowest condition": idle_s - own_idle_s,
        "last wave": own_idle_s if workload.waves > 1 else 0.0,
    }
    limit = max(lifted, key=lambda name: lifted[name])
    if lifted[limit] > NAMED * expected_s:
        return limit
    return "workers" if workload.waves > 1 else "slowest condition"


def _options(workload: Workload) -> Iterator[Option]:
    count, workers, waves = len(workload.runs), workload.launching.workers, workload.waves
    if waves > 1:
        more = math.ceil(count / (waves - 1))
        text = (
            f"{count} runs on {count_of(workers, 'worker')} take {waves} waves; "
            f"{count_of(more, 'worker')} would take {count_of(waves - 1, 'wave')}"
        )
        yield "workers", f"campaign.max_workers = {more}", text, _with(workload, workers=more)
    yield from _more_permits(workload)
    if stagger_s := workload.launching.stagger_s:
        text = (
            f"each launch waits {about(stagger_s)} after the one before it; "
            "no stagger would start all workers at once"
        )
        yield "stagger", "campaign.stagger_seconds = 0", text, _with(workload, stagger_s=0.0)
    yield from _slowest_first(workload)


def _more_permits(workload: Workload) -> Iterator[Option]:
    permits = workload.launching.permits
    active = workload.runs[: workload.launching.workers]
    costs = [workload.costs[run.condition] for run in active]
    asked = sum(cost.calls_at_once for cost in costs if cost.permit_s)
    load = sum(cost.permit_s / cost.seconds for cost in costs if cost.permit_s)
    more = min(asked, math.ceil(ROOM * load))
    if permits is not None and more > permits:
        text = (
            f"{count_of(len(active), 'run')} ask for {load:.1f} permits on average and have {permits}; "
            f"{more} would be enough"
        )
        yield "permits", f"backend.max_concurrent = {more}", text, _with(workload, permits=more)


def _slowest_first(workload: Workload) -> Iterator[Option]:
    lengths = _lengths(workload)
    slowest = max(lengths, key=lambda name: lengths[name])
    ordered = tuple(_by_seed(workload, sorted(lengths, key=lambda name: -lengths[name])))
    if workload.waves > 1 and len(lengths) > 1 and ordered != workload.runs:
        text = (
            f"{slowest!r} is the slowest condition; "
            "listing the longest conditions first would use the workers better"
        )
        setting = f"first of [[campaign.conditions]]: {slowest}"
        yield "slowest condition", setting, text, replace(workload, runs=ordered)


def _by_seed(workload: Workload, conditions: list[str]) -> Iterator[RunWork]:
    """Order runs by seed, and within a seed by this order of conditions, as a file would."""
    yield from (run for run in workload.runs if run.is_started)
    left = {c: [r for r in workload.runs if r.condition == c and not r.is_started] for c in conditions}
    for seed in range(max(map(len, left.values()))):
        yield from (left[c][seed] for c in conditions if seed < len(left[c]))


def _without_slowest(workload: Workload) -> Workload | None:
    """Return the campaign with the slowest condition shortened to the second slowest."""
    lengths = _lengths(workload)
    if len(set(lengths.values())) < 2:
        return None
    slowest = max(lengths, key=lambda name: lengths[name])
    next_s = max(length for name, length in lengths.items() if name != slowest)
    share = next_s / lengths[slowest]
    runs = [replace(r, steps=r.steps * share) if r.condition == slowest else r for r in workload.runs]
    return replace(workload, runs=tuple(runs))


def _lengths(workload: Workload) -> dict[str, float]:
    """Return the longest run of each condition, in seconds."""
    lengths: dict[str, float] = {}
    for run in workload.runs:
        lengths[run.condition] = max(lengths.get(run.condition, 0.0), workload.run_seconds(run))
    return lengths


def _even_s(workload: Workload) -> float:
    """Return the makespan if work could be split so that all workers are busy until the end."""
    how = workload.launching
    beside = sum(how.closing_s + (0.0 if run.is_started else how.startup_s) for run in workload.runs)
    return workload.full_crowding * (beside + workload.total_s) / min(how.workers, len(workload.runs))


def _with(workload: Workload, **changes: object) -> Workload:
    return replace(workload, launching=replace(workload.launching, **changes))  # type: ignore[arg-type]
