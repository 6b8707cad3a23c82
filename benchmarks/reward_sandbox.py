"""What a sandbox costs a program, and what programs leave behind.

    python -m benchmarks.reward_sandbox [--json] [--programs N] [--full]

Programs that do nothing measure the cost of `bubblewrap` over `process`. 128 programs of 50 ms of CPU time
are compared with as much CPU time in one plain process per core. Then N programs (1,000; 10,000 with --full)
leave files, threads and daemons behind where they can, and what is left on this machine is counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.suite import script_parser
from retrain.base.rollouts import Prompt
from retrain.control.machine import cpu_capacity
from retrain.plugins.rewards import Answer, BatchScorer, python

NOTHING = Answer("print(input())", Prompt(0, "?", '[{"input": "1", "output": "1"}]'))
BURNS = """
import time
while time.process_time() < 0.05: pass
print(1)
"""
LEAVES = """
import os, threading, time
os.makedirs("a/b")
open("a/b/c", "w").write("x" * 1000)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
try:
    os.fork() or time.sleep(60)
except OSError: pass
print(1)
"""
PROGRAM_S, BATCH = 0.05, 128


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--programs", type=int, default=1_000)
    parser.add_argument("--full", action="store_true", help="10,000 programs")
    options = parser.parse_args()
    found = {
        "overhead": overhead(),
        "batch": {name: batch(name) for name in ("process", "bubblewrap")},
        "left": {
            name: left(name, 10_000 if options.full else options.programs)
            for name in ("process", "bubblewrap")
        },
    }
    print(json.dumps(found, indent=2))


def overhead(repeats: int = 100) -> dict[str, float]:
    """Return the median time of a program that does nothing, in ms, by sandbox; alternating."""
    names = ("process", "bubblewrap")
    scorers = {name: open_scorer(name, workers=1) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(repeats + 3):
        for name, scorer in scorers.items():
            began = time.perf_counter()
            check(scorer, [NOTHING])
            if repeat > 2:  # the first ones start the sandbox
                times[name].append(1000 * (time.perf_counter() - began))
    for scorer in scorers.values():
        scorer.close()
    return {name: statistics.median(found) for name, found in times.items()}


def batch(name: str) -> dict[str, float]:
    """Return the time of a batch, and of its CPU time in plain processes on the same cores."""
    scorer = open_scorer(name, workers=0)
    prompt = NOTHING.prompt
    check(scorer, [NOTHING] * 8)
    began = time.perf_counter()
    check(scorer, [Answer(BURNS, prompt)] * BATCH)
    wall_s = time.perf_counter() - began
    scorer.close()
    return {"wall_s": wall_s, "plain_s": plain_s()}


def plain_s() -> float:
    """Return how long one plain process per core takes for the CPU time of a batch."""
    cores = max(1, round(cpu_capacity()))
    source = f"import time\nwhile time.process_time() < {BATCH * PROGRAM_S / cores}: pass"
    began = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", source]) for _ in range(cores)]
    for process in processes:
        process.wait()
    return time.perf_counter() - began


def left(name: str, programs: int) -> dict[str, Any]:
    """Return what is left of programs that leave what they can."""
    scorer = open_scorer(name, workers=0)
    answers = [Answer(LEAVES, NOTHING.prompt)] * BATCH
    check(scorer, answers)
    before, memory, others = counted(), memory_mb(), folders()
    for done in range(0, programs, BATCH):
        check(scorer, answers[: min(BATCH, programs - done)])
    after, grown_mb = counted(), memory_mb() - memory
    files = folders() - others
    time.sleep(2.0)  # those of other runs on this machine end with their programs
    scorer.close()
    return {
        "programs": programs,
        **{what: after[what] - before[what] for what in before},
        "files": len(files & folders()),
        "grown_mb": grown_mb,
        "processes_at_the_end": len(psutil.Process().children(recursive=True)),
    }


def counted() -> dict[str, int]:
    """Return the processes and descriptors that there are."""
    return {
        "processes": len(psutil.Process().children(recursive=True)),
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
    }


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("retrain-program-*"))


def memory_mb() -> float:
    """Return the memory of this process and those below it."""
    own = psutil.Process()
    return float(sum(one.memory_info().rss for one in [own, *own.children(recursive=True)]) / 1e6)


def open_scorer(name: str, *, workers: int) -> BatchScorer:
    return python.open_scorer(tests="stdio", sandbox=name, workers=workers, timeout_s=60.0)


def check(scorer: BatchScorer, answers: list[Answer]) -> None:
    """Score answers, all of which are right, though some try what is denied."""
    found = scorer.score_all(answers)
    assert isinstance(found, list)
    if any(score.value != 1 for score in found):
        raise SystemExit(f"a program failed: {found}")


if __name__ == "__main__":
    main()
