"""retrain's local backend beside TRL's GRPOTrainer: speed, memory and learning on one CPU thread.

Each side trains LoRA adapters (rank 16, alpha 32, all linear layers, AdamW, lr 1e-3, clip 0.2) of the
same saved model on the same prompts with the same budget, in a process of its own, in turn. Seconds are
the process's own on the processor, so that neighbours on the machine hardly count; of the repetitions the
fastest is kept. Ours is the whole worker with its records; TRL reports nowhere.

    python -m benchmarks.trainers [--full] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3  # not timed: allocators, caches
PROMPTS, GROUP = 16, 8
SIDES = ("retrain", "trl")


@dataclass(frozen=True)
class Case:
    name: str
    hidden: int
    layers: int
    max_tokens: int
    steps: int
    format_steps: int  # supervised, so that there is something to learn from


CASES = (
    Case("overhead", hidden=128, layers=2, max_tokens=4, steps=60, format_steps=150),
    Case("arithmetic", hidden=512, layers=4, max_tokens=16, steps=4, format_steps=0),
)
FULL_CASES = (
    Case("overhead", hidden=128, layers=2, max_tokens=4, steps=300, format_steps=150),
    Case("arithmetic", hidden=512, layers=4, max_tokens=32, steps=4, format_steps=0),
)


@dataclass(frozen=True)
class Result:
    case: str
    side: str
    steps_per_second: float
    tokens_per_second: float
    peak_memory_mb: float
    reward: float  # mean over the last fifth of the steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--full", action="store_true", help="long enough to compare learning")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = FULL_CASES if arguments.full else CASES
    if arguments.side:
        case = next(c for c in cases if c.name == arguments.case)
        run = run_retrain if arguments.side == "retrain" else run_trl
        print(json.dumps(asdict(run(case, arguments.model))))
        return
    sides = SIDES if find_spec("trl") else SIDES[:1]
    if sides != SIDES:
        print("TRL is not installed, so only our side runs; pip install trl", file=sys.stderr)
    results = [best for case in cases for best in compare(case, sides, arguments)]
    print(json.dumps([asdict(r) for r in results]) if arguments.json else table(results))


def compare(case: Case, sides: tuple[str, ...], arguments: argparse.Namespace) -> list[Result]:
    """Run the sides in turn, several times; keep each one's fastest."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(case, Path(directory) / "model")
        runs = [in_process(side, case, model, arguments) for _ in range(arguments.repeat) for side in sides]
    return [max((r for r in runs if r.side == side), key=lambda r: r.steps_per_second) for side in sides]


def make_model(case: Case, directory: Path) -> Path:
    import torch

    from tests.extras.tiny_models import save_tiny_model

    torch.set_num_threads(1)
    save_tiny_model(directory, hidden=case.hidden, layers=case.layers, warm_up_steps=case.format_steps)
    return directory


def in_process(side: str, case: Case, model: Path, arguments: argparse.Namespace) -> Result:
    command = [sys.executable, "-m", "benchmarks.trainers", "--side", side, "--case", case.name]
    command += ["--model", str(model), *(["--full"] if arguments.full else [])]
    print(f"{case.name}: {side}", file=sys.stderr)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **threads, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side}: {done.stderr[-3000:]}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def run_retrain(case: Case, model: Path) -> Result:
    import tomli_w

    from retrain import worker
    from retrain.config.load import parse
    from retrain.config.resolve import as_tables
    from retrain.plan.matrix import plan_runs
    from retrain.records.layout import RunFiles
    from retrain.records.metrics import read_metrics

    raw = {
        "model": {"model": str(model), "lora_rank": 16},
        "backend": {
            "backend": "benchmarks.trainers.timed_backend",
            "options": {"local_files_only": True, "device": "cpu"},
        },
        "training": {
            "seed": 0,
            "max_steps": WARM_UP_STEPS + case.steps + 1,  # the last one ends the one before
            "batch_size": PROMPTS,
            "group_size": GROUP,
            "max_tokens": case.max_tokens,
            "temperature": 1.0,
            "lr": 1e-3,
            "save_every": 0,
        },
        "algorithm": {"advantage_mode": "grpo", "loss_mode": "ppo"},
        "data": {"task": "successor", "options": {"held_out": 0.0}},
    }
    with tempfile.TemporaryDirectory() as directory:
        files = RunFiles(Path(directory))
        files.run_toml.write_text(tomli_w.dumps(as_tables(plan_runs(parse(raw, "benchmark")).runs[0].config)))
        code = worker.run(files.directory, threading.Event())
        if code:
            sys.exit(f"the worker ended with {code}")
        rows = read_metrics(files.directory)
    rows = rows[:-1]
    tokens = sum(row["tokens_per_step"] for row in rows[WARM_UP_STEPS:])
    return result(case, "retrain", STARTS[1:], tokens, [row["mean_reward"] for row in rows])


