"""Designs of a file-based counting semaphore side by side.

    python -m benchmarks.semaphore [DESIGN ...] [--locks] [--full] [--json]

sweep          tries each slot's lock once, then sleeps on slot 0: the obvious design
filelock       a `filelock.FileLock` for each slot, tried in random order every 0.05 s, its own interval
portalocker    its NamedBoundedSemaphore, if it is installed (pip install portalocker): tries all slots in
               random order every 0.25 s
FileSemaphore  retrain.control.semaphore.FileSemaphore: one waiter, the head of the wait queue, watches the
slots

Every figure comes from a log of monotonic times that workers write after they were admitted and
before they release, never from the semaphore itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import filelock
import psutil

from benchmarks.suite import script_parser
from retrain.base.locks import locked
from retrain.control.semaphore import FileSemaphore


class Semaphore(Protocol):
    def acquire(self) -> object: ...
    def release(self) -> None: ...


class Sweep:
    def __init__(self, directory: Path, permits: int) -> None:
        self._paths = [directory / f"slot-{number}" for number in range(permits)]
        self._fd = -1

    def acquire(self) -> None:
        if not self._try_in_order(self._paths):
            self._fd = os.open(self._paths[0], os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)  # closing would not unlock a forked worker's copy
        os.close(self._fd)

    def _try_in_order(self, paths: list[Path]) -> bool:
        for path in paths:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            os.close(self._fd)
        return False


class FileLocks:
    def __init__(self, directory: Path, permits: int) -> None:
        self._locks = [filelock.FileLock(directory / f"slot-{number}") for number in range(permits)]
        self._held: filelock.BaseFileLock | None = None

    def acquire(self) -> None:
        while self._held is None:
            for lock in random.sample(self._locks, len(self._locks)):
                with contextlib.suppress(filelock.Timeout):
                    lock.acquire(blocking=False)
                    self._held = lock
                    return
            time.sleep(0.05)

    def release(self) -> None:
        held, self._held = self._held, None
        assert held is not None
        held.release()


class Portalocker:
    def __init__(self, directory: Path, permits: int) -> None:
        import portalocker

        self._slots = portalocker.NamedBoundedSemaphore(permits, "bench", directory=str(directory))

    def acquire(self) -> None:
        self._slots.acquire(timeout=600)

    def release(self) -> None:
        self._slots.release()


Design = Callable[[Path, int], Semaphore]
DESIGNS: dict[str, Design] = {
    "sweep": Sweep,
    "filelock": FileLocks,
    **({"portalocker": Portalocker} if find_spec("portalocker") else {}),
    "FileSemaphore": FileSemaphore,
}


@dataclass(frozen=True)
class Event:
    time_s: float
    kind: str  # ask, enter, leave, kill
    pid: int


class Log:
    """Appended to by all workers, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, kind: str, pid: int) -> None:
        os.write(self._fd, f"{time.monotonic()!r} {kind} {pid}\n".encode())

    def events(self) -> list[Event]:
        rows = [line.split() for line in self._path.read_text().splitlines()]
        return sorted((Event(float(t), kind, int(pid)) for t, kind, pid in rows), key=lambda e: e.time_s)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def wait_for(self, kind: str, pid: int) -> float:
        while True:
            times_s = [e.time_s for e in self.events() if (e.kind, e.pid) == (kind, pid)]
            if times_s:
                return times_s[0]
            time.sleep(0.0005)


@dataclass(frozen=True)
class Bench:
    """One semaphore and its log."""

    semaphore: Callable[[], Semaphore]  # a new object of the design on the same files
    permits: int
    log: Log

    def fork_worker(self, hold_s: tuple[float, float], think_s: tuple[float, float]) -> int:
        """Start a process that acquires, holds, releases and thinks until it is killed."""
        if pid := os.fork():
            return pid
        chance, semaphore, me = random.Random(os.getpid()), self.semaphore(), os.getpid()
        while True:
            self.log.say("ask", me)
            semaphore.acquire()
            self.log.say("enter", me)
            time.sleep(chance.uniform(*hold_s))
            self.log.say("leave", me)
            semaphore.release()
            time.sleep(chance.uniform(*think_s))

    def kill(self, pid: int) -> float:
        self.log.say("kill", pid)
        at_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return at_s


@contextlib.contextmanager
def bench(design: str, permits: int) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "permits"
        directory.mkdir()
        yield Bench(lambda: DESIGNS[design](directory, permits), permits, Log(Path(name) / "log"))


