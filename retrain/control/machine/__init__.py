"""Processors and memory that this process may use, and running processes.

Control groups: v1, v2, hybrid, nested. Where a container hides the ancestors of its group, only the visible
limits apply; a system without control groups has no limits. Machine and memory are read from /proc if it
exists; psutil, which reads all else, takes 40 ms to import.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
RANK_SHARE = "RETRAIN_RANK_SHARE"  # variable of a rank on another node: its cores, and the ranks there
UNLIMITED_V1 = 1 << 60  # v1 writes "no limit" as the largest page-aligned 63-bit number


@dataclass(frozen=True, slots=True)
class Pool:
    """A capacity shared by processes.

    CPU: `limit` in cores, `used` in core-seconds since an arbitrary start. Memory: both in bytes.
    """

    limit: float
    used: float


def allowed_cpus() -> set[int]:
    """Return the numbers of the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def cpu_capacity(proc: Path = PROC, root: Path = CGROUP, cpus: Collection[int] | None = None) -> float:
    """Return the cores that this process can use: limited by affinity and every CPU quota above it."""
    cores = len(allowed_cpus() if cpus is None else cpus)
    return min([float(cores), *(pool.limit for pool in cpu_pools(proc, root))])


def programs_at_once(wanted: int) -> int:
    """Return how many programs this process runs at a time: so many, 0 is one per core; a rank its share."""
    cores = cpu_capacity()
    if share := os.environ.get(RANK_SHARE):
        own, ranks = map(int, share.split())
        wanted, cores = -(-wanted // ranks), min(cores, own)  # sites need not confine it to its own
    return wanted or max(1, round(cores))


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


def cpu_pools(proc: Path = PROC, root: Path = CGROUP) -> list[Pool]:
    """Return the CPU quotas of this process, its own group's first."""
    version, base, directories = _groups("cpu", proc, root)
    pools = []
    if version == 2:
        for directory in directories:
            words = _words(directory / "cpu.max")
            if words and words[0] != "max":
                used_s = _table(directory / "cpu.stat")["usage_usec"] / 1e6
                pools.append(Pool(int(words[0]) / int(words[1]), used_s))
        return pools
    accounting = _controller_directory("cpuacct", root)
    for directory in directories:
        quota, period = _words(directory / "cpu.cfs_quota_us"), _words(directory / "cpu.cfs_period_us")
        if quota and period and int(quota[0]) > 0:
            used_ns = int((accounting / directory.relative_to(base) / "cpuacct.usage").read_text())
            pools.append(Pool(int(quota[0]) / int(period[0]), used_ns / 1e9))
    return pools


def memory_pools(proc: Path = PROC, root: Path = CGROUP) -> list[Pool]:
    """Return the memory limits of this process, its own group's first; page cache does not count as used."""
    version, _, directories = _groups("memory", proc, root)
    pools = []
    for directory in directories:
        if version == 2:
            words = _words(directory / "memory.max") + _words(directory / "memory.high")
            limits = [int(word) for word in words if word != "max"]
            current, cache = "memory.current", "inactive_file"
        else:
            words = _words(directory / "memory.limit_in_bytes")
            limits = [int(word) for word in words if int(word) < UNLIMITED_V1]
            current, cache = "memory.usage_in_bytes", "total_inactive_file"
        if limits:
            reclaimable = _table(directory / "memory.stat").get(cache, 0)
            pools.append(Pool(min(limits), int((directory / current).read_text()) - reclaimable))
    return pools


def stalled_fraction(resource: str, proc: Path = PROC, root: Path = CGROUP) -> float | None:
    """Return the fraction of the last 10 s in which any task waited for `resource` ("cpu" or "memory").

    Of this process's own group if it has one, else of the machine; None if the kernel does not
    record it. Source: Linux Documentation/accounting/psi.rst.
    """
    version, base, directories = _groups("", proc, root)
    pressure_files = [d / f"{resource}.pressure" for d in directories[:1] if version == 2 and d != base]
    for path in [*pressure_files, proc / "pressure" / resource]:
        try:
            text = path.read_text()
        except OSError:  # not recorded: no such file, or disabled at boot
            continue
        return float(text.split("avg10=")[1].split()[0]) / 100
    return None


def _groups(controller: str, proc: Path, root: Path) -> tuple[int, Path, list[Path]]:
    """Return version, mount point and directories (ours first) of a controller; "": the unified hierarchy."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return 2, root, []
    paths = {
        name: path for _, names, path in (line.split(":", 2) for line in lines) for name in names.split(",")
    }
    if controller and controller in paths:
        base = _controller_directory(controller, root)
        return 1, base, _existing(base, paths[controller])
    base = root if (root / "cgroup.controllers").exists() else root / "unified"
    return 2, base, _existing(base, paths.get("", "/"))


def _controller_directory(controller: str, root: Path) -> Path:
    together = [d for d in root.glob(f"*{controller}*") if controller in d.name.split(",")]
    return min(together, default=root / controller, key=lambda d: len(d.name))


def _existing(base: Path, path: str) -> list[Path]:
    """Return `base/path` and its parents up to `base`, if visible to this process."""
    inside = PurePosixPath(path.lstrip("/"))
    if ".." in inside.parts:  # outside our namespace's root
        inside = PurePosixPath()
    return [d for d in (base / inside, *((base / parent) for parent in inside.parents)) if d.is_dir()]


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def _table(path: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in path.read_text().splitlines())}


@dataclass(frozen=True, slots=True)
class Process:
    """State of a process at one time; `start` detects a reused pid."""

    parent: int
    start: float
    cpu_s: float  # core-seconds of all its threads
    ended_children_cpu_s: float  # of children that it has waited for, recursively


Processes = Mapping[int, Process]


def read_processes() -> Processes:
    """Return every visible process, by pid; times hidden by the system (of other users) are zero."""
    import psutil  # not at the top: most processes read memory alone

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
    tree: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in tree:
            tree.add(pid)
            waiting += children[pid]
    return tree


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
        process, old_s, old_ended_s = after[pid], 0.0, 0.0
        if _is_same(before, after, pid):
            old_s, old_ended_s = before[pid].cpu_s, before[pid].ended_children_cpu_s
        ended_s = max(0.0, process.ended_children_cpu_s - old_ended_s - inherited_s[pid])
        total_s += process.cpu_s - old_s + ended_s
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
