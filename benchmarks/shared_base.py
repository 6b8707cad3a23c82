"""Memory of several runs of one model on the CPU, with the frozen weights shared and with a copy each.

    python -m benchmarks.shared_base --model SmolLM2-135M-Instruct --runs 8

Each run is a process that samples and trains one step. Memory is the sum of their PSS, which counts a page
that n processes map as one n-th in each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.suite import script_parser

RUN = """
import sys
from functools import partial
import numpy as np
from retrain.base import registry
from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.local import connect
from retrain.base.rollouts import Loss, Prompt, TrainingSample

shares = sys.argv[2] == "shared"
options = {"device": "cpu", "local_files_only": True, "threads": 1, "share_weights": shares}
spec = BackendSpec(seed=int(sys.argv[3]), model=sys.argv[1], lora_rank=16, options=options)
backend = connect(spec)
prompts = [Prompt(0, "One two three four", ""), Prompt(1, "Red green blue", "")]
groups = backend.sample(prompts, Sampling(4, 16, 1.0))
rollouts = [rollout for group in groups for rollout in group.rollouts]
samples = [TrainingSample(one, np.ones(len(one.tokens)), 0.01, n // 4) for n, one in enumerate(rollouts)]
loss = Loss("ppo", registry.find("losses", "ppo"), {})
backend.update(samples, loss, Optimization(lr=1e-4, temperature=1.0))
print("trained", flush=True)
sys.stdin.read()
backend.close()
"""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=8)
    options = parser.parse_args()
    print(json.dumps(measure(options.model.absolute(), options.runs), indent=1))


def measure(model: Path, runs: int) -> dict[str, Any]:
    """Return PSS in MB: of one run, of all with shared weights, and of as many with a copy each."""
    own = sum(path.stat().st_size for path in model.glob("*.safetensors")) / 1e6
    alone = sum(pss_mb(model, "copied", 1))
    return {
        "runs": runs,
        "weights on disk, MB": round(own),
        "one run alone, MB": round(alone),
        "shared, MB": round(sum(pss_mb(model, "shared", runs))),
        "a copy each, MB": round(runs * alone),
    }


def pss_mb(model: Path, how: str, runs: int) -> list[float]:
    """Return each process's PSS once all of them have trained a step."""
    with ExitStack() as stack:
        processes = []
        for seed in range(runs):
            command = [sys.executable, "-c", RUN, str(model), how, str(seed)]
            processes.append(
                stack.enter_context(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                    )
                )
            )
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != b"trained":
                raise SystemExit(f"a run failed with exit code {process.wait()}")
        found = [_pss_mb(process.pid) for process in processes]
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        return found


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


if __name__ == "__main__":
    main()
