"""How a machine's devices are best shared among runs: more runs at a time, or more devices for each.

A run's pace on each number of devices is measured by earlier runs with the same settings; on other numbers it
is that of the Universal Scalability Law over its ranks. Each split is then simulated as the whole campaign:
fewer, faster runs at a time may leave devices idle in the last wave.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from retrain.backends import DeviceUse, plugin_of
from retrain.config.keys import Tables
from retrain.config.resolve import as_tables, label_of
from retrain.config.schema import Config
from retrain.plan.estimate.history import History, RunTimes, devices_in
from retrain.plan.estimate.simulation import Simulation
from retrain.plan.estimate.wall_time import differences, learned_for, workload_of
from retrain.plan.estimate.workload import Crowding, on_cores
from retrain.plan.matrix import Plan
from retrain.plan.preflight import memory_of

if TYPE_CHECKING:
    from retrain.control.rules.usl import UslFit

BEYOND = 2  # times the most devices that were measured, up to which the law is trusted
SAME = 1.01  # times a makespan: within the error of the estimate


@dataclass(frozen=True)
class DeviceSplit:
    """A number of runs at a time, each on a number of devices, and how long the campaign takes with it."""

    runs: int
    devices: int
    p50_s: float
    is_measured: bool  # false: by the law, between or beyond what was measured


@dataclass(frozen=True)
class DeviceSplits:
    """What a campaign takes with its devices shared in other ways."""

    there: int  # devices
    kind: str  # GPU, core, or device of a cluster
    is_parallel: bool  # the file's [campaign].parallel
    measured: tuple[int, ...]  # numbers of devices of earlier runs with these settings
    sigma: float | None  # of the law over them; null if they do not determine it
    kappa: float | None
    note: str  # why they do not, or a caveat
    planned: DeviceSplit | None  # null if its number of devices was not measured
    best: DeviceSplit | None  # null with fewer than two numbers of devices
    more_devices: DeviceSplit | None  # for each run; null without a free one, as for one more run
    more_runs: DeviceSplit | None


def device_splits(
    plan: Plan, history: History, cores: float, p50_s: float | None, free_memory: Callable[[str], int | None]
) -> DeviceSplits | None:
    """Compare ways of sharing the devices; None if runs cannot choose them, or none could be shared.

    Args:
        plan: whose runs all use the same number.
        history: earlier runs, as recorded.
        cores: of this machine.
        p50_s: what the plan is forecast to take.
        free_memory: device (cpu or cuda) -> bytes that are free, None if not known.
    """
    use = plan.device_use
    if use is None or use.there < 2:
        return None
    first = plan.runs[0].config
    crowding = _crowding(history.crowding, use, use.count)
    sizes = [devices_in(run.tables, use.there) / use.count for run in history.runs]
    alone = (run.alone(crowding, size) for run, size in zip(history.runs, sizes, strict=True))
    runs = [replace(run, alive=(), at_a_time=1) for run in alone]
    paces = _paces(first, runs, use.there)
    if len(paces) < 2 and use.count == 1:
        return None  # nobody asked
    law = _law(paces)
    speeds = {count: len(steps) / math.fsum(1 / pace for pace in steps) for count, steps in paces.items()}
    most = min(use.there, first.training.batch_size)  # groups are not cut
    if law is not None and law.identified:
        powers = {1 << power for power in range(most.bit_length())}
        for count in {*powers, use.count, use.count + 1} - paces.keys():
            if count <= min(most, BEYOND * max(paces)):
                speeds[count] = float(law.throughput(count))

    def split(at_a_time: int, devices: int) -> DeviceSplit | None:
        is_planned = (at_a_time, devices) == (plan.workers, use.count)
        if devices not in speeds or not (
            is_planned or _is_possible(_on(first, devices), at_a_time, free_memory)
        ):
            return None
        seconds = p50_s if is_planned else None
        if seconds is None:
            seconds = _takes_s(plan, runs, history, speeds, paces, at_a_time, devices, use, cores)
        return DeviceSplit(at_a_time, devices, seconds, devices in paces) if seconds is not None else None

    def among(devices: int) -> int:
        return min(use.there // devices, len(plan.runs))

    planned = split(plan.workers, use.count)
    further = min((count for count in speeds if count > use.count), default=0)
    more_devices = split(plan.workers, further) if plan.workers * further <= use.there else None
    more_runs = None
    if plan.workers < among(use.count):
        more_runs = split(plan.workers + 1, use.count)
    splits = [planned, more_devices, more_runs, *(split(among(d), d) for d in sorted(speeds) if d <= most)]
    known_splits = [one for one in splits if one is not None]
    best = min(known_splits, key=lambda one: one.p50_s) if len(speeds) > 1 and known_splits else None
    if best is not None and planned is not None and planned.p50_s <= SAME * best.p50_s:
        best = planned
    return DeviceSplits(
        use.there,
        use.kind,
        plan.campaign.parallel,
        tuple(sorted(paces)),
        law.sigma if law and law.identified else None,
        law.kappa if law and law.identified else None,
        law.reason if law else "",
        planned,
        best,
        more_devices,
        more_runs,
    )


def _crowding(measured: Crowding | None, use: DeviceUse, devices: int) -> Crowding:
    """Return the slowdown by runs at a time with so many devices each: more than there are share them.

    One that was measured is that of the plan's number of devices.
    """
    if measured is None or len(measured.points) == 1:
        return on_cores(use.there / devices)
    ratio = use.count / devices
    return replace(measured, points=tuple((alive * ratio, times) for alive, times in measured.points))


def _paces(config: Config, runs: list[RunTimes], there: int) -> Mapping[int, list[float]]:
    """Return steps a second of runs like a configuration's, but for their devices, by their number."""
    ours, defaults = as_tables(_on(config, 1)), as_tables(Config())
    paces: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        if not any(differences(ours, _tables_on(run.tables, 1), defaults)):
            paces[devices_in(run.tables, there)] += [
                1 / seconds for seconds in run.step_times_s if seconds > 0
            ]
    return {count: steps for count, steps in paces.items() if steps}


