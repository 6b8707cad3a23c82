"""One side of `benchmarks.trainers` in a process of its own: a worker of ours, or TRL's GRPOTrainer.

    python -m benchmarks.trainer_sides SIDE CASE DIRECTORY OWN

SIDE is retrain, trl, or trl_parts: TRL that trains on a quarter of the batch at a time. DIRECTORY holds
`model` and `prompts.jsonl`, OWN receives records. Prints a line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 1  # not timed: allocators, caches, the optimizer's moments
GROUP = 8
RANK, LR = 16, 1e-4
PARTS = 4  # of TRL's batch, with trl_parts


@dataclass(frozen=True)
class Case:
    """A model and the size of a step."""

    name: str
    prompts: int
    max_tokens: int
    steps: int  # timed
    hidden: int = 0  # of a model with random weights; 0: SmolLM2
    layers: int = 0


CASES = {
    case.name: case
    for case in (
        Case("small", prompts=16, max_tokens=16, steps=10, hidden=128, layers=2),
        Case("medium", prompts=16, max_tokens=16, steps=4, hidden=512, layers=4),
        Case("SmolLM2", prompts=4, max_tokens=16, steps=2),
    )
}


@dataclass
class Side:
    """What one side did; times and memory are the process's own."""

    side: str
    steps: int  # timed
    seconds: float = 0.0  # on the processor, user and system
    peak_memory_mb: float = 0.0
    updates: int = 0  # of the optimizer, with the warm-up
    tied_groups: int = 0
    trained_tokens: int = 0  # of completions, in all updates
    rewards: list[float] = field(default_factory=list)  # mean of each step

    @property
    def speed(self) -> float:
        """Steps per second on the processor."""
        return self.steps / self.seconds

    def summary(self) -> str:
        counts = f"{self.updates} updates in {len(self.rewards)} steps, {self.tied_groups} groups tied"
        return f"{self.side}: {self.speed:.3f} steps/CPU s, {self.peak_memory_mb:.0f} MB, {counts}"


def main() -> None:
    side, name, directory, own = sys.argv[1:]
    if side == "retrain":
        found = run_retrain(CASES[name], Path(directory), Path(own))
    else:
        found = run_trl(CASES[name], Path(directory), Path(own), PARTS if side == "trl_parts" else 1)
    found.side = side
    scale = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    found.peak_memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6
    print(json.dumps(asdict(found)))


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Return each completion's share of vowels: a reward for both sides, in which groups hardly ever tie."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


SEEN = Side("retrain", 0)
STARTS: list[float] = []  # processor seconds at which each of our steps began to sample
ENDS: list[float] = []  # ... and had updated; records come after it, and before the next step


def timed_backend(spec: Any, **_: Any) -> Any:
    """Return the local backend, which notes steps and updates and never ends a completion early."""
    from retrain.backends.local import connect

    backend = connect(spec)
    backend.text.end_ids = ()
    sample, update = backend.sample, backend.update

    def noted(prompts: Any, sampling: Any) -> Any:
        STARTS.append(time.process_time())
        return sample(prompts, sampling)

    def counted(samples: Any, loss: Any, optimization: Any) -> Any:
        SEEN.updates += 1
        SEEN.trained_tokens += sum(len(one.rollout.tokens) for one in samples)
        stats = update(samples, loss, optimization)
        ENDS.append(time.process_time())
        return stats

    backend.sample, backend.update = noted, counted  # type: ignore[method-assign]
    return backend


def run_retrain(case: Case, directory: Path, own: Path) -> Side:
    import tomli_w

    from retrain.config.load import parse
    from retrain.config.resolve import as_tables
    from retrain.plan.build import plan_runs
    from retrain.records.layout import RunFiles
    from retrain.records.metrics import read_metrics
    from retrain.trainer import worker

    raw = {
        "model": {"model": str(directory / "model"), "lora_rank": RANK},
        "backend": {
            "backend": "benchmarks.trainer_sides.timed_backend",
            "options": {"local_files_only": True, "device": "cpu", "threads": 1},
        },
        "training": {
            "seed": 0,
            "max_steps": WARM_UP_STEPS + case.steps,
            "batch_size": case.prompts,
            "group_size": GROUP,
            "max_tokens": case.max_tokens,
            "temperature": 1.0,
            "lr": LR,
            "save_every": 0,
        },
        "algorithm": {"advantage_mode": "grpo", "loss_mode": "ppo"},
        "data": {
            "task": "jsonl",
            "options": {"path": str(directory / "prompts.jsonl"), "answer_field": "", "held_out": 0.0},
        },
        "reward": {"reward": "benchmarks.trainer_sides.vowels"},
    }
    files = RunFiles(own)
    files.run_toml.write_text(tomli_w.dumps(as_tables(plan_runs(parse(raw, "benchmark")).runs[0].config)))
    if code := worker.run(files.directory, threading.Event()):
        sys.exit(f"the worker ended with {code}")
    rows = read_metrics(files.directory)
    SEEN.steps, SEEN.seconds = case.steps, ENDS[-1] - STARTS[WARM_UP_STEPS]
    SEEN.tied_groups = sum(round(row["zero_signal_group_fraction"] * row["batch_size"]) for row in rows)
    SEEN.rewards = [row["mean_reward"] for row in rows]
    return SEEN


def run_trl(case: Case, directory: Path, own: Path, parts: int) -> Side:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    seen, ends = Side("trl", case.steps), []

    def reward(completions: list[str], completion_ids: list[Any], **_: Any) -> list[float]:
        found = vowels(completions)
        seen.rewards.append(sum(found) / len(found))
        seen.tied_groups += sum(len(set(found[i : i + GROUP])) == 1 for i in range(0, len(found), GROUP))
        seen.trained_tokens += sum(map(len, completion_ids))
        return found

    class Clock(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen.updates += 1

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())

    model = str(directory / "model")
    prompts = list(map(json.loads, (directory / "prompts.jsonl").read_text().splitlines()))
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Clock()],
        args=GRPOConfig(
            output_dir=str(own),
            use_cpu=True,
            bf16=False,
            model_init_kwargs={"dtype": "float32"},
            gradient_checkpointing=False,
            per_device_train_batch_size=case.prompts * GROUP // parts,
            gradient_accumulation_steps=parts,
            num_generations=GROUP,
            max_completion_length=case.max_tokens,
            generation_kwargs={"min_new_tokens": case.max_tokens},
            temperature=1.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
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
    seen.seconds = ends[-1] - ends[WARM_UP_STEPS - 1]
    return seen


if __name__ == "__main__":
    from benchmarks import trainer_sides  # by the name under which the worker finds backend and reward

    trainer_sides.main()
