"""Load throttle against the public package `training-throttle`, on the same machine at the same time.

Three situations: nothing but ourselves; our own child processes busy on every core; as many
processes of somebody else. A throttle should train on beside its own work and yield to others'.
Prints the level each chooses, and the time and processor time of one check. Whatever else runs
on the machine is real foreign load: the idle rows show it, so run this on a quiet machine.

    python -m benchmarks.throttle [--full] [--json]

The peer is optional: pip install training-throttle.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from retrain import system
from retrain.throttle import TrainingThrottle

PEER = "training_throttle"
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="20 s for each situation instead of 4 s")
    arguments = parser.parse_args()
    rows = compare(seconds=20.0 if arguments.full else 4.0)
    if arguments.json:
        print(json.dumps(rows))
        return
    for row in [{key: key for key in rows[0]}, *rows]:
        print(
            "  ".join(
                f"{value!s:<{width}}" for value, width in zip(row.values(), (26, 24, 9, 7, 9, 9), strict=True)
            )
        )
    if not any(row["throttle"] == "peer" for row in rows):
        print("the peer is not installed: pip install training-throttle")


def compare(seconds: float) -> list[dict[str, Any]]:
    """One row per situation and throttle."""
    cores = len(system.allowed_cpus())
    situations: dict[str, Callable[[], Any]] = {
        "idle": lambda: own_work(0),
        f"own work on {cores} cores": lambda: own_work(cores),
        f"others' work on {cores} cores": lambda: foreign_work(cores),
    }
    rows = []
    for situation, work in situations.items():
        with work():
            rows += [row | {"situation": situation} for row in levels(seconds)]
    order = ("situation", "throttle", "level", "load", "check_ms", "cpu_ms")
    return [{key: row[key] for key in order} for row in rows]


def levels(seconds: float) -> list[dict[str, Any]]:
    """Check every throttle at the start, then each half second; the last answer counts."""
    throttles = make_throttles()
    for throttle in throttles.values():
        throttle.check()
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in throttles}
    states: dict[str, Any] = {}
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(0.5)
        for name, throttle in throttles.items():
            began_s, began_cpu_s = time.perf_counter(), cpu_s()
            states[name] = throttle.check()
            costs[name].append((time.perf_counter() - began_s, cpu_s() - began_cpu_s))
    return [
        {
            "throttle": name,
            "level": states[name].level.value,
            "load": load_of(states[name]),
            "check_ms": round(1e3 * statistics.median(wall for wall, _ in costs[name]), 2),
            "cpu_ms": round(1e3 * statistics.median(cpu for _, cpu in costs[name]), 2),
        }
        for name in throttles
    ]


def make_throttles() -> dict[str, Any]:
    # without dwell the last level is that of the last half second, as the peer's is
    throttles: dict[str, Any] = {
        "retrain": TrainingThrottle(dwell_s=0.0),
        'retrain, scope="system"': TrainingThrottle(scope="system", dwell_s=0.0),
    }
    try:
        peer = importlib.import_module(PEER)
    except ImportError:
        return throttles
    return throttles | {"peer": peer.TrainingThrottle()}


def load_of(state: Any) -> str:
    if hasattr(state, "load"):
        return f"{state.load:.2f}" if state.load is not None else "?"
    return str(state.reason.split("fleet_load=")[1].split()[0])


def cpu_s() -> float:
    """Processor seconds of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def own_work(processes: int) -> Iterator[None]:
    children = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


@contextmanager
def foreign_work(processes: int) -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", ORPHANS, str(processes)], stdin=subprocess.PIPE) as launcher:
        launcher.wait()
        yield


if __name__ == "__main__":
    main()
