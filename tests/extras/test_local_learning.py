"""A tiny transformer learns a task, alone and as a campaign through the command line."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from retrain.backends import Optimization, Sampling
from retrain.base.rollouts import TrainingSample
from retrain.cli import app
from retrain.plugins.advantages import maxrl
from retrain.plugins.tasks import successor
from retrain.records.metrics import read_metrics
from tests.extras.local_policies import loss_named, open_backend
from tests.extras.tiny_models import save_tiny_model

STEPS, LEARNED = 500, 0.5
CAMPAIGN = """
[model]
model = "{model}"
lora_rank = 8

[backend]
backend = "local"
options = {{ local_files_only = true, device = "cpu" }}

[training]
batch_size = 4
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 1e-3
save_every = 2

[data]
task = "successor"

[campaign]
seeds = [0]
max_steps = 4
launcher = "inline"

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), warm_up_steps=80)


def test_successor_is_learned_far_beyond_chance(model):
    backend = open_backend(model, rank=16)
    prompts = successor.build(seed=0, held_out=0.0).train
    choice, loss = random.Random(0), loss_named("ppo")
    rates = []
    for _ in range(STEPS):
        groups = backend.sample(choice.sample(prompts, 16), Sampling(8, 4, 1.0))
        rewards = np.array([[float(r.text == g.prompt.answer) for r in g.rollouts] for g in groups])
        rates.append(rewards.mean())
        if np.mean(rates[-10:]) >= LEARNED:
            break
        samples = samples_of(groups, maxrl.estimate(rewards))
        if samples:
            backend.update(samples, loss, Optimization(lr=2e-3, entropy_bonus=0.02))
    assert np.mean(rates[:10]) < 0.2
    assert np.mean(rates[-10:]) >= LEARNED, f"{np.mean(rates[-10:])} after {len(rates)} steps"


def samples_of(groups, advantages) -> list[TrainingSample]:
    chosen = [
        (rollout, advantages[g, i], g)
        for g, group in enumerate(groups)
        for i, rollout in enumerate(group.rollouts)
        if np.any(advantages[g] != 0)
    ]
    tokens = sum(len(rollout.tokens) for rollout, _, _ in chosen)
    return [
        TrainingSample(rollout, np.full(len(rollout.tokens), advantage), 1.0 / tokens, g)
        for rollout, advantage, g in chosen
    ]


def test_a_campaign_runs_from_its_file_to_done(model, here: Path):
    (here / "c.toml").write_text(CAMPAIGN.format(model=model))
    done = CliRunner().invoke(app, ["run", "c.toml"])
    assert done.exit_code == 0, done.output
    (run,) = (here / "logs").glob("*/runs/*")
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["tokens_per_step"] > 0 and row["entropy"] > 0 for row in rows)
    assert json.loads((run / "done.json").read_text())
    assert (run / "checkpoints" / "step-000004" / "adapter" / "adapter_model.safetensors").is_file()
    assert (run / "output.log").read_text() == ""
