"""Learning curves of real runs, from which `benchmarks.verdict --curves` draws campaigns.

    python -m benchmarks.studies.verdict_curves sort       the numpy policy sorts digits (3 min of a core)
    python -m benchmarks.studies.verdict_curves episodes   it guesses secrets in turns (3 min)
    python -m benchmarks.studies.verdict_curves model      a small language model adds (10 min; extra `local`)

Runs a campaign of every condition with every seed to its end, and writes each run's mean reward in forty
parts of its steps to `benchmarks/data/verdict_KIND.json`, with the sampled tokens of a step by condition.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from benchmarks.suite import script_parser
from retrain.campaign.run import run_campaign
from retrain.records.layout import CampaignFiles
from retrain.records.manifest import read_manifest
from retrain.records.metrics import read_metrics

PARTS = 40
NUMPY: dict[str, dict[str, Any]] = {
    "training": {"batch_size": 8, "group_size": 8, "temperature": 1.0, "max_grad_norm": 0.1, "save_every": 0},
    "algorithm": {"advantage_mode": "grpo"},
}
SORT: dict[str, Any] = {
    "training": NUMPY["training"] | {"max_tokens": 8, "lr": 5e-3, "entropy_bonus": 0.01},
    "algorithm": NUMPY["algorithm"],
    "data": {"task": "sort", "eval_prompts": 8},
    "reward": {"reward": "partial"},
}
EPISODES: dict[str, Any] = {
    "training": NUMPY["training"] | {"max_tokens": 12, "lr": 1e-2, "entropy_bonus": 0.01},
    "algorithm": NUMPY["algorithm"],
    "data": {"task": "guess", "options": {"digits": 2, "base": 5}, "eval_prompts": 8},
    "environment": {"environment": "guess", "max_turns": 4, "max_turn_tokens": 3},
}
KINDS: dict[
    str, tuple[dict[str, Any], int, int, list[dict[str, Any]]]
] = {  # tables, steps, seeds, conditions
    "sort": (
        SORT,
        400,
        21,
        [{}, {"algorithm": {"advantage_mode": "maxrl"}}, {"training": {"lr": 3e-3}}],
    ),
    "episodes": (EPISODES, 400, 21, [{}, {"training": {"lr": 5e-3}}]),
    "model": ({}, 40, 14, [{}, {"training": {"lr": 3e-4}}]),
}


def tables_of(kind: str, folder: Path) -> dict[str, Any]:
    tables, steps, seeds, conditions = KINDS[kind]
    if kind == "model":
        from benchmarks.prompts import model_tables  # needs torch
        from benchmarks.prompts_model import save_model

        save_model(folder / "model")
        tables = model_tables(folder / "model", steps) | {"eval": []}
    names = [{"name": f"c{i}"} | overrides for i, overrides in enumerate(conditions)]
    campaign = {"seeds": list(range(seeds)), "max_steps": steps, "launcher": "inline"}
    logging = {"log_dir": str(folder / "logs"), "samples_per_step": 0}
    return tables | {"logging": logging, "campaign": campaign | {"conditions": names}}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("kind", choices=KINDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "curves.toml"
        path.write_text(tomli_w.dumps(tables_of(options.kind, path.parent)))
        files = CampaignFiles(run_campaign(path).directory)
        manifest = read_manifest(files.manifest)
        if manifest is None:
            raise RuntimeError(f"{files.directory}: has no manifest")
        rewards: dict[str, list[list[float]]] = {}
        tokens: dict[str, list[float]] = {}
        for run in manifest.runs:
            rows = read_metrics(files.run(run.run_id).directory)
            parts = np.array_split(np.array([row["mean_reward"] for row in rows]), PARTS)
            rewards.setdefault(run.condition, []).append([round(float(part.mean()), 4) for part in parts])
            tokens.setdefault(run.condition, []).append(float(np.mean([r["tokens_per_step"] for r in rows])))
    means = [round(float(np.mean(each)), 1) for each in tokens.values()]
    target = Path(__file__).parents[1] / "data" / f"verdict_{options.kind}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"rewards": list(rewards.values()), "tokens": means}) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