STARTS: list[float] = []  # processor seconds at which each of our steps began


def timed_backend(spec: Any, *, local_files_only: bool, device: str) -> Any:
    """The local backend with its options, noting when a step begins: with the only call of `sample`."""
    from retrain.backends.local import connect

    backend = connect(spec)
    sample = backend.sample

    def noted(prompts: Any, sampling: Any) -> Any:
        STARTS.append(time.process_time())
        return sample(prompts, sampling)

    backend.sample = noted  # type: ignore[method-assign]
    return backend


def run_trl(case: Case, model: Path) -> Result:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from retrain.tasks.successor import build

    torch.set_num_threads(1)
    prompts = build(held_out=0.0, seed=0).train
    data = Dataset.from_list([{"prompt": p.text, "answer": p.answer} for p in prompts])
    rewards: list[float] = []
    counts: list[int] = []
    ends: list[float] = []

    def exact(completions: list[str], answer: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        found = [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        counts.append(sum(map(len, completion_ids)))
        return found

    class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    with tempfile.TemporaryDirectory() as directory:
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=exact,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
            callbacks=[Clock()],
            args=GRPOConfig(
                output_dir=directory,
                use_cpu=True,
                bf16=False,
                model_init_kwargs={"dtype": "float32"},
                gradient_checkpointing=False,
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                max_completion_length=case.max_tokens,
                temperature=1.0,
                learning_rate=1e-3,
                lr_scheduler_type="constant",
                max_steps=WARM_UP_STEPS + case.steps,
                beta=0.0,
                epsilon=0.2,
                max_grad_norm=1.0,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                seed=0,
            ),
        )
        trainer.train()
    return result(case, "trl", ends, sum(counts[WARM_UP_STEPS:]), rewards)


def result(case: Case, side: str, ends: list[float], tokens: int, rewards: list[float]) -> Result:
    elapsed_s = ends[-1] - ends[WARM_UP_STEPS - 1]
    last = rewards[-max(1, case.steps // 5) :]
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6
    return Result(case.name, side, case.steps / elapsed_s, tokens / elapsed_s, peak, sum(last) / len(last))


def table(results: list[Result]) -> str:
    lines = [
        f"{'case':<12}{'side':<9}{'steps/s':>9}{'tokens/s':>10}{'memory MB':>11}{'reward':>8}{'speed-up':>10}"
    ]
    for r in results:
        rival = next((o for o in results if o.case == r.case and o.side == "trl"), None)
        gain = f"{r.steps_per_second / rival.steps_per_second:.2f}x" if rival and r is not rival else ""
        lines.append(
            f"{r.case:<12}{r.side:<9}{r.steps_per_second:>9.2f}{r.tokens_per_second:>10.0f}"
            f"{r.peak_memory_mb:>11.0f}{r.reward:>8.2f}{gain:>10}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from benchmarks import trainers  # by the name under which the worker finds its backend

    trainers.main()