def _law(paces: Mapping[int, list[float]]) -> UslFit | None:
    if len(paces) < 2:
        return None
    from retrain.control.rules.usl import fit_usl  # not at the top: few plans choose, and it imports numpy

    counts = [count for count, steps in paces.items() for _ in steps]
    return fit_usl(counts, [pace for steps in paces.values() for pace in steps])


def _is_possible(config: Config, at_a_time: int, free_memory: Callable[[str], int | None]) -> bool:
    """Whether so many runs at a time are valid and fit in memory, as far as is known."""
    if any(plugin_of(config.backend.backend).check_options(config.backend.options)):
        return False
    if (use := memory_of(config)) is None or (free := free_memory(use.device)) is None:
        return True
    return use.smallest * (at_a_time if use.device == "cpu" else 1) <= free


def _on(config: Config, devices: int) -> Config:
    options = {**config.backend.options, "devices": devices}
    return replace(config, backend=replace(config.backend, options=options))


def _tables_on(tables: Tables, devices: int) -> Tables:
    backend = tables.get("backend", {})
    options = {**backend.get("options", {}), "devices": devices}
    return {**tables, "backend": {**backend, "options": options}}


def _takes_s(
    plan: Plan,
    runs: list[RunTimes],
    history: History,
    speeds: Mapping[int, float],
    paces: Collection[int],
    at_a_time: int,
    devices: int,
    use: DeviceUse,
    cores: float,
) -> float | None:
    """Return P50 in seconds of a plan whose runs share the devices in another way."""
    campaign = replace(plan.campaign, parallel=at_a_time > 1 or plan.campaign.parallel, max_workers=at_a_time)
    planned = tuple(replace(run, config=_on(run.config, devices)) for run in plan.runs)
    learned = learned_for(
        replace(plan, campaign=campaign, runs=planned),
        replace(history, runs=tuple(_moved(runs, speeds, devices, use, paces))),
        cores,
        _crowding(history.crowding, use, devices),
    )
    if learned is None:
        return None
    workload = workload_of(replace(plan, campaign=campaign, runs=planned), learned)
    return statistics.median(seconds for seconds, _ in Simulation(workload, learned.pilot, 0).bounded())


def _moved(
    runs: list[RunTimes], speeds: Mapping[int, float], devices: int, use: DeviceUse, paces: Collection[int]
) -> Iterator[RunTimes]:
    """Iterate over the runs with the times that they would have on so many devices.

    Of each condition those on the nearest number of devices, so that what is measured is taken as it is.
    """
    nearest: dict[str, int] = {}
    for run in runs:
        label, count = label_of(run.condition), devices_in(run.tables, use.there)
        if count in paces:
            best = nearest.setdefault(label, count)
            nearest[label] = min(best, count, key=lambda each: abs(math.log(each / devices)))
    for run in runs:
        count = devices_in(run.tables, use.there)
        if nearest.get(label_of(run.condition)) == count:
            factor = speeds[count] / speeds[devices]
            evals_s = {name: factor * seconds for name, seconds in run.evals_s.items()}
            yield replace(run.slowed(factor), tables=_tables_on(run.tables, devices), evals_s=evals_s)
