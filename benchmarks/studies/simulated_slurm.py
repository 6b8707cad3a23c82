"""A Slurm that only keeps its books: commands on PATH that speak to a thread here, and workers that are none.

It takes arrays within its limits, keeps their cap and their dependencies, starts tasks, ends them after a
while, and answers as Slurm 22.05 does. What a task leaves in its run's directory goes through the same
functions that a worker calls. Everything that talks to it is the real code.
"""

from __future__ import annotations

import heapq
import itertools
import re
import socketserver
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from retrain.base.locks import HeldLock, hold
from retrain.records.layout import RunFiles, recorded_hash
from retrain.records.metrics import MetricsWriter
from retrain.records.run_state import (
    Progress,
    RunState,
    begin_attempt,
    end_attempt,
    write_done,
    write_progress,
)

COMMAND = """#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port}
printf '%s\\x1f' {name} "$@" >&3
printf '\\n' >&3
read -r code <&3
read -r said <&3
[ -z "$said" ] || echo "$said" >&2
cat <&3
exit "$code"
"""
NAMES = ("sbatch", "squeue", "scancel", "scontrol")
FULL = "sbatch: error: AssocMaxSubmitJobLimit"
WRITERS = 8
OVER = ("COMPLETED", "CANCELLED")


@dataclass
class Task:
    label: str
    index: int
    state: str = "PENDING"


@dataclass
class Job:
    number: int
    name: str
    script: str
    first: int  # number of the run of index 0
    at_a_time: int
    after: tuple[int, ...]
    tasks: dict[int, Task]
    waiting: list[int] = field(default_factory=list)  # indices, the next one last
    running: int = 0
    left: int = 0  # tasks that are not over


@dataclass(frozen=True)
class Call:
    at_s: float
    name: str
    tasks: int = 0  # of an array that was taken
    was_refused: bool = False


