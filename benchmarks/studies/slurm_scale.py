"""What thousands of runs cost a campaign on Slurm: submitting, looking, status.

    python -m benchmarks.studies.slurm_scale [--runs 2000] [--at-a-time 40] [--json]  by instant workers
    python -m benchmarks.studies.slurm_scale --runs 10000 --held                      queued only

Starts a Slurm of four nodes on loopback (apt-get install slurm-wlm munge). The workers are a shell
script that declares its run finished, so that what is measured is everything but training. Every
command of Slurm is counted, with its time, by a wrapper in front of it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.studies.many_runs import campaign_of, status_cost
from benchmarks.suite import script_parser
from retrain.base.locks import is_held
from retrain.campaign.launchers.slurm import COMMANDS
from tests.cluster.slurm_cluster import Cluster

ROOT = Path(__file__).parents[2]
WORKER = """#!/bin/bash
hash=$(sed -n 's/^config_hash = "\\(.*\\)"/\\1/p' "$4/run.toml")
printf '{"config_hash": "%s", "finished_at": "", "result": {}}\\n' "$hash" > "$4/done.json"
"""
COUNTER = """#!/bin/bash
begin=$EPOCHREALTIME
{program} "$@"
code=$?
echo "$begin $EPOCHREALTIME {name}" >> {log}
exit $code
"""
LEAST_GAP_S = 2.0


@dataclass(frozen=True)
class Row:
    runs: int
    create_s: float  # checking the file, the runs' directories, until the orchestrator begins
    submit_s: float  # from then until the last sbatch has answered
    status_s: float  # `retrain status`, a process of its own, median over the campaign
    status_cpu_s: float  # of it, on a processor: the rest is waiting for whatever else the machine does
    status_after_s: float  # once all runs have ended and nothing else is at work
    campaign_s: float
    orchestrator_cpu_s: float
    sbatch: int
    squeue: int
    scancel: int
    least_gap_s: float | None  # from the beginning of a squeue to that of the next
    finished: int


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--at-a-time", type=int, default=40)
    parser.add_argument("--held", action="store_true", help="queue only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="retrain-scale-"))
    cluster = Cluster(home / "slurm")
    cluster.home.mkdir()
    try:
        cluster.start()
        row = measure(cluster, home, options.runs, options.at_a_time, held=options.held)
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)
    if options.json:
        print(json.dumps(asdict(row)))
        return
    for name, value in asdict(row).items():
        print(f"{name:<20} {value:.2f}" if isinstance(value, float) else f"{name:<20} {value}")


def measure(cluster: Cluster, home: Path, runs: int, at_a_time: int, *, held: bool) -> Row:
    environment = _with_counters(cluster, home)
    worker = home / "worker"
    worker.write_text(WORKER)
    worker.chmod(0o755)
    keys = f'python = "{worker}"' + ("\nflags = ['--hold']" if held else "")
    file = home / "scale.toml"
    file.write_text(campaign_of(runs, at_a_time, "slurm", home / "logs", keys))
    began = time.time()
    process = psutil.Popen(
        [sys.executable, "-m", "retrain", "run", str(file)],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(home / "said").open("w"),
    )
    arrays = -(-runs // cluster.array_size)
    while (submitted := _submitted_at(home, arrays)) is None:
        if process.poll() is not None:
            raise RuntimeError((home / "said").read_text()[-2000:])
        time.sleep(0.01)
    (campaign,) = (home / "logs").iterdir()
    statuses = [status_cost(campaign, environment)]
    cpu_s, stopping = 0.0, math.inf
    if held:
        time.sleep(10 * LEAST_GAP_S)  # what is measured goes on meanwhile
        statuses.append(status_cost(campaign, environment))
        cpu_s = _cpu_s(process, cpu_s)
        stopping = time.time()
        subprocess.run([sys.executable, "-m", "retrain", "stop", str(campaign)], env=environment, check=True)
    while process.poll() is None and is_held(campaign / "campaign.lock"):
        statuses.append(status_cost(campaign, environment))
        cpu_s = _cpu_s(process, cpu_s)
        time.sleep(1.0)
    process.wait()
    ended = time.time()
    after_s, _ = status_cost(campaign, environment)
    calls = _calls(home)
    looks = [
        begin for begin, _, name in calls if name == "squeue" and begin < stopping
    ]  # stop asks once itself
    gaps = [after - before for before, after in pairwise(looks)]
    created = (campaign / "slurm" / "job.sh").stat().st_mtime
    return Row(
        runs=runs,
        create_s=created - began,
        submit_s=submitted - created,
        status_s=statistics.median(wall_s for wall_s, _ in statuses),
        status_cpu_s=statistics.median(cpu for _, cpu in statuses),
        status_after_s=after_s,
        campaign_s=ended - began,
        orchestrator_cpu_s=cpu_s,
        sbatch=sum(name == "sbatch" for *_, name in calls),
        squeue=len(looks),
        scancel=sum(name == "scancel" for *_, name in calls),
        least_gap_s=min(gaps, default=None),
        finished=len(list(campaign.glob("runs/*/done.json"))),
    )


def _with_counters(cluster: Cluster, home: Path) -> dict[str, str]:
    bin_directory = home / "bin"
    bin_directory.mkdir()
    for name in COMMANDS:
        wrapper = bin_directory / name
        wrapper.write_text(COUNTER.format(name=name, log=home / "calls", program=shutil.which(name)))
        wrapper.chmod(0o755)
    environment = cluster.environment
    environment["PATH"] = f"{bin_directory}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    return environment


def _calls(home: Path) -> list[tuple[float, float, str]]:
    lines = (home / "calls").read_text().splitlines() if (home / "calls").exists() else []
    return [(float(begin), float(end), name) for begin, end, name in map(str.split, lines)]


def _submitted_at(home: Path, arrays: int) -> float | None:
    """Return when the last array was taken."""
    ends = [end for _, end, name in _calls(home) if name == "sbatch"]
    return ends[arrays] if len(ends) > arrays else None  # the first one judged the script


def _cpu_s(process: psutil.Popen, last: float) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return last
    return max(last, float(times.user + times.system))  # a zombie has none


if __name__ == "__main__":
    main()
