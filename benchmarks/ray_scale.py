"""What many runs cost a campaign on Ray: submitting, looking, status, and handing places on.

    python -m benchmarks.ray_scale [--runs 2000] [--at-a-time 4] [--json]     submitted, looked at, stopped
    python -m benchmarks.ray_scale --runs 40 --execute                        run to the end, a step each

Starts a Ray of three nodes on loopback (the extra `ray`). Workers are real ones with a single step. All
questions of the orchestrator are counted, with their times; a job that hands its place on asks Ray twice
(is it still counted, and take the next run), which is not counted here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.many_runs import campaign_of, status_cost
from retrain import run_campaign
from retrain.launchers._ray_client import Client
from tests.cluster.ray_cluster import Cluster
from tests.cluster.waiting import await_that

ROOT = Path(__file__).parent.parent
LOOKS_S = 20.0  # how long what was submitted is looked at before it is stopped


@dataclass(frozen=True)
class Row:
    runs: int
    at_a_time: int
    create_s: float  # checking the file, the runs' directories, until the first job is submitted
    submit_s: float  # from then until all places are taken: every run is in Ray's hands or the queue
    list_s: float  # one question for all jobs, median
    least_gap_s: float | None  # from the beginning of such a question to that of the next
    questions: int  # for all jobs
    submissions: int  # by the orchestrator
    status_s: float  # `retrain status`, a process of its own, median
    campaign_s: float
    finished: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--execute", action="store_true", help="run to the end")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    home = Path(tempfile.mkdtemp(prefix="retrain-ray-scale-"))
    cluster = Cluster(home)
    try:
        cluster.start()
        row = measure(cluster, home, options.runs, options.at_a_time, execute=options.execute)
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)
    if options.json:
        print(json.dumps(asdict(row)))
        return
    for name, value in asdict(row).items():
        print(f"{name:<14} {value:.2f}" if isinstance(value, float) else f"{name:<14} {value}")


def measure(cluster: Cluster, home: Path, runs: int, at_a_time: int, *, execute: bool) -> Row:
    file = home / "scale.toml"
    keys = f'address = "{cluster.address}"\ncpus = 0.1'
    file.write_text(campaign_of(runs, at_a_time, "ray", home / "logs", keys))
    calls = _count_calls()
    began = time.perf_counter()
    campaign = threading.Thread(target=run_campaign, args=(file,))
    campaign.start()
    await_that(
        "all places", lambda: sum(name == "submit" for name, *_ in calls) >= at_a_time or _is_dead(campaign)
    )
    (directory,) = (home / "logs").iterdir()
    statuses = [status_cost(directory)[0]]
    if not execute:
        time.sleep(LOOKS_S)  # what is measured goes on meanwhile
        statuses.append(status_cost(directory)[0])
        subprocess.run([sys.executable, "-m", "retrain", "stop", str(directory)], check=True)
    campaign.join()
    ended = time.perf_counter()
    looks = [(begin, end) for name, begin, end in calls if name == "jobs"]
    submissions = [(begin, end) for name, begin, end in calls if name == "submit"]
    statuses.append(status_cost(directory)[0])
    return Row(
        runs=runs,
        at_a_time=at_a_time,
        create_s=submissions[0][0] - began,
        submit_s=submissions[at_a_time - 1][1] - submissions[0][0],
        list_s=statistics.median(end - begin for begin, end in looks),
        least_gap_s=min((after[0] - before[0] for before, after in pairwise(looks)), default=None),
        questions=len(looks),
        submissions=len(submissions),
        status_s=statistics.median(statuses),
        campaign_s=ended - began,
        finished=len(list(directory.glob("runs/*/done.json"))),
    )


def _count_calls() -> list[tuple[str, float, float]]:
    """Note each question with its beginning and end."""
    calls: list[tuple[str, float, float]] = []

    def noting(name: str) -> Any:
        ask = getattr(Client, name)

        def noted(self: Client, *arguments: Any) -> Any:
            begin = time.perf_counter()
            answer = ask(self, *arguments)
            calls.append((name, begin, time.perf_counter()))
            return answer

        return noted

    for name in ("jobs", "submit"):
        setattr(Client, name, noting(name))
    return calls


def _is_dead(thread: threading.Thread) -> bool:
    if not thread.is_alive():
        raise RuntimeError("the campaign ended before all places were taken")
    return False


if __name__ == "__main__":
    main()