class SimulatedSlurm:
    """The controller and its nodes."""

    def __init__(self, home: Path, *, task_s: float, array_size: int, most_jobs: int) -> None:
        """Put the commands into `home/bin`; nothing runs before `start`.

        Args:
            home: a directory of its own.
            task_s: what each task takes.
            array_size: MaxArraySize.
            most_jobs: tasks that may be in the queue at a time; 0 for no limit.
        """
        self.calls: list[Call] = []
        self.most_at_once = 0
        self._task_s, self._array_size, self._most_jobs = task_s, array_size, most_jobs
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(100)
        self._lock = threading.Lock()
        self._ends: list[tuple[float, int, int]] = []
        self._held: dict[RunFiles, tuple[HeldLock, int]] = {}
        self._over = threading.Event()
        self._writers = ThreadPoolExecutor(WRITERS)
        self._server = _server(self)
        self.bin = home / "bin"
        self.bin.mkdir()
        for name in NAMES:
            path = self.bin / name
            path.write_text(COMMAND.format(name=name, port=self._server.server_address[1]))
            path.chmod(0o755)

    def start(self) -> None:
        """Answer, and work."""
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._work, daemon=True).start()

    def stop(self) -> None:
        """Do neither any more."""
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._writers.shutdown()

    def answer(self, words: list[str]) -> tuple[int, str, str]:
        """Return a command's exit code, what it says and its output."""
        with self._lock:
            began = time.time()
            code, said, out, tasks = getattr(self, f"_{words[0]}")(words[1:])
            self.calls.append(Call(began, words[0], tasks, code != 0))
        return code, said, out

    # Commands

    def _scontrol(self, _: list[str]) -> tuple[int, str, str, int]:
        return 0, "", f"MaxArraySize            = {self._array_size}\n", 0

    def _sbatch(self, words: list[str]) -> tuple[int, str, str, int]:
        options = dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))
        indices, _, at_a_time = options["array"].partition("%")
        wanted = _expand(indices)
        if max(wanted) >= self._array_size:
            return 1, "sbatch: error: Batch job submission failed: Invalid job array specification", "", 0
        live = sum(job.left for job in self._jobs.values())
        if self._most_jobs and live + len(wanted) > self._most_jobs:
            return 1, FULL, "", 0
        if "test-only" in options:
            return 0, "", "", 0
        script, first = words[-2:]
        after = tuple(map(int, re.findall(r"\d+", options.get("dependency", ""))))
        number = next(self._numbers)
        tasks = {index: Task(f"{number}_{index}", index) for index in wanted}
        self._jobs[number] = Job(
            number,
            options["job-name"],
            script,
            int(first),
            int(at_a_time),
            after,
            tasks,
            sorted(wanted, reverse=True),
            left=len(wanted),
        )
        return 0, "", f"{number}\n", len(wanted)

    def _squeue(self, words: list[str]) -> tuple[int, str, str, int]:
        names = set(next(word for word in words if word.startswith("--name="))[7:].split(","))
        lines = [
            f"{task.label}|{task.state}|{job.name}|None|{job.script} {job.first}\n"
            for job in self._jobs.values()
            if job.name in names
            for task in job.tasks.values()
        ]
        return 0, "", "".join(lines), 0

    def _scancel(self, words: list[str]) -> tuple[int, str, str, int]:
        for label in (word for word in words if not word.startswith("--")):
            number, _, indices = label.partition("_")
            job = self._jobs[int(number)]
            for index in _expand(indices.strip("[]")) & set(job.waiting):
                job.waiting.remove(index)
                job.tasks[index].state = "CANCELLED"
                job.left -= 1
        return 0, "", "", 0

    # Nodes

    def _work(self) -> None:
        while not self._over.wait(0.01):
            with self._lock:
                ended = [heapq.heappop(self._ends)[1:] for _ in range(_due(self._ends))]
                begun = [] if ended else list(self._startable())
            list(self._writers.map(self._end, ended))
            list(self._writers.map(self._begin, begun))

    def _startable(self) -> list[tuple[int, int]]:
        found = []
        for job in self._jobs.values():
            if job.waiting and not any(self._jobs[number].left for number in job.after):
                while job.waiting and job.running < job.at_a_time:
                    job.running += 1
                    found.append((job.number, job.waiting.pop()))
        running = sum(job.running for job in self._jobs.values())
        self.most_at_once = max(self.most_at_once, running)
        return found

    def _begin(self, which: tuple[int, int]) -> None:
        job = self._jobs[which[0]]
        files = _files(job, which[1])
        lock = hold(files.lock)
        assert lock is not None, f"{files.directory} is worked on twice"
        self._held[files] = lock, begin_attempt(files.attempts)
        with self._lock:
            job.tasks[which[1]].state = "RUNNING"
            heapq.heappush(self._ends, (time.monotonic() + self._task_s, *which))

    def _end(self, which: tuple[int, int]) -> None:
        job = self._jobs[which[0]]
        files = _files(job, which[1])
        lock, attempt = self._held.pop(files)
        with MetricsWriter(files.metrics, attempt) as metrics:
            metrics.append({"step": 1, "mean_reward": 0.5, "step_time_s": self._task_s})
        write_progress(files.status, Progress("running", "", 1, 1, attempt))
        write_done(files.done, recorded_hash(files), {"steps": 1})
        end_attempt(files.attempts, attempt, RunState.DONE, exit_code=0)
        lock.release()
        with self._lock:
            job.tasks[which[1]].state = "COMPLETED"
            job.running -= 1
            job.left -= 1


_lists: dict[str, list[str]] = defaultdict(list)


def _files(job: Job, index: int) -> RunFiles:
    home = str(Path(job.script).parent)
    if not _lists[home]:
        _lists[home] = (Path(home) / "runs.txt").read_text().splitlines()
    return RunFiles(Path(_lists[home][job.first + index]))


def _due(ends: list[tuple[float, int, int]]) -> int:
    now = time.monotonic()
    return sum(1 for end in ends if end[0] <= now)


def _expand(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _server(slurm: SimulatedSlurm) -> socketserver.ThreadingTCPServer:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            words = self.rfile.readline().decode().rstrip("\n").rstrip("\x1f").split("\x1f")
            code, said, out = slurm.answer(words)
            self.wfile.write(f"{code}\n{said}\n{out}".encode())

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    return server
