"""How many rollouts learning from a teacher saves, against GRPO alone: real campaigns of small policies.

    python -m benchmarks.distill              the numpy policy, 5 seeds (4 min on two cores)
    python -m benchmarks.distill --model      a language model (10 min; needs the extra `local`)

The numpy policy sorts three digits. Its teacher is a run of twice its width that GRPO trained before, not
counted here; conditions are GRPO alone, the teacher alone by sampled tokens (`reverse_kl`) and by whole
distributions (`jsd`), and the teacher with the reward. Those with a teacher have smaller groups and a larger
learning rate, as their signal is denser. With `--model` a language model of 133,000 parameters, pretrained on
sums with wrong digits, learns from one of twice the size that was pretrained on right ones.

Reported for each condition: the rollouts after which a held-out reward first is at the target, as a geometric
mean over seeds; as a share of GRPO's with a 95 % interval (Student's, of the logarithms of each seed's
ratio); how many seeds came there; and the held-out reward at the end. A run that never comes to the target
counts with all its rollouts, so that the share is then a bound.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.prompts import model_tables, run
from benchmarks.suite import script_parser
from retrain import read_metrics
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
    end: float  # held-out reward of the last evaluation, mean over seeds


def measure(
    policy: str, tables: dict[str, Any], dense: dict[str, Any], teacher: Path, options: Any, steps: int
) -> list[Row]:
    reward = tables.get("reward", {}).get("reward", "match")
    tables = tables | {"eval": [{"name": "end", "every": EVERY, "reward": reward}]}
    named = list[dict[str, Any]]()
    for name, (mode, has_reward) in CONDITIONS.items():
        named.append({"name": name})
        if mode:
            named[-1] |= {"training": dense, "teacher": {"teacher": str(teacher), "mode": mode}}
            named[-1] |= {"algorithm": {"loss_mode": "importance_sampling"}}
        if not has_reward:
            named[-1] |= {"reward": {"reward": "none"}}
    launched = {"seeds": list(range(options.seeds)), "max_steps": steps, "conditions": named}
    launched |= {"parallel": True, "max_workers": len(os.sched_getaffinity(0))}
    files = CampaignFiles(run("students", tables, launched))
    manifest = read_manifest(files.manifest)
    if manifest is None:
        raise RuntimeError(f"{files.directory}: has no manifest")
    found: dict[str, list[tuple[float, bool, float]]] = {}
    for entry in manifest.runs:
        rows = read_metrics(files.run(entry.run_id).directory)
        found.setdefault(entry.condition, []).append(reached(rows, options.target))
    return [row(policy, name, each, found["grpo"]) for name, each in found.items()]


def reached(rows: list[dict[str, Any]], target: float) -> tuple[float, bool, float]:
    """Return the rollouts until the target, whether it was reached, and the last held-out reward."""
    rollouts = np.cumsum([row["batch_size"] * row["group_size"] for row in rows])
    known = [(rollouts[n], row[METRIC]) for n, row in enumerate(rows) if row.get(METRIC) is not None]
    there = [when for when, reward in known if reward >= target]
    return float(there[0] if there else rollouts[-1]), bool(there), float(known[-1][1])


def row(policy: str, name: str, each: list[Any], grpo: list[Any]) -> Row:
    logs = np.log([rollouts for rollouts, _, _ in each])
    ratios = logs - np.log([rollouts for rollouts, _, _ in grpo])
    half = half_width(ratios.tolist(), 0.05) if len(ratios) > 1 and ratios.std() else 0.0
    ratio, low, high = (math.exp(float(ratios.mean()) + side) for side in (0.0, -half, half))
    came = sum(is_there for _, is_there, _ in each)
    end = float(np.mean([last for _, _, last in each]))
    return Row(policy, name, math.exp(float(logs.mean())), ratio, low, high, came, len(each), end)


def of_numpy(options: Any) -> list[Row]:
    wide = NUMPY | {"backend": {"backend": "numpy", "options": {"hidden": 64}}}
    trained = run("teacher", wide, {"seeds": [100], "max_steps": 300})
    student = NUMPY | {"backend": {"backend": "numpy", "options": {"hidden": 32}}}
    teacher = next(CampaignFiles(trained).runs.iterdir()).absolute()
    return measure("numpy", student, DENSE, teacher, options, options.steps or 600)


def of_model(options: Any) -> list[Row]:
    from benchmarks.prompts_model import STEPS, save_model  # torch

    student, teacher = (Path(name).absolute() for name in ("student", "teacher"))
    save_model(student)
    save_model(teacher, hidden=96, right_steps=STEPS)
    steps = options.steps or 80
    tables = model_tables(student, steps) | {"algorithm": {"advantage_mode": "grpo"}}
    return measure("model", tables, {}, teacher, options, steps)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="default: 600, and 80 of the language model")
    parser.add_argument("--target", type=float, default=0.9)
    parser.add_argument("--model", action="store_true", help="the sums of the language model instead")
    parser.add_argument("--logs", type=Path, help="directory to keep the campaigns in")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.logs.absolute() if options.logs else Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        os.chdir(place)
        found = of_model(options) if options.model else of_numpy(options)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
        return
    print(f"policy  condition      rollouts to {options.target:g}   of grpo's              came   end")
    for one in found:
        share = f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"
        name = f"{one.policy:7s} {one.condition:14s}"
        print(f"{name} {one.rollouts:13,.0f}   {share:22s} {one.came} of {one.seeds}   {one.end:.3f}")


if __name__ == "__main__":
    main()
