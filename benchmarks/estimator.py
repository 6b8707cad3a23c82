"""Does the estimated makespan hold? Against a plain simulation of every step of every run.

The reference shares no code with the estimator: workers, permits (first come first served),
stagger, start-up and retries are processes that wait for each other, one event per call. For each
world it draws a pilot, hands that to the estimator, then draws whole campaigns:

- P50: the median relative error of the estimated against the mean simulated makespan;
- P90: the share of campaigns that end before their estimated P90, over worlds and pilots;
- P90 from a single earlier run a condition, or one run for all, where runs differ by 0 to 8 %;
- the rule of thumb's error in the same worlds, and the estimator's own time.

    python -m benchmarks.estimator [--worlds 60] [--json]
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain

from benchmarks.estimator_reference import Reference, World
from benchmarks.suite import script_parser
from retrain.plan.estimate import estimate_workload
from retrain.plan.estimate.history import History, RunTimes, StepParts
from retrain.plan.estimate.money import Billed
from retrain.plan.estimate.wall_time import ConditionTimes, Learned, forecast
from retrain.plan.estimate.workload import ALONE, Failures, Launching, Pilot, RunWork, StepCost, Workload

LIGHT: dict[str, Callable[[random.Random], Callable[[random.Random], float]]] = {
    "gamma": lambda rng: _gamma(rng.uniform(0.05, 0.35)),
    "lognormal": lambda rng: _lognormal(rng.uniform(0.05, 0.35)),
    "uniform": lambda rng: _uniform(rng.uniform(0.1, 0.6)),
}
HEAVY: dict[str, Callable[[random.Random], Callable[[random.Random], float]]] = {
    "stalls": lambda rng: _stalls(rng.uniform(0.005, 0.03), rng.uniform(15, 40)),
    "lognormal, sigma 1 to 1.4": lambda rng: _lognormal_sigma(rng.uniform(1.0, 1.4)),
    "Pareto, 1.6 to 2.2": lambda rng: _pareto(rng.uniform(1.6, 2.2)),
}


def _gamma(cv: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.gammavariate(1 / cv**2, cv**2)


def _lognormal(cv: float) -> Callable[[random.Random], float]:
    return _lognormal_sigma(math.sqrt(math.log(1 + cv**2)))


def _lognormal_sigma(sigma: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.lognormvariate(-(sigma**2) / 2, sigma)


def _uniform(half: float) -> Callable[[random.Random], float]:
    return lambda rng: rng.uniform(1 - half, 1 + half)


def _stalls(share: float, times: float) -> Callable[[random.Random], float]:
    mean = 1 + share * (times - 1)
    return lambda rng: (times if rng.random() < share else rng.gauss(1, 0.1)) / mean


def _pareto(alpha: float) -> Callable[[random.Random], float]:
    mean = alpha / (alpha - 1)
    return lambda rng: rng.paretovariate(alpha) / mean


def equal(rng: random.Random, draw: Callable[[random.Random], float]) -> World:
    steps = rng.choice((50, 100, 200))
    return World("equal runs", (rng.uniform(1, 60),), rng.randint(2, 20), steps, rng.randint(1, 12), draw)


def heterogeneous(rng: random.Random, draw: Callable[[random.Random], float]) -> World:
    base = rng.uniform(1, 60)
    means = tuple(base * rng.uniform(0.5, 2) for _ in range(rng.randint(2, 5)))
    return replace(equal(rng, draw), name="different conditions", step_s=means, seeds=rng.randint(1, 6))


def staggered(rng: random.Random, draw: Callable[[random.Random], float]) -> World:
    world = heterogeneous(rng, draw)
    run_s = world.steps * statistics.fmean(world.step_s)
    return replace(
        world,
        name="stagger, start-up",
        stagger_s=rng.uniform(0, 0.2) * run_s,
        startup_s=rng.uniform(0, 0.3) * run_s,
    )


def permitted(rng: random.Random, draw: Callable[[random.Random], float]) -> World:
    world = heterogeneous(rng, draw)
    workers = rng.randint(2, 24)
    remote = rng.uniform(0.2, 1)
    permits = max(1, round(workers * remote / rng.uniform(0.5, 2.5)))
    return replace(
        world, name="permits", workers=workers, remote=remote, permits=permits, seeds=rng.randint(2, 8)
    )


def everything(rng: random.Random, draw: Callable[[random.Random], float]) -> World:
    world = permitted(rng, draw)
    run_s = world.steps * statistics.fmean(world.step_s)
    return replace(
        world,
        name="everything, retries",
        stagger_s=rng.uniform(0, 0.05) * run_s,
        startup_s=rng.uniform(0, 0.1) * run_s,
        failures_per_hour=rng.uniform(0.05, 0.5) / run_s * 3600,
    )


AREAS = (equal, heterogeneous, staggered, permitted, everything)
LIMITS = {"equal runs": 0.015, "different conditions": 0.02, "stagger, start-up": 0.02, "permits": 0.03}


def workload(world: World, measured: Mapping[str, Sequence[float]] | None = None) -> Workload:
    """What a user knows: true means, or those of a pilot."""
    means = [statistics.fmean(measured[str(c)]) if measured else m for c, m in enumerate(world.step_s)]
    costs = {str(c): StepCost(mean, world.remote * mean) for c, mean in enumerate(means)}
    runs = tuple(RunWork(c, world.steps) for _ in range(world.seeds) for c in costs)
    failures = Failures(world.failures_per_hour, world.save_every, world.retry_delay_s, world.retries)
    permits = world.permits if world.remote else None
    how = Launching(world.workers, world.stagger_s, world.startup_s, permits=permits, failures=failures)
    return Workload(runs, costs, how)


def pilot(world: World, steps: int, rng: random.Random) -> dict[str, list[float]]:
    return {str(c): [mean * world.draw(rng) for _ in range(steps)] for c, mean in enumerate(world.step_s)}


@dataclass(frozen=True)
class Row:
    area: str
    worlds: int
    p50_median_error: float  # |estimated - simulated| / simulated, costs known
    p50_mean_error: float  # signed
    p50_p90_error: float
    limit: float | None
    rule_mean_error: float  # signed: the rule of thumb
    p90_coverage: float  # with a pilot of 20 to 50 steps a condition
    p90_coverage_relied_on: float | None  # of those not labelled
    labelled: float  # share of estimates whose pilot was too short or heavy
    median_estimate_cpu_s: float


def measure(
    make: Callable[..., World], draws: dict[str, Callable[..., Callable[..., float]]], worlds: int
) -> Row:
    kinds = list(draws.values())
    errors, rules, covered, relied, labelled, took = [], [], [], [], 0, []
    for number in range(worlds):
        rng = random.Random(f"{make.__name__} {number}")
        world = make(rng, kinds[number % len(kinds)](rng))
        actual = [Reference(world, rng).makespan_s() for _ in range(6)]
        truth = statistics.fmean(actual)
        known = Pilot(pilot(world, 1000, rng))
        begin = time.process_time()
        found = estimate_workload(workload(world), known)
        took.append(time.process_time() - begin)
        errors.append(found.p50_s / truth - 1)
        rules.append(found.rule_of_thumb_s / truth - 1)
        for each in actual[:3]:
            short = pilot(world, rng.randint(20, 50), rng)
            guess = estimate_workload(workload(world, short), Pilot(short), seed=number)
            covered.append(each <= guess.p90_s)
            if guess.tail == "light":
                relied.append(each <= guess.p90_s)
            else:
                labelled += 1
    sizes = sorted(map(abs, errors))
    return Row(
        world.name,
        worlds,
        statistics.median(sizes),
        statistics.fmean(errors),
        sizes[int(0.9 * len(sizes))],
        LIMITS.get(world.name) if draws is LIGHT else None,
        statistics.fmean(rules),
        statistics.fmean(covered),
        statistics.fmean(relied) if relied else None,
        labelled / len(covered),
        statistics.median(took),
    )


@dataclass(frozen=True)
class Deviation:
    """How well P90 holds where runs of a condition differ beyond their steps."""

    run_deviation: float  # standard deviation over the mean
    earlier_runs: str
    campaigns: int
    p90_coverage: float
    median_p90_over_p50: float


def deviations(campaigns: int, levels: Sequence[float] = (0.0, 0.04, 0.08)) -> Iterator[Deviation]:
    """Measure P90 as `explain` shows it, with the least that it can know of how runs differ."""
    for deviation in levels:
        for earlier in ("one of each condition", "one for all", "two of each condition"):
            covered, widths = [], []
            for number in range(campaigns):
                rng = random.Random(f"runs differ {deviation} {number}")
                world = replace(equal(rng, _gamma(rng.uniform(0.05, 0.35))), run_deviation=deviation)
                conditions = rng.randint(1, 3)
                steps_s = (world.step_s[0],) * conditions
                world = replace(world, step_s=steps_s, seeds=rng.randint(2, 8))
                count = 2 if earlier.startswith("two") else 1
                runs = [_earlier_runs(world, count, rng) for _ in steps_s]
                known = _learned(runs[:1] * conditions if earlier == "one for all" else runs)
                pilot = known.pilot
                measured = {c: pilot.step_times_s[first] for c, first in pilot.same_runs.items()}
                found = forecast(workload(world, measured), known, seed=number)
                covered.append(Reference(world, rng).makespan_s() <= found.p90_s)
                widths.append(found.p90_s / found.p50_s)
            shares = statistics.fmean(covered), statistics.median(widths)
            yield Deviation(deviation, earlier, campaigns, *shares)


def _earlier_runs(world: World, count: int, rng: random.Random) -> list[RunTimes]:
    runs = []
    for _ in range(count):
        mean = world.step_s[0] * rng.gauss(1, world.run_deviation)
        times = tuple(mean * world.draw(rng) for _ in range(world.steps))
        parts, billed = StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 1), Billed((), {}, None, 0)
        runs.append(
            RunTimes(
                "", {}, times, times, parts, 0.0, 0.0, 0.0, None, 0.0, {}, None, None, None, 0, 0.0, 1, billed
            )
        )
    return runs


def _learned(earlier: Sequence[Sequence[RunTimes]]) -> Learned:
    """What `explain` learns from these runs of each condition."""
    conditions = {}
    for c, runs in enumerate(earlier):
        times = [run.step_times_s for run in runs]
        seconds = list(chain.from_iterable(times))
        median, mean = statistics.median(seconds), statistics.fmean(seconds)
        conditions[str(c)] = ConditionTimes(
            str(c), "same", (), (), len(runs), len(seconds), True, median, mean, 0.0, None,
            tuple(runs), tuple(times), 1, (), {},
        )  # fmt: skip
    return Learned(conditions, History((), (), ()), None, False, ALONE)


def large() -> float:
    """Time an estimate of 1,000 runs x 500 steps with a pilot, stagger, start-up and permits."""
    rng = random.Random(0)
    world = World("large", (2.0, 3.0), 500, 500, 64, _gamma(0.2), 1.0, 5.0, permits=32, remote=0.75)
    short = pilot(world, 50, rng)
    load = workload(world, short)
    begin = time.process_time()
    estimate_workload(load, Pilot(short))
    return time.process_time() - begin


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--worlds", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    light = [measure(make, LIGHT, options.worlds) for make in AREAS]
    heavy = [measure(make, HEAVY, options.worlds) for make in AREAS[:1] + AREAS[3:4]]
    large_cpu_s = large()
    differing = list(deviations(max(1, 4 * options.worlds)))
    if options.json:
        rows = {"light": [asdict(row) for row in light], "heavy": [asdict(row) for row in heavy]}
        rows["runs_differ"] = [asdict(row) for row in differing]
        print(json.dumps(rows | {"large_cpu_s": large_cpu_s}))
        return
    _show("light tails", light)
    _show("heavy tails", heavy)
    print("\nruns of a condition differ: campaigns that end before P90 (its median over P50)")
    for each in differing:
        print(
            f"by {each.run_deviation:.0%}, earlier runs: {each.earlier_runs:24}"
            f"{each.p90_coverage:6.1%} ({each.median_p90_over_p50:.2f})"
        )
    print(f"\n1,000 runs x 500 steps, pilot, permits: estimated in {large_cpu_s:.2f} s of processor time")


def _show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    heads = (
        "P50 error",
        "P90 of it",
        "bias",
        "limit",
        "rule",
        "P90 covers",
        "unlabelled",
        "labelled",
        "cpu ms",
    )
    print(f"{'':24}" + "".join(f"{head:>11}" for head in heads))
    for r in rows:
        limit = f"{r.limit:.1%}" if r.limit else "-"
        relied = f"{r.p90_coverage_relied_on:.0%}" if r.p90_coverage_relied_on is not None else "-"
        cells = [f"{r.p50_median_error:.2%}", f"{r.p50_p90_error:.2%}", f"{r.p50_mean_error:+.2%}", limit]
        cells += [f"{r.rule_mean_error:+.1%}", f"{r.p90_coverage:.0%}", relied, f"{r.labelled:.0%}"]
        cells += [f"{r.median_estimate_cpu_s * 1000:.0f}"]
        print(f"{r.area:24}" + "".join(f"{cell:>11}" for cell in cells))


if __name__ == "__main__":
    main()
