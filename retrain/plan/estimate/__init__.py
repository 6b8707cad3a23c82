"""How long a campaign takes, and what limits it: the rule of thumb, and a simulation of its events.

The rule of thumb multiplies all steps by one step time and divides by parallelism: ten runs on four workers
take three waves, not two and a half. Total work over parallelism is a lower bound. The simulation launches
runs as the orchestrator does: in order, on free workers, with stagger, start-up, waits for permits and
retries.

Each limit is removed in turn; the one whose removal saves the most is reported. The advice is the
smallest change that a user can make. It is simulated as well, so its saving is not a guess.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from retrain.plan.estimate.simulation import Simulation, Tail, ninth_decile
from retrain.plan.estimate.workload import Launching, Pilot, RunWork, StepCost, Workload
from retrain.records.text import about, count_of

Limit = Literal["workers", "permits", "last wave", "slowest condition", "stagger"]
Simulate = Callable[[Workload], float]  # returns a makespan in seconds
Option = tuple[Limit, str, str, Workload]  # limit, setting and text as in `Change`, and the workload with it

NAMED = 0.05  # of the makespan: a limit whose removal saves less is not reported
WORTH_SAYING = 0.01  # of the makespan: a smaller saving is within the estimate's error
ROOM = 1.25  # times the demand: with fewer permits, calls still wait when step times vary
STEPS_GUESSED = 500  # of a run of which only the seconds are known
LENGTH_CLASSES = 8  # such runs are grouped into this many classes by length


@dataclass(frozen=True)
class Change:
    """One change, and the time that it would save."""

    limit: Limit
    setting: str  # `key = value`, or text if it is not a key
    text: str
    makespan_s: float
    saves_s: float


@dataclass(frozen=True)
class Makespan:
    """Wall time of a campaign and what limits it."""

    p50_s: float
    p90_s: float
    waves: int
    runs: int
    limited_by: Limit
    changes: tuple[Change, ...]  # that would shorten it, the best first
    rule_of_thumb_s: float  # total steps x a step's time / parallelism
    lower_bound_s: float  # total work, start-up and end of each run included, / parallelism; at most P50
    permit_wait_fraction: float  # of a step's time with all workers busy
    tail: Tail  # none: no pilot; short or heavy: P90 is not reliable


def rule_of_thumb_s(total_steps: float, median_step_time_s: float, effective_parallelism: int) -> float:
    """Return total_steps x median_step_time / effective_parallelism, in seconds."""
    return total_steps * median_step_time_s / effective_parallelism


def estimate_makespan(
    run_seconds: Sequence[float],
    workers: int,
    stagger_s: float = 0.0,
    startup_s: float = 0.0,
    permits: int | None = None,
    remote_fraction: float = 0.0,
    seed: int = 0,
) -> Makespan:
    """Simulate launching the runs in order on `workers` workers, and return the time until the last run ends.

    Runs are assumed to have the same number of steps; `estimate_workload` accepts more detail.

    Args:
        run_seconds: how long each run would take alone, in launch order.
        workers: runs at a time.
        stagger_s: least time between two launches.
        startup_s: added to every run.
        permits: API calls in flight over all runs; None if not limited.
        remote_fraction: share of a step spent in API calls, in [0, 1].
        seed: for the simulated queue for permits; without a pilot P50 and P90 are equal.

    Raises:
        ValueError: a time is negative or not finite, or there is no worker or permit.
    """
    if not 0 <= remote_fraction <= 1:
        raise ValueError(f"remote_fraction = {remote_fraction} is not in [0, 1]")
    if not all(math.isfinite(t) and t >= 0 for t in run_seconds):
        raise ValueError("run_seconds must be finite and not negative")
    ordered = sorted(run_seconds)
    tops = sorted(set(ordered))
    if len(tops) > LENGTH_CLASSES:  # runs of similar length become one condition; their lengths stay
        size = math.ceil(len(ordered) / LENGTH_CLASSES)
        tops = sorted({*ordered[size - 1 :: size], ordered[-1]})
    seconds = {top: top / STEPS_GUESSED for top in tops}  # of a step
    costs = {repr(top): StepCost(step_s, step_s * remote_fraction) for top, step_s in seconds.items()}
    runs = []
    for run_s in run_seconds:
        top = tops[bisect.bisect_left(tops, run_s)]
        runs.append(RunWork(repr(top), STEPS_GUESSED * run_s / top if top else 0.0))
    launching = Launching(workers, stagger_s, startup_s, permits=permits)
    return estimate_workload(Workload(tuple(runs), costs, launching), seed=seed)


def estimate_workload(workload: Workload, pilot: Pilot | None = None, seed: int = 0) -> Makespan:
    """Estimate how long a campaign, or the rest of one, takes; the same seed gives the same estimate.

    The pilot's step times determine how uncertain the costs are; without it P50 and P90 are equal, unless
    runs fail.
    """
    simulation = Simulation(workload, pilot, seed)
    times, least = zip(*simulation.bounded(), strict=True)
    expected_s = simulation.expected_s()
    limit: Limit = "slowest condition"
    changes = []
    if workload.runs and expected_s > 0:

        def simulate(other: Workload) -> float:
            return Simulation(other, pilot, seed).expected_s()

        limit = _what_limits(workload, expected_s, simulate)
        for lifted, setting, text, other in _options(workload):
            makespan_s = simulate(other)
            saves_s = expected_s - makespan_s
            if saves_s > WORTH_SAYING * expected_s:
                text = f"{text} and save {about(saves_s)}"
                changes.append(Change(lifted, setting, text, makespan_s, saves_s))
    return Makespan(
        p50_s=statistics.median(times),
        p90_s=ninth_decile(times),
        waves=workload.waves,
        runs=len(workload.runs),
        limited_by=limit,
        changes=tuple(sorted(changes, key=lambda change: change.makespan_s)),
        rule_of_thumb_s=workload.total_s / max(1, min(workload.launching.workers, len(workload.runs))),
        lower_bound_s=statistics.median(least),
        permit_wait_fraction=simulation.permit_wait_fraction(),
        tail=simulation.tail,
    )


def _what_limits(workload: Workload, expected_s: float, simulate: Simulate) -> Limit:
    free = _with(workload, permits=None)
    free_s = simulate(free) if workload.launching.permits is not None else expected_s
    together_s = simulate(_with(free, stagger_s=0.0)) if workload.launching.stagger_s else free_s
    idle_s = evened_idle_s = together_s - _even_s(free)
    lengths = _lengths(free)
    if len(set(lengths.values())) > 1:  # with the slowest condition as short as the second slowest
        slowest = max(lengths, key=lambda name: lengths[name])
        share = max(s for name, s in lengths.items() if name != slowest) / lengths[slowest]
        runs = [replace(r, steps=r.steps * share) if r.condition == slowest else r for r in free.runs]
        evened = replace(free, runs=tuple(runs))
        evened_idle_s = simulate(_with(evened, stagger_s=0.0)) - _even_s(evened)
    lifted: dict[Limit, float] = {
        "permits": expected_s - free_s,
        "stagger": free_s - together_s,
        "slowest condition": idle_s - evened_idle_s,
        "last wave": evened_idle_s if workload.waves > 1 else 0.0,
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
            f"{count_of(more, 'worker')} would take {count_of(math.ceil(count / more), 'wave')}"
        )
        yield "workers", f"campaign.max_workers = {more}", text, _with(workload, workers=more)
    permits, active = workload.launching.permits, workload.runs[:workers]
    costs = [cost for cost in (workload.costs[run.condition] for run in active) if cost.permit_s]
    load = sum(cost.permit_s / cost.seconds for cost in costs)
    more = min(sum(cost.calls_at_once for cost in costs), math.ceil(ROOM * load))
    if permits is not None and more > permits:
        text = (
            f"{count_of(len(active), 'run')} ask for {load:.1f} permits on average and have {permits}; "
            f"{more} would be enough"
        )
        yield "permits", f"backend.max_concurrent = {more}", text, _with(workload, permits=more)
    if stagger_s := workload.launching.stagger_s:
        text = (
            f"each launch waits {about(stagger_s)} after the one before it; "
            "no stagger would start all workers at once"
        )
        yield "stagger", "campaign.stagger_seconds = 0", text, _with(workload, stagger_s=0.0)
    lengths = _lengths(workload)
    longest_first = sorted(lengths, key=lambda name: -lengths[name])
    ordered = tuple(_by_seed(workload, longest_first))
    if waves > 1 and len(lengths) > 1 and ordered != workload.runs:
        text = (
            f"{longest_first[0]!r} is the slowest condition; "
            "listing the longest conditions first would use the workers better"
        )
        setting = f"first of [[campaign.conditions]]: {longest_first[0]}"
        yield "slowest condition", setting, text, replace(workload, runs=ordered)


def _by_seed(workload: Workload, conditions: list[str]) -> Iterator[RunWork]:
    """Order runs by seed, and within a seed by this order of conditions, as a file would."""
    yield from (run for run in workload.runs if run.is_started)
    left: dict[str, list[RunWork]] = {condition: [] for condition in conditions}
    for run in workload.runs:
        if not run.is_started:
            left[run.condition].append(run)
    for seed in range(max(map(len, left.values()))):
        yield from (left[c][seed] for c in conditions if seed < len(left[c]))


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
