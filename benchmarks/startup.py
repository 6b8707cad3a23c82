"""How long the tool takes to start: help, explain, status and a worker, against bare interpreters.

    python -m benchmarks.startup [--json] [--repeats N]

Each command runs several times in turn with the others; the table shows the best and the median of
wall time, and the ratio of medians to what it is compared with.
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

from benchmarks.suite import script_parser

PYTHON = sys.executable
COMMANDS = {
    "python -c pass": [PYTHON, "-c", "pass"],
    "python -c 'import typer'": [PYTHON, "-c", "import typer"],
    "python -c 'import typer, pydantic'": [PYTHON, "-c", "import typer, pydantic"],
    "python -c 'import numpy'": [PYTHON, "-c", "import numpy"],
    "retrain --help": [PYTHON, "-m", "retrain", "--help"],
    "retrain explain quickstart.toml": [PYTHON, "-m", "retrain", "explain", "quickstart.toml"],
    "retrain explain campaign.toml": [PYTHON, "-m", "retrain", "explain", "campaign.toml"],
    "retrain status logs": [PYTHON, "-m", "retrain", "status", "logs"],
    "worker, refusing a finished run": [PYTHON, "-m", "retrain.trainer.worker", "RUN"],
    "worker's imports": [
        PYTHON,
        "-c",
        "import retrain.trainer.worker, retrain.trainer.loop, retrain.backends.numpy",
    ],
}
COMPARED_WITH = {
    "retrain --help": "python -c 'import typer'",
    "retrain explain quickstart.toml": "python -c 'import typer, pydantic'",  # aim: 2.5
    "retrain explain campaign.toml": "python -c 'import typer, pydantic'",  # aim: 2.5
    "retrain status logs": "python -c 'import typer, pydantic'",  # at most 2
    "worker, refusing a finished run": "python -c pass",
    "worker's imports": "python -c 'import numpy'",
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), options.repeats)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'command':<36}{'best s':>8}{'median s':>10}   ratio of medians")
    for row in rows:
        ratio = f"{row['ratio']:.2f} x {row['compared_with']}" if row["ratio"] else ""
        print(f"{row['command']:<36}{row['best_s']:>8.3f}{row['median_s']:>10.3f}   {ratio}")


def measure(directory: Path, repeats: int) -> list[dict[str, object]]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    run = prepare(directory, environment)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for repeat in range(repeats + 1):
        for name, command in COMMANDS.items():
            filled = [str(run) if part == "RUN" else part for part in command]
            started = time.perf_counter()
            subprocess.run(filled, cwd=directory, env=environment, capture_output=True, check=False)
            if repeat:  # the first round fills caches
                times[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(found) for name, found in times.items()}
    return [
        {
            "command": name,
            "best_s": min(found),
            "median_s": medians[name],
            "compared_with": COMPARED_WITH.get(name, ""),
            "ratio": medians[name] / medians[COMPARED_WITH[name]] if name in COMPARED_WITH else None,
        }
        for name, found in times.items()
    ]


def prepare(directory: Path, environment: dict[str, str]) -> Path:
    """Make a template's campaign of a few steps; give one of its finished runs."""
    for template in ("quickstart", "campaign"):
        init = [PYTHON, "-m", "retrain", "init", "--template", template]
        subprocess.run(init, cwd=directory, env=environment, check=True, capture_output=True)
    run = [PYTHON, "-m", "retrain", "quickstart.toml", "--set", "campaign.max_steps=3"]
    subprocess.run(run, cwd=directory, env=environment, check=True, capture_output=True)
    return next(next((directory / "logs").glob("quickstart-*")).joinpath("runs").iterdir())


if __name__ == "__main__":
    main()
