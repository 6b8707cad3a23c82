"""Processors and memory of this machine that this process may use.

Reads /proc if it exists, else psutil, which is imported only then (the import takes 40 ms).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from retrain.system.cgroups import CGROUP, PROC, Pool, cpu_pools, memory_pools


def host_name() -> str:
    """Return the network name of this machine."""
    return os.uname().nodename


def allowed_cpus() -> set[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cpu_capacity(proc: Path = PROC, root: Path = CGROUP, cpus: Collection[int] | None = None) -> float:
    """Return the cores that this process can use: limited by affinity and every CPU quota above it."""
    cores = len(allowed_cpus() if cpus is None else cpus)
    return min([float(cores), *(pool.limit for pool in cpu_pools(proc, root))])


def memory_limit_bytes(proc: Path = PROC, root: Path = CGROUP) -> int:
    """Return the memory that this process could use on an otherwise idle machine."""
    return int(min(pool.limit for pool in [machine_memory(proc), *memory_pools(proc, root)]))


def memory_available_bytes(proc: Path = PROC, root: Path = CGROUP) -> int:
    """Return the memory available now without swapping or reaching a limit."""
    pools = [machine_memory(proc), *memory_pools(proc, root)]
    return max(0, int(min(pool.limit - pool.used for pool in pools)))


def machine_memory(proc: Path = PROC) -> Pool:
    """Return the machine's memory in bytes; reclaimable memory does not count as used."""
    if not (proc / "meminfo").exists():
        import psutil

        memory = psutil.virtual_memory()
        return Pool(memory.total, memory.total - memory.available)
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines}
    return Pool(kib["MemTotal:"] * 1024, (kib["MemTotal:"] - kib["MemAvailable:"]) * 1024)


def machine_cpu(proc: Path = PROC, cpus: Collection[int] | None = None) -> Pool:
    """Return the number of cores in `cpus` (default: those allowed) and their busy core-seconds.

    Time that a hypervisor gave to other guests counts as busy, I/O wait does not.
    """
    cpus = allowed_cpus() if cpus is None else cpus
    if not (proc / "stat").exists():
        import psutil

        times = psutil.cpu_times(percpu=True)
        return Pool(len(times), sum(sum(t) - t.idle for t in times))
    ticks = 0
    for line in (proc / "stat").read_text().splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
            ticks += user + nice + system + irq + softirq + steal
    return Pool(len(cpus), ticks / os.sysconf("SC_CLK_TCK"))
