"""What a campaign of thousands of runs costs where a cluster has the queue: is it linear in what changes?

    python -m benchmarks.studies.cluster_scale [--runs 1000 10000] [--json]
    python -m benchmarks.studies.cluster_scale --runs 10000 --most-jobs 1000  a site with such a limit of jobs

Drives the real command line, launcher, supervisor, records and `retrain status` against a Slurm that only
keeps its books (`simulated_slurm`): every run begins, leaves what a worker leaves, and ends. What the
orchestrator writes is what the kernel counts for its process, from the last submission to the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.studies.many_runs import campaign_of, status_cost
from benchmarks.studies.simulated_slurm import Call, SimulatedSlurm
from benchmarks.suite import script_parser

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Row:
    runs: int
    finished: int
    most_at_once: int
    create_s: float  # until the first array was submitted
    submit_s: float  # from the first submission to the last of the first round
    arrays: int
    largest_array: int
    refused: int  # arrays that the site's limit refused
    campaign_s: float
    squeue: int
    least_gap_s: float | None  # from a squeue to the next
    cpu_ms_per_run: float  # of the orchestrator, while runs began and ended
    written_kb_per_run: float
    writes_per_run: float
    manifests: int  # times that manifest.json was replaced
    status_cpu_s: float  # of `retrain status` at the end, median of three
    status_calls_per_run: float | None  # of the kernel, beyond those for no run; None without strace


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, nargs="+", default=[1000, 10000])
    parser.add_argument("--at-a-time", type=int, default=200)
    parser.add_argument("--task-s", type=float, default=1.0)
    parser.add_argument("--array-size", type=int, default=1001)
    parser.add_argument("--most-jobs", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measure(
            runs,
            at_a_time=options.at_a_time,
            task_s=options.task_s,
            array_size=options.array_size,
            most_jobs=options.most_jobs,
        )
        for runs in options.runs
    ]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    for name in asdict(rows[0]):
        print(f"{name:<22}" + "".join(f"{_shown(asdict(row)[name]):>12}" for row in rows))


def measure(
    runs: int, *, at_a_time: int, task_s: float, array_size: int, most_jobs: int, statuses: int = 3
) -> Row:
    """Run a campaign of so many runs to its end, and then look at its status so often."""
    home = Path(tempfile.mkdtemp(prefix="retrain-cluster-"))
    slurm = SimulatedSlurm(home, task_s=task_s, array_size=array_size, most_jobs=most_jobs)
    slurm.start()
    try:
        return _measure(slurm, home, runs, at_a_time, statuses)
    finally:
        slurm.stop()
        shutil.rmtree(home, ignore_errors=True)


def _measure(slurm: SimulatedSlurm, home: Path, runs: int, at_a_time: int, statuses: int) -> Row:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{slurm.bin}:{os.environ['PATH']}"}
    file = home / "scale.toml"
    file.write_text(campaign_of(runs, at_a_time, "slurm", home / "logs"))
    began = time.time()
    with (home / "said").open("w") as said:
        process = psutil.Popen(
            [sys.executable, "-m", "retrain", "run", str(file)],
            cwd=home,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    first = last = None
    manifests: set[int] = set()
    while process.poll() is None and process.status() != psutil.STATUS_ZOMBIE:
        if any(call.name == "squeue" for call in slurm.calls[4:]):
            last = _spent(process) or last
            first = first or last
            for path in home.glob("logs/*/manifest.json"):
                manifests.add(path.stat().st_mtime_ns)
        time.sleep(0.05)
    if process.wait() != 0 or first is None or last is None:
        raise RuntimeError((home / "said").read_text()[-2000:])
    (campaign,) = (home / "logs").iterdir()
    taken = [call for call in slurm.calls if call.tasks]
    looks = [call.at_s for call in slurm.calls if call.name == "squeue"]
    return Row(
        runs=runs,
        finished=len(list(campaign.glob("runs/*/done.json"))),
        most_at_once=slurm.most_at_once,
        create_s=taken[0].at_s - began,
        submit_s=_first_round(slurm.calls)[-1].at_s - taken[0].at_s,
        arrays=len(taken),
        largest_array=max(call.tasks for call in taken),
        refused=sum(call.name == "sbatch" and call.was_refused for call in slurm.calls),
        campaign_s=time.time() - began,
        squeue=len(looks),
        least_gap_s=min((after - before for before, after in pairwise(looks)), default=None),
        cpu_ms_per_run=1000 * (last[0] - first[0]) / runs,
        written_kb_per_run=(last[1] - first[1]) / 1024 / runs,
        writes_per_run=(last[2] - first[2]) / runs,
        manifests=len(manifests),
        status_cpu_s=statistics.median(status_cost(campaign, environment)[1] for _ in range(statuses)),
        status_calls_per_run=_status_calls(campaign, home, environment, runs) if statuses > 1 else None,
    )


def _first_round(calls: Sequence[Call]) -> list[Call]:
    """Return the submissions before anything else was asked."""
    begin = next(n for n, call in enumerate(calls) if call.tasks)
    rest = [n for n, call in enumerate(calls) if n > begin and call.name == "squeue"]
    return [call for call in calls[begin : rest[0]] if call.tasks]


def _spent(process: psutil.Popen) -> tuple[float, int, int] | None:
    """Return processor seconds, bytes that it wrote, and how many writes; None once it is gone."""
    try:
        times, io = process.cpu_times(), process.io_counters()
    except psutil.Error:
        return None
    return times.user + times.system, io.write_chars, io.write_count


def _status_calls(campaign: Path, home: Path, environment: dict[str, str], runs: int) -> float | None:
    if shutil.which("strace") is None:
        return None
    empty = home / "empty"
    empty.mkdir()

    def calls(directory: Path) -> int:
        counts = home / "counts"
        command = ["strace", "-f", "-c", "-o", str(counts), sys.executable, "-m", "retrain", "status"]
        subprocess.run([*command, str(directory)], env=environment, stdout=subprocess.DEVNULL, check=True)
        return int(re.findall(r"^100\.00\s+\S+\s+(?:\S+\s+)?(\d+)", counts.read_text(), re.MULTILINE)[-1])

    return (calls(campaign) - calls(empty)) / runs


def _shown(value: float | int | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
