"""How much memory and CPU time do `compare`, `report`, `export` and `resume` take on a large campaign?

Writes a finished campaign of 400 runs x 500 rows (177 MB, removed afterwards) with rows as retrain writes
them, then asks the kernel for the peak resident memory of each command, beside that of an interpreter with
the libraries that any of them needs, and of a plain loop of json and csv. `--runs 1 --rows 200000` has all
rows in one file. `resume` has nothing to run.

    python -m benchmarks.memory_at_scale
    python -m benchmarks.memory_at_scale --runs 4000 --rows 50 --only compare resume plain "export (csv)"
    python -m benchmarks.memory_at_scale --runs 1 --rows 200000
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.status_at_scale import Measured, measure
from benchmarks.suite import script_parser
from retrain.campaign.rollup import RollUp, manifest_of
from retrain.campaign.run import start
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import MetricsWriter, seal_of
from retrain.records.run_row import RunEntry
from retrain.records.run_state import RunState, begin_attempt, end_attempt, write_done

CONDITIONS = 4
MEASURED = (
    "step_time_s sample_time_s reward_time_s train_time_s permit_wait_s permit_held_s loss mean_reward "
    "reward_std correct_rate zero_signal_group_fraction max_token_hit_rate completion_tokens_mean grad_norm "
    "tokens_per_second entropy lr_factor bp_p_star bp_sigma bp_kappa bp_utilization"
).split()
LIBRARIES = "import numpy, scipy.stats, pydantic, typer, rich"
PLAIN = """
import csv, json, sys
from pathlib import Path
paths = sorted(Path(sys.argv[1]).glob("*/runs/*/metrics.jsonl"))
columns = list(json.loads(paths[0].open().readline()))
with open("/dev/null", "w", newline="") as out:
    writer = csv.writer(out)
    for path in paths:
        for line in path.open():
            row = json.loads(line)
            writer.writerow([row.get(name) for name in columns])
"""
COMMANDS = {
    "libraries alone": LIBRARIES,
    "resume": "resume",
    "compare": "compare",
    "compare (equal rollouts)": "compare --per rollouts --over whole",
    "plain json and csv loop": PLAIN,
    "report (html)": "report -o {out}/report.html",
    "export (csv)": "export -o {out}/rows.csv",
    "export (jsonl)": "export -o {out}/rows.jsonl",
    "export (parquet)": "export -o {out}/rows.parquet",
    "export --runs (csv)": "export --runs -o {out}/runs.csv",
}
TOML = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
[data]
task = "successor"
[logging]
log_dir = "{log_dir}"
[campaign]
seeds = {seeds}
max_steps = {rows}
parallel = true
max_workers = 2
"""
CALL = "import sys; from retrain.__main__ import main; sys.argv = ['retrain', *{arguments!r}]; main()"


def make_campaign(log_dir: Path, runs: int, rows: int) -> int:
    """Write a finished campaign with our own writers; gives the bytes of its rows."""
    path = log_dir.parent / "scale.toml"
    conditions = min(runs, CONDITIONS)
    named = (f'[[campaign.conditions]]\nname = "c{i}"\ntraining.lr = 0.0{i + 1}\n' for i in range(conditions))
    seeds = list(range(runs // conditions))
    path.write_text(TOML.format(seeds=seeds, rows=rows, log_dir=log_dir) + "".join(named))
    campaign = start(path)
    for run in campaign.plan.runs:
        _make_run(campaign.files_of(run.run_id), run.planned)
    files = CampaignFiles(campaign.directory)
    RollUp(manifest_of(campaign.plan, None, ()), files, print).write(ended=True)
    return sum(path.stat().st_size for path in files.directory.rglob("metrics.jsonl"))


def _make_run(files: RunFiles, run: RunEntry) -> None:
    begin_attempt(files.attempts)
    rng = random.Random(run.run_id)
    base: dict[str, object] = {"run": run.run_id, "condition": run.condition, "seed": run.seed}
    base |= {"batch_size": 8, "group_size": 16, "lr": 4e-5}
    with MetricsWriter(files.metrics, attempt=1) as metrics:
        for step in range(1, run.max_steps + 1):
            minutes, seconds = divmod(step % 86400, 60)
            when = f"2025-01-31T{minutes // 60 % 24:02d}:{minutes % 60:02d}:{seconds:02d}.000Z"
            figures = {name: rng.random() for name in MEASURED}
            metrics.append({"step": step} | base | {"timestamp": when, "bp_regime": "optimal"} | figures)
    end_attempt(files.attempts, 1, RunState.DONE, exit_code=0, duration_s=500.0)
    write_done(files.done, run.config_hash, {"eval_reward": rng.random()}, seal_of(files.metrics))


def program(command: str, log_dir: Path, out: Path) -> str:
    """Return what an interpreter is to run."""
    if command in (LIBRARIES, PLAIN):
        return command
    name, *rest = command.format(out=out).split()
    (campaign,) = log_dir.iterdir()
    return CALL.format(arguments=[name, str(campaign), *rest])


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the rows to measure")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="retrain-memory-") as name:
        log_dir, out = Path(name) / "logs", Path(name) / "out"
        log_dir.mkdir()
        out.mkdir()
        begin = time.perf_counter()
        size = make_campaign(log_dir, options.runs, options.rows)
        print(
            f"{options.runs} runs x {options.rows} rows, {size / 1e6:.0f} MB, "
            f"written in {time.perf_counter() - begin:.0f} s",
            file=sys.stderr,
        )
        measured: list[Measured] = [
            measure(what, program(command, log_dir, out), log_dir, 1)
            for what, command in COMMANDS.items()
            if not options.only or what.startswith(tuple(options.only))
        ]
    if options.json:
        print(json.dumps({"bytes": size, "measured": [asdict(m) for m in measured]}))
        return
    print(f"{'':24}{'peak MB':>10}{'cpu s':>10}")
    for m in measured:
        print(f"{m.what:24}{m.peak_rss_mb:10.0f}{m.cpu_s:10.1f}")


if __name__ == "__main__":
    main()
