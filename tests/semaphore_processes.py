"""Real processes around a semaphore, and a judge of who held a permit when.

The judge knows nothing of the semaphore's files: workers append lines to a log, `enter` after
they were admitted and `leave` before they release, so that what it counts as held was held.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LONGEST_PAUSE_S = 0.01
HOLD = """
import sys
from retrain.control.semaphore import FileSemaphore
semaphore = FileSemaphore(sys.argv[1], 1, label="holder")
print("ready", flush=True)
with semaphore:
    print("holding", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""

# A parent that forks workers, kills one at a random moment, and forks the next, until it is time.
NURSERY = """
import os, random, signal, sys, time
from retrain.control.semaphore import FileSemaphore
directory, workers, kills, limits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
log = os.open(sys.argv[5], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
wanted_bytes = 100 * int(sys.argv[6])  # of the log: more than an entry asks for
chance = random.Random(7)
semaphore = FileSemaphore(directory, limits[0])

def say(kind, value):
    os.write(log, f"{kind} {value} {time.monotonic_ns()}\\n".encode())

def work():
    while True:
        say("ask", os.getpid())
        with semaphore:
            say("enter", os.getpid())
            if chance.random() < 0.7:
                time.sleep(chance.random() * 0.004)
            say("leave", os.getpid())

def fork_worker(seed):
    pid = os.fork()
    if pid == 0:
        chance.seed(seed)
        work()
    return pid

alive = [fork_worker(seed) for seed in range(workers)]
killed = 0
while killed < kills or os.fstat(log).st_size < wanted_bytes:
    time.sleep(chance.random() * 0.008)
    victim = alive.pop(chance.randrange(workers))
    say("kill", victim)
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    killed += 1
    alive.append(fork_worker(workers + killed))
    if len(limits) > 1 and killed % 20 == 0:
        limit = limits[killed // 20 % len(limits)]
        say("resizing", limit)
        semaphore.set_permits(limit)
        say("resized", limit)
for pid in alive:
    say("kill", pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
"""


class Child:
    """A Python process that talks line by line."""

    def __init__(self, code: str, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def send(self, signal_number: int) -> None:
        self.process.send_signal(signal_number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def running(code: str, *arguments: object) -> Iterator[Child]:
    child = Child(code, *arguments)
    try:
        yield child
    finally:
        child.close()


def wait_until(is_so: Callable[[], bool]) -> None:
    """Poll, less often the longer it takes; pytest's own timeout ends a wait that never succeeds."""
    pause_s = 0.001
    while not is_so():
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, LONGEST_PAUSE_S)


@dataclass(frozen=True)
class Judgement:
    most_at_once: int
    entries: int
    kills: int
    above_limit: int  # entries asked for after a resize had returned, and above its number


def judge(log: Path) -> Judgement:
    """Replay a log; a killed worker counts as holding until just before it was killed."""
    lines = [line.split() for line in log.read_text().splitlines()]
    events = sorted((int(time_ns), kind, int(value)) for kind, value, time_ns in lines)
    holding: set[int] = set()
    killed: set[int] = set()  # whatever such a worker still wrote, it died soon after
    asked: dict[int, int] = {}
    most = entries = kills = above_limit = 0
    limit, limit_since_ns = sys.maxsize, 0
    for time_ns, kind, value in events:
        if kind == "ask":
            asked[value] = time_ns
        elif kind == "enter" and value not in killed:
            holding.add(value)
            entries += 1
            above_limit += len(holding) > limit and asked[value] > limit_since_ns
        elif kind == "leave":
            holding.discard(value)
        elif kind == "kill":
            holding.discard(value)
            killed.add(value)
            kills += 1
        elif kind.startswith("resiz"):
            limit, limit_since_ns = (value, time_ns) if kind == "resized" else (sys.maxsize, 0)
        most = max(most, len(holding))
    return Judgement(most, entries, kills, above_limit)


def interrupt(child: Child) -> None:
    child.send(signal.SIGINT)


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))  # noqa: PTH208
