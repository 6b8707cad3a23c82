"""What thousands of runs cost a campaign on Ray: submitting, looking, status, and a task for each.

    python -m benchmarks.studies.ray_scale [--runs 2000] [--at-a-time 4] [--json]  by instant workers
    python -m benchmarks.studies.ray_scale --train                                 by real ones

Starts a Ray of three nodes on loopback (the extra `ray`). An instant worker is a Python process that
declares its run finished, so that what is measured is everything but training. All that the orchestrator
asks of Ray is counted, with its times.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.studies.many_runs import campaign_of, status_cost
from benchmarks.suite import script_parser
from retrain import run_campaign
from retrain.campaign.launchers.ray.client import JobsClient
from tests.cluster.ray_cluster import Cluster
from tests.cluster.waiting import await_that

ROOT = Path(__file__).parents[2]
STATUS_EVERY_S = 20.0
INSTANT = """
import os, re, sys
if "retrain.trainer.worker" in sys.orig_argv:
    run = sys.orig_argv[-1]
    with open(run + "/run.toml") as file:
        found = re.search('^config_hash = "(.*)"', file.read(), re.M)
    with open(run + "/done.json", "w") as file:
        file.write('{"config_hash": "%s", "finished_at": "", "result": {}}' % found[1])
    os._exit(0)
"""


@dataclass(frozen=True)
class Row:
    runs: int
    at_a_time: int
    create_s: float  # checking the file, the runs' directories, until the driver is submitted
    submit_s: float  # submitting it, after which the orchestrator is not needed any more
    begin_s: float  # from then until the driver has given Ray the first run
    ask_s: float  # one question, median
    least_gap_s: float | None  # from the beginning of such a question to that of the next
    questions: int  # by the orchestrator
    jobs: int  # that Ray had in all
    status_s: float  # `retrain status`, a process of its own, median over the campaign
    status_cpu_s: float  # of it, on a processor: the rest is waiting for whatever else the machine does
    orchestrator_cpu_s: float
    campaign_s: float
    finished: int


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--at-a-time", type=int, default=4)
    parser.add_argument("--train", action="store_true", help="real workers, a step each")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="retrain-ray-scale-"))
    _set_up_nodes(home, train=options.train)
    cluster = Cluster(home)
    try:
        cluster.start()
        row = measure(cluster, home, options)
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)
    if options.json:
        print(json.dumps(asdict(row)))
        return
    for name, value in asdict(row).items():
        print(f"{name:<20} {value:.2f}" if isinstance(value, float) else f"{name:<20} {value}")


def measure(cluster: Cluster, home: Path, options: argparse.Namespace) -> Row:
    file, at_a_time = home / "scale.toml", min(options.at_a_time, options.runs)
    keys = f'address = "{cluster.address}"\ncpus = 0.1'
    file.write_text(campaign_of(options.runs, at_a_time, "ray", home / "logs", keys))
    calls, cpu_s = _count_calls(), [0.0]
    began = time.perf_counter()

    def orchestrate() -> None:
        run_campaign(file)
        cpu_s[0] = time.thread_time()

    campaign = threading.Thread(target=orchestrate)
    campaign.start()
    events = "*/ray/events.jsonl"
    await_that("the first run", lambda: any((home / "logs").glob(events)) or _is_dead(campaign), every_s=0.02)
    given_at = time.perf_counter()
    (directory,) = (home / "logs").iterdir()
    statuses = [status_cost(directory)]
    while campaign.is_alive():
        campaign.join(STATUS_EVERY_S)
        statuses.append(status_cost(directory))
    ended = time.perf_counter()
    looks = [(begin, end) for name, begin, end in calls if name == "job"]
    submissions = [(begin, end) for name, begin, end in calls if name == "submit"]
    return Row(
        runs=options.runs,
        at_a_time=at_a_time,
        create_s=submissions[0][0] - began,
        submit_s=submissions[0][1] - submissions[0][0],
        begin_s=given_at - submissions[0][1],
        ask_s=statistics.median(end - begin for begin, end in looks),
        least_gap_s=min((after[0] - before[0] for before, after in pairwise(looks)), default=None),
        questions=len(looks),
        jobs=len(cluster.client.jobs()),
        status_s=statistics.median(wall_s for wall_s, _ in statuses),
        status_cpu_s=statistics.median(cpu for _, cpu in statuses),
        orchestrator_cpu_s=cpu_s[0],
        campaign_s=ended - began,
        finished=len(list(directory.glob("runs/*/done.json"))),
    )


def _set_up_nodes(home: Path, *, train: bool) -> None:
    """Give the nodes, which are started after this, the place where they find `retrain` and the worker."""
    (home / "instant").mkdir()
    if not train:
        (home / "instant" / "sitecustomize.py").write_text(INSTANT)
    os.environ["PYTHONPATH"] = f"{home / 'instant'}{os.pathsep}{ROOT}"


def _count_calls() -> list[tuple[str, float, float]]:
    """Note each question with its beginning and end."""
    calls: list[tuple[str, float, float]] = []

    def noting(name: str) -> Any:
        ask = getattr(JobsClient, name)

        def noted(self: JobsClient, *arguments: Any) -> Any:
            begin = time.perf_counter()
            answer = ask(self, *arguments)
            calls.append((name, begin, time.perf_counter()))
            return answer

        return noted

    for name in ("job", "submit"):
        setattr(JobsClient, name, noting(name))
    return calls


def _is_dead(thread: threading.Thread) -> bool:
    if not thread.is_alive():
        raise RuntimeError("the campaign ended before a run began")
    return False


if __name__ == "__main__":
    main()
