"""How fast is `survey` on a large campaign, and how much memory does it take?

Makes a campaign, removed afterwards, then times a fresh interpreter that surveys it: with what
the manifest says of runs that are over, and with the runs' directories alone; beside one that
reads every row of every metrics.jsonl, and one that only starts. Start-up is included in all.

    python -m benchmarks.status_at_scale            # 500 x 50 rows, 120 MB
    python -m benchmarks.status_at_scale --full     # 500 x 500 rows, 1.2 GB
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.suite import script_parser
from retrain.base.locks import hold
from retrain.records.layout import CampaignFiles, RunFiles, create_directory
from retrain.records.manifest import new_manifest, read_manifest, refresh, write_manifest
from retrain.records.metrics import MetricsWriter, seal_of
from retrain.records.run_row import RunEntry
from retrain.records.run_state import (
    Progress,
    RunState,
    begin_attempt,
    end_attempt,
    write_done,
    write_progress,
)

ROW_BYTES = 4800  # what makes 500 x 500 rows 1.2 GB; retrain's own rows have about 1,000
CONDITIONS = 10

SURVEY = """
import sys
from pathlib import Path
from retrain.results.status import survey
found = survey(Path(sys.argv[1]))
print(len(found[0].runs), sum(run.state == "done" for run in found[0].runs))
"""

READ_ALL = """
import json, statistics, sys
from pathlib import Path
found = []
for path in Path(sys.argv[1]).glob("*/runs/*/metrics.jsonl"):
    rows = [json.loads(line) for line in path.open()]
    step_time = statistics.median(row["step_time_s"] for row in rows[-5:])
    found.append((rows[0]["mean_reward"], rows[-1]["mean_reward"], step_time))
print(len(found))
"""

# GNU time is not everywhere; the parent asks the kernel for its children's peak instead.
MEASURE = """
import resource, subprocess, sys, time
begin = time.perf_counter()
subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL)
took = time.perf_counter() - begin
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(took, used.ru_utime + used.ru_stime, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


@dataclass(frozen=True)
class Measured:
    what: str
    median_s: float
    best_s: float
    cpu_s: float
    peak_rss_mb: float


def make_campaign(log_dir: Path, runs: int, rows: int) -> int:
    """Write a campaign with our own writers: nine in ten runs done, the rest failed. Gives its bytes."""
    directory = create_directory(log_dir, "scale")
    campaign = CampaignFiles(directory)
    campaign.campaign_toml.write_text("")
    campaign.runs.mkdir()
    planned = [
        RunEntry(
            f"condition{i % CONDITIONS}_s{i // CONDITIONS}",
            f"condition{i % CONDITIONS}",
            i // CONDITIONS,
            rows,
        )
        for i in range(runs)
    ]
    for i, run in enumerate(planned):
        _make_run(campaign.run(run.run_id), run, failed=i % 10 == 9)
    write_manifest(campaign.manifest, refresh(new_manifest("scale", "0", planned, log_dir), campaign))
    return sum(path.stat().st_size for path in directory.rglob("metrics.jsonl"))


def _make_run(files: RunFiles, run: RunEntry, *, failed: bool) -> None:
    files.directory.mkdir()
    files.run_toml.write_text("")
    lock = hold(files.lock)
    begin_attempt(files.attempts)
    rng = random.Random(run.run_id)
    base = {
        "run": run.run_id,
        "condition": run.condition,
        "seed": run.seed,
        "batch_size": 8,
        "group_size": 16,
    }
    groups = [rng.random() for _ in range((ROW_BYTES - 300) // 21)]  # a list of floats fills the row up
    with MetricsWriter(files.metrics, attempt=1) as metrics:
        for step in range(1, run.max_steps + 1):
            measured = {"step": step, "step_time_s": rng.uniform(1, 2), "mean_reward": step / run.max_steps}
            metrics.append(base | measured | {"loss": rng.random(), "permit_wait_s": 0.01, "rewards": groups})
    write_progress(files.status, Progress("running", "train", run.max_steps, run.max_steps, 1))
    if failed:
        end_attempt(files.attempts, 1, RunState.FAILED, exit_code=4, message="ValueError: no such thing")
    else:
        end_attempt(files.attempts, 1, RunState.DONE, exit_code=0)
        write_done(files.done, "", {"eval_reward": 0.9}, seal_of(files.metrics))
    assert lock is not None
    lock.release()


def without_summaries(log_dir: Path) -> Path:
    """Have the manifest say nothing of the runs' files, so that all of them are opened."""
    (path,) = log_dir.glob("*/manifest.json")
    manifest = read_manifest(path)
    assert manifest is not None
    runs = tuple(replace(run, reading=None) for run in manifest.runs)
    write_manifest(path, replace(manifest, runs=runs))
    return log_dir


def measure(what: str, program: str, log_dir: Path, repeats: int) -> Measured:
    command = [sys.executable, "-c", MEASURE, program, str(log_dir)]
    # an installed package has its byte code; without it every start would compile the sources
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    answers = []
    for _ in range(repeats):
        answer = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout.split()
        answers.append([float(number) for number in answer])
    wall_s, cpu_s, peak = zip(*answers, strict=True)
    return Measured(what, statistics.median(wall_s), min(wall_s), statistics.median(cpu_s), max(peak) / 1e6)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--full", action="store_true", help="500 rows per run: 1.2 GB")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = 500 if options.full else options.rows
    with tempfile.TemporaryDirectory(prefix="retrain-status-") as name:
        log_dir = Path(name)
        needed = options.runs * rows * ROW_BYTES * 1.2 + 1e8
        if shutil.disk_usage(log_dir).free < needed:
            sys.exit(f"{log_dir}: needs {needed / 1e9:.1f} GB; set TMPDIR, or use fewer --runs or --rows")
        begin = time.perf_counter()
        size = make_campaign(log_dir, options.runs, rows)
        made_s = time.perf_counter() - begin
        measured = [
            measure("interpreter alone", "pass", log_dir, options.repeats),
            measure("survey", SURVEY, log_dir, options.repeats),
            measure("survey, directories", SURVEY, without_summaries(log_dir), options.repeats),
            measure("read every row", READ_ALL, log_dir, 1 if options.full else options.repeats),
        ]
    if options.json:
        shape = {"runs": options.runs, "rows": rows, "bytes": size}
        print(json.dumps(shape | {"measured": [asdict(m) for m in measured]}))
        return
    print(f"{options.runs} runs x {rows} rows, {size / 1e9:.2f} GB, written in {made_s:.0f} s")
    print(f"{'':20}{'median s':>10}{'best s':>10}{'cpu s':>10}{'peak MB':>10}")
    for m in measured:
        print(f"{m.what:20}{m.median_s:10.3f}{m.best_s:10.3f}{m.cpu_s:10.3f}{m.peak_rss_mb:10.1f}")


if __name__ == "__main__":
    main()
