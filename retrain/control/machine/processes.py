"""Running processes: process trees, and their CPU and memory use.

Reads /proc if it exists, else psutil, which is imported only then (the import takes 40 ms).
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from retrain.control.machine import PROC


@dataclass(frozen=True, slots=True)
class Process:
    """State of a process at one time; `start` detects a reused pid."""

    parent: int
    start: float
    cpu_s: float  # core-seconds of all its threads
    ended_children_cpu_s: float  # of children that it has waited for, recursively


Processes = Mapping[int, Process]


def read_processes(proc: Path = PROC) -> Processes:
    """Return every visible process, by pid."""
    if not (proc / "stat").exists():
        return read_processes_portably()
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    processes = {}
    for name in os.listdir(proc):  # noqa: PTH208 - a Path per process would double the cost of a reading
        if not name.isdigit():
            continue
        try:
            with open(f"{proc}/{name}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - as above
                fields = file.read().rpartition(b")")[2].split()  # a name may contain spaces and brackets
        except OSError:  # ended meanwhile
            continue
        if len(fields) >= 20:
            user, system, ended_user, ended_system = map(int, fields[11:15])
            cpu_s, ended_children_cpu_s = (user + system) * tick_s, (ended_user + ended_system) * tick_s
            processes[int(name)] = Process(int(fields[1]), int(fields[19]), cpu_s, ended_children_cpu_s)
    return processes


def read_processes_portably() -> Processes:
    """Return the same through psutil; times hidden by the system (of other users) are zero."""
    import psutil

    processes = {}
    for process in psutil.process_iter(["ppid", "create_time", "cpu_times"]):
        info = process.info
        times = info["cpu_times"] or (0.0, 0.0, 0.0, 0.0)
        processes[process.pid] = Process(
            info["ppid"] or 0, info["create_time"] or 0.0, sum(times[:2]), sum(times[2:4])
        )
    return processes


def process_tree(pid: int) -> set[int]:
    """Return a process and its descendants; empty if the process does not exist."""
    return descendants([pid], read_processes())


def descendants(roots: Iterable[int], processes: Processes) -> set[int]:
    """Return the running roots and all their descendants."""
    children = defaultdict(list)
    for pid, process in processes.items():
        children[process.parent].append(pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children[pid]
    return found


def own_cpu_seconds(
    before: Processes, own_before: Collection[int], after: Processes, own_after: Collection[int]
) -> float:
    """Return the core-seconds that a tree used between two readings, including children that ended.

    A parent that waits for a child inherits the child's total time; the time that the child had used
    before the first reading is subtracted.
    """
    inherited_s: dict[int, float] = defaultdict(float)
    for pid in own_before:
        if not _is_same(before, after, pid):
            old = before[pid]
            heir = pid  # the nearest ancestor that is still running; 0 if none
            while heir in before and not _is_same(before, after, heir):
                heir = before[heir].parent
            inherited_s[heir] += old.cpu_s + old.ended_children_cpu_s
    total_s = 0.0
    for pid in own_after:
        now, old_s, old_ended_s = after[pid], 0.0, 0.0
        if _is_same(before, after, pid):
            old_s, old_ended_s = before[pid].cpu_s, before[pid].ended_children_cpu_s
        total_s += now.cpu_s - old_s + max(0.0, now.ended_children_cpu_s - old_ended_s - inherited_s[pid])
    return total_s


def own_memory_bytes(pids: Iterable[int], proc: Path = PROC) -> int:
    """Return the memory of these processes that cannot be reclaimed while they run.

    Private pages of each plus the largest shared segment. Pages that forked children share with
    their parent count once per process: an exact count would walk every page table.
    """
    if not (proc / "stat").exists():
        import psutil

        total = 0
        for pid in pids:
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                total += psutil.Process(pid).memory_info().rss
        return total
    anonymous, shared = 0, [0]
    for pid in pids:
        try:
            lines = (proc / str(pid) / "status").read_text().splitlines()
        except OSError:  # ended meanwhile
            continue
        kib = {words[0]: int(words[1]) for line in lines if (words := line.split())[0].startswith("Rss")}
        anonymous += kib.get("RssAnon:", 0) * 1024
        shared.append(kib.get("RssShmem:", 0) * 1024)
    return anonymous + max(shared)


def _is_same(before: Processes, after: Processes, pid: int) -> bool:
    return pid in before and pid in after and before[pid].start == after[pid].start
