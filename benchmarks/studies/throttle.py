"""Load throttle against the public package `training-throttle`, on the same machine at the same time.

Three situations take turns, round after round: nothing but ourselves; our own child processes busy
on every core; as many processes of somebody else. A throttle should train on beside its own work and
yield to others'. What else runs on the machine is real foreign load and counts in every situation,
so each reading is also compared with the idle one of the same round: `added` is what the situation
itself did to it, and `alone` the level that this would mean on a machine that is otherwise idle.
On a busy machine little can be added any more, and `alone` says so. What is seen there is `own_cpu`, what
our children really took of the processors: a load of others' work falls by it, one that counts
everything does not.

    python -m benchmarks.studies.throttle [--full] [--json]

The peer is optional: pip install training-throttle.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any

import psutil

from benchmarks.suite import script_parser
from retrain.control import machine as system
from retrain.control.machine.throttle import TrainingThrottle
from retrain.control.rules.throttle import level_for

PEER = "training_throttle"
NO_ROOM = 0.5  # from this idle load on, what a situation adds is cut off
CHECKS = 6  # three seconds of each situation
SPIN = "while True: pass"
# ends with its standard input, so that it cannot outlive the benchmark
SPINNER = f"""
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
{SPIN}
"""
# starts spinners and ends at once, which leaves them to the system
ORPHANS = f"""
import subprocess, sys
for _ in range(int(sys.argv[1])):
    subprocess.Popen([sys.executable, "-c", {SPINNER!r}])
"""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="12 rounds instead of 3")
    arguments = parser.parse_args()
    rows = compare(rounds=12 if arguments.full else 3)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    widths = (26, 24, 7, 9, 14, 9, 9, 9, 9)
    lines = [fields_of(Row), *(cells(row) for row in rows)]
    for line in lines:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)))
    if not any(row.throttle == "peer" for row in rows):
        print("the peer is not installed: pip install training-throttle")


@dataclass(frozen=True)
class Row:
    """One throttle in one situation: medians over rounds, `added` with its standard error."""

    situation: str
    throttle: str
    load: float
    level: str
    added: float
    error: float
    alone: str
    own_cpu: float
    check_ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Reading:
    load: float
    own_cpu: float
    check_s: float
    cpu_s: float


def fields_of(kind: type[Row]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "error"]


def cells(row: Row) -> list[str]:
    added = f"{row.added:+.2f} ± {row.error:.2f}"
    shown = asdict(row) | {"load": f"{row.load:.2f}", "added": added}
    return [str(shown[name]) for name in fields_of(Row)]


def compare(rounds: int) -> list[Row]:
    """One row per situation and throttle."""
    cores = len(system.allowed_cpus())
    situations: dict[str, Callable[[], Any]] = {
        "idle": lambda: own_work(0),
        f"own work on {cores} cores": lambda: own_work(cores),
        f"others' work on {cores} cores": lambda: foreign_work(cores),
    }
    found: dict[str, list[dict[str, Reading]]] = {name: [] for name in situations}
    for number in range(rounds):
        turn = list(situations)
        for name in turn[number % 3 :] + turn[: number % 3]:  # a drift of the rest hits all alike
            with situations[name]() as own:
                found[name].append(readings(own))
    return [
        row_of(situation, throttle, [r[throttle] for r in found[situation]], [r[throttle] for r in idle])
        for idle in [found["idle"]]
        for situation in situations
        for throttle in idle[0]
    ]


def row_of(situation: str, throttle: str, there: list[Reading], idle: list[Reading]) -> Row:
    added = [one.load - other.load for one, other in zip(there, idle, strict=True)]
    load, more = statistics.median(one.load for one in there), statistics.mean(added)
    rest = statistics.median(one.load for one in idle)
    return Row(
        situation,
        throttle,
        load=load,
        level=level_for(load).value,
        added=more,
        error=statistics.stdev(added) / len(added) ** 0.5,
        alone=level_for(min(1.0, max(0.0, more))).value if rest < NO_ROOM else "no room",
        own_cpu=round(statistics.median(one.own_cpu for one in there), 2),
        check_ms=round(1e3 * statistics.median(one.check_s for one in there), 2),
        cpu_ms=round(1e3 * statistics.median(one.cpu_s for one in there), 2),
    )


def readings(own: list[psutil.Process]) -> dict[str, Reading]:
    """Check every throttle at the start, then each half second; give medians."""
    throttles = make_throttles()
    for throttle in throttles.values():
        throttle.check()
    seen: dict[str, list[tuple[float, float, float]]] = {name: [] for name in throttles}
    began_s, began_cpu_s = time.monotonic(), sum(sum(child.cpu_times()[:2]) for child in own)
    for _ in range(CHECKS):
        time.sleep(0.5)
        for name, throttle in throttles.items():
            check_s, check_cpu_s = time.perf_counter(), cpu_s()
            state = throttle.check()
            seen[name].append((load_of(state), time.perf_counter() - check_s, cpu_s() - check_cpu_s))
    used_s = sum(sum(child.cpu_times()[:2]) for child in own) - began_cpu_s
    own_cpu = used_s / (time.monotonic() - began_s) / len(system.allowed_cpus())
    medians = {
        name: [statistics.median(column) for column in zip(*many, strict=True)] for name, many in seen.items()
    }
    return {name: Reading(load, own_cpu, *costs) for name, (load, *costs) in medians.items()}


def make_throttles() -> dict[str, Any]:
    throttles: dict[str, Any] = {
        "retrain": TrainingThrottle(),
        'retrain, scope="system"': TrainingThrottle(scope="system"),
    }
    try:
        peer = importlib.import_module(PEER)
    except ImportError:
        return throttles
    return throttles | {"peer": peer.TrainingThrottle()}


def load_of(state: Any) -> float:
    if not hasattr(state, "load"):
        return float(state.reason.split("fleet_load=")[1].split()[0])
    if state.load is None:
        raise SystemExit(f"the load of this machine cannot be read: {state.reason}")
    return float(state.load)


def cpu_s() -> float:
    """Processor seconds of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def own_work(processes: int) -> Iterator[list[psutil.Process]]:
    children = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield [psutil.Process(child.pid) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


@contextmanager
def foreign_work(processes: int) -> Iterator[list[psutil.Process]]:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(processes)], stdin=subprocess.PIPE) as launcher:
        launcher.wait()
        yield []


if __name__ == "__main__":
    main()