def fairness_and_waste(design: str, think_s: float, seconds: float) -> tuple[float, float]:
    """Jain's index of acquisitions per worker, and permit time (%) idle while somebody waited.

    12 workers, 4 permits, calls of 40 to 60 ms, thinking 0 to `think_s` between them.
    """
    with bench(design, 4) as b:
        workers = [b.fork_worker((0.04, 0.06), (0, think_s)) for _ in range(12)]
        time.sleep(seconds + 0.5)
        events = b.log.events()
        for pid in workers:
            b.kill(pid)
    start_s = events[0].time_s + 0.5  # all workers have started
    jain = jain_index([e.pid for e in events if e.kind == "enter" and e.time_s >= start_s], workers)
    all_s = b.permits * (events[-1].time_s - start_s)
    return jain, 100 * wasted_s(events, b.permits, start_s) / all_s


def jain_index(entries: list[int], workers: list[int]) -> float:
    """Return Jain's index of the entries per worker: 1 if all have as many."""
    counts = Counter(entries)
    shares = [counts[pid] for pid in workers]
    return sum(shares) ** 2 / (len(shares) * sum(n * n for n in shares))


def crowd(design: str, workers: int, entries_each: int) -> tuple[float, float]:
    """Jain's index, and how many entries (%) overtook a worker that had asked before.

    One permit, so that entries are logged in the order of admission; calls of 0 to 2 ms, without pauses.
    Counted from when all workers wait, for so many entries of each on average; overtakes from the second
    entry of each, because processes that start all at once ask long before they queue.
    """
    with bench(design, 1) as b:
        holder = b.semaphore()
        holder.acquire()
        pids = [b.fork_worker((0, 0.002), (0, 0)) for _ in range(workers)]
        while sum(event.kind == "ask" for event in b.log.events()) < workers:
            time.sleep(0.05)
        time.sleep(0.5)  # the last ones have asked, and get to their places
        holder.release()
        while b.log.size() < 3 * 30 * workers * entries_each:  # a line has fewer bytes
            time.sleep(0.05)
        for pid in pids:
            b.kill(pid)
        events = b.log.events()
    entered: list[int] = []
    asked: dict[int, None] = {}  # in order, as dicts are
    overtakes = 0
    for event in events:
        if event.kind == "kill" or len(entered) == workers * entries_each:
            break
        if event.kind == "ask":
            asked[event.pid] = None
        elif event.kind == "enter":
            overtakes += len(entered) >= workers and event.pid != next(iter(asked))
            del asked[event.pid]
            entered.append(event.pid)
    return jain_index(entered, pids), 100 * overtakes / (len(entered) - workers)


def wasted_s(events: list[Event], permits: int, start_s: float) -> float:
    waiting: set[int] = set()
    holding: set[int] = set()
    wasted = 0.0
    for event, after in itertools.pairwise(events):
        waiting.add(event.pid) if event.kind == "ask" else waiting.discard(event.pid)
        holding.add(event.pid) if event.kind == "enter" else holding.discard(event.pid)
        overlap_s = after.time_s - max(event.time_s, start_s)
        wasted += max(0.0, overlap_s) * min(max(0, permits - len(holding)), len(waiting))
    return wasted


def hand_off_ms(design: str, seconds: float) -> list[float]:
    """From just before a release to the next worker's being in.

    4 workers, 1 permit, calls of 5 ms and thinking of 5 ms, so that somebody else is always waiting.
    """
    with bench(design, 1) as b:
        workers = [b.fork_worker((0.005, 0.005), (0.005, 0.005)) for _ in range(4)]
        time.sleep(seconds)
        events = [event for event in b.log.events() if event.kind in ("enter", "leave")]
        for pid in workers:
            b.kill(pid)
    pairs = itertools.pairwise(events)
    return [1000 * (e.time_s - left.time_s) for left, e in pairs if (left.kind, e.kind) == ("leave", "enter")]


def idle_cpu_percent(design: str, seconds: float) -> float:
    """What 23 waiters use of one core while nothing happens."""
    with bench(design, 1) as b:
        holder = b.semaphore()
        holder.acquire()
        workers = [b.fork_worker((0, 0), (0, 0)) for _ in range(23)]
        time.sleep(1)
        before_s = cpu_s(workers)
        time.sleep(seconds)
        used = 100 * (cpu_s(workers) - before_s) / seconds
        for pid in workers:
            b.kill(pid)
        holder.release()
    return used


def cpu_s(pids: list[int]) -> float:
    """Processor time so far, to the nanosecond where the kernel says it."""
    if Path("/proc/self/schedstat").exists():
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9
    return float(sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids))


def acquire_cpu_us(design: str) -> float:
    """Processor time of an acquisition and a release, without contention."""
    with bench(design, 4) as b:
        semaphore = b.semaphore()

        def once() -> None:
            semaphore.acquire()
            semaphore.release()

        return cpu_us(once)


