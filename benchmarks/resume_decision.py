"""How long `retrain resume` takes to know what is left of a large campaign.

    python -m benchmarks.resume_decision [--runs 1000] [--orchestrators 50] [--json]

Half of the runs are finished, a quarter failed, the rest died at different steps. The decision is
everything until the first worker would be launched: read the file, plan, look at every run. Then
so many orchestrators are started on the campaign at once: one may win.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.suite import script_parser
from retrain.base.errors import EXIT_LAUNCH
from retrain.base.locks import is_held
from retrain.campaign import Observer
from retrain.campaign.run import reopen, start
from retrain.records.metrics import MetricsWriter
from retrain.records.run_state import begin_attempt, end_attempt, write_done

TOML = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
[data]
task = "successor"
[campaign]
seeds = {seeds}
max_steps = 100000
parallel = true
max_workers = 2
[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
[[campaign.conditions]]
name = "maxrl"
"""
ROWS = 100


class Decided(BaseException):
    """The orchestrator knows what is left, and is about to launch."""


class StopAtDecision(Observer):
    def begun(self, files: Any, runs: Any, workers: int) -> None:
        self.left = len(runs)
        raise Decided


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--orchestrators", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        directory = make_campaign(options.runs)
        row = measure(directory) | start_at_once(directory, options.orchestrators)
    if options.json:
        print(json.dumps(row, indent=2))
        return
    for name, value in row.items():
        print(f"{name:<32}{value:>12}")


def make_campaign(runs: int) -> Path:
    path = Path("many.toml")
    path.write_text(TOML.format(seeds=list(range(runs // 2))))
    campaign = start(path)
    for number, run in enumerate(campaign.plan.runs):
        files = campaign.files_of(run.run_id)
        attempt = begin_attempt(files.attempts)
        with MetricsWriter(files.metrics, attempt) as rows:
            for step in range(1, ROWS + 1):
                rows.append({"step": step, "loss": 0.5, "mean_reward": 0.5, "filler": "x" * 400})
        if number % 4 < 2:
            write_done(files.done, run.config_hash, {"eval_reward": 0.5})
        if number % 4 < 3:
            end_attempt(files.attempts, attempt, "done" if number % 4 < 2 else "failed")
    return campaign.directory


def measure(directory: Path) -> dict[str, object]:
    started, cpu = time.perf_counter(), time.process_time()
    watcher = StopAtDecision()
    campaign = reopen(directory, watcher)
    planned = time.perf_counter()
    with contextlib.suppress(Decided):
        campaign.execute()
    return {
        "runs": len(campaign.plan.runs),
        "left to run": watcher.left,
        "read and plan, s": round(planned - started, 3),
        "look at every run, s": round(time.perf_counter() - planned, 3),
        "decision, s": round(time.perf_counter() - started, 3),
        "decision, CPU s": round(time.process_time() - cpu, 3),
    }


def start_at_once(directory: Path, orchestrators: int) -> dict[str, object]:
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "retrain", "resume", str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(orchestrators)
    ]
    while (left := sum(process.poll() is None for process in started)) > 1 or not is_held(
        directory / "campaign.lock"
    ):
        if not left:
            raise RuntimeError(f"none goes on; exit codes {[process.returncode for process in started]}")
        time.sleep(0.05)
    refused = sum(process.poll() == EXIT_LAUNCH for process in started)
    alive = sum(process.poll() is None for process in started)
    subprocess.run(
        [sys.executable, "-m", "retrain", "stop", "--now", str(directory)], capture_output=True, check=True
    )
    for process in started:
        process.wait()
    return {"orchestrators at once": orchestrators, "won": alive, "refused with a reason": refused}


if __name__ == "__main__":
    main()