def lock_cpu_us() -> dict[str, float]:
    """Processor time to open, take and release a plain lock, by what it is made of."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "lock"

        def with_ours() -> None:
            with locked(path):
                pass

        def with_filelock() -> None:
            with filelock.FileLock(path):
                pass

        return {"retrain.base.locks": cpu_us(with_ours), "filelock": cpu_us(with_filelock)}


def cpu_us(call: Callable[[], None], repeats: int = 500) -> float:
    """Return the processor time of a call: the median of ten means."""
    means_us = []
    for _ in range(10):
        began_s = time.process_time()
        for _ in range(repeats):
            call()
        means_us.append(1e6 * (time.process_time() - began_s) / repeats)
    return statistics.median(means_us)


def kill_to_free_ms(design: str, trials: int) -> list[float]:
    """From kill -9 of the only holder to the waiter's being in."""
    took_ms = []
    for _ in range(trials):
        with bench(design, 1) as b:
            holder = b.fork_worker((600, 600), (0, 0))
            b.log.wait_for("enter", holder)
            waiter = b.fork_worker((600, 600), (0, 0))
            b.log.wait_for("ask", waiter)
            time.sleep(0.02 + 0.02 * random.random())
            killed_s = b.kill(holder)
            took_ms.append(1000 * (b.log.wait_for("enter", waiter) - killed_s))
            b.kill(waiter)
    return took_ms


def over_admissions(design: str, seconds: float) -> tuple[int, int, int]:
    """Entries above 4 permits, acquisitions and kills: 12 workers, one killed every few milliseconds."""
    with bench(design, 4) as b:
        workers = [b.fork_worker((0, 0.004), (0, 0.001)) for _ in range(12)]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            time.sleep(random.uniform(0, 0.012))
            b.kill(workers.pop(random.randrange(12)))
            workers.append(b.fork_worker((0, 0.004), (0, 0.001)))
        for pid in workers:
            b.kill(pid)
        events = b.log.events()
    kinds = Counter(event.kind for event in events)
    return entries_above(events, b.permits), kinds["enter"], kinds["kill"]


def entries_above(events: list[Event], permits: int) -> int:
    holding: set[int] = set()
    killed: set[int] = set()  # a victim may still write while the signal is on its way
    over = 0
    for event in events:
        if event.kind == "kill":
            killed.add(event.pid)
        if event.kind == "enter" and event.pid not in killed:
            holding.add(event.pid)
            over += len(holding) > permits
        else:
            holding.discard(event.pid)
    return over


@dataclass(frozen=True)
class Row:
    design: str
    jain_busy: float
    jain_thinking: float
    jain_of_256: float
    overtakes_of_64_percent: float
    waste_percent: float
    acquire_cpu_us: float
    hand_off_ms_p50: float
    hand_off_ms_p99: float
    idle_cpu_percent: float
    kill_to_free_ms_p50: float
    kill_to_free_ms_max: float
    over_admissions: int
    acquisitions: int
    kills: int


def measure(design: str, scale: float) -> Row:
    jain_busy, _ = fairness_and_waste(design, 0, 3 * scale)
    jain_thinking, waste = fairness_and_waste(design, 0.06, 4 * scale)
    jain_of_256, _ = crowd(design, 256, 40)
    _, overtakes = crowd(design, 64, int(40 * scale))
    hand_offs = sorted(hand_off_ms(design, 2 * scale))
    idle = idle_cpu_percent(design, 2 * scale)
    kills = kill_to_free_ms(design, int(8 * scale))
    p99 = hand_offs[int(0.99 * (len(hand_offs) - 1))]
    times = (statistics.median(hand_offs), p99, idle, statistics.median(kills), max(kills))
    fairness = (jain_busy, jain_thinking, jain_of_256, overtakes)
    return Row(design, *fairness, waste, acquire_cpu_us(design), *times, *over_admissions(design, 3 * scale))


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("designs", nargs="*", default=list(DESIGNS), help=f"default: {', '.join(DESIGNS)}")
    parser.add_argument("--locks", action="store_true", help="only what a plain lock costs")
    parser.add_argument("--full", action="store_true", help="ten times as long")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.locks:
        print("\n".join(f"{name:22}{value:10.1f} us" for name, value in lock_cpu_us().items()))
        return
    rows = [measure(design, 10 if options.full else 1) for design in options.designs]
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    for name in () if options.json else Row.__annotations__:
        values = [getattr(row, name) for row in rows]
        print(f"{name:22}" + "".join(f"{v:15.3f}" if isinstance(v, float) else f"{v:>15}" for v in values))


if __name__ == "__main__":
    main()
