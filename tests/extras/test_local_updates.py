"""Several optimizer steps on one batch of a transformer: as TRL takes them, and the same after a resume."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from benchmarks import trl_gradients as trl
from retrain import worker
from retrain.backends import Optimization
from retrain.config.load import parse
from retrain.records.metrics import read_metrics
from retrain.trainer.batch import Algorithm, ScoredBatch
from retrain.trainer.updates import minibatches_of
from tests.extras.local_policies import loss_named, open_backend, stir
from tests.extras.tiny_models import save_tiny_model
from tests.stopping import StopAfterStep
from tests.test_trainer import make_run, without_times

STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture(scope="module")
def trainer(model: str, tmp_path_factory: pytest.TempPathFactory):
    return trl.trl_trainer(model, tmp_path_factory.mktemp("trl"))


@pytest.mark.filterwarnings("ignore")  # of TRL and of the libraries that it imports
@pytest.mark.parametrize("normalization", trl.LOSS_TYPES)
def test_a_minibatch_has_the_gradient_of_trls_steps_per_generation(model, trainer, normalization):
    backend = open_backend(model)
    stir(backend)
    batch = trl.drawn(backend, tied=0, drift=0.3)  # some ratios are clipped, as in later updates
    raw = {
        "training": {"max_tokens": trl.MAX_TOKENS},
        "algorithm": {"advantage_mode": "grpo", "loss_normalization": normalization},
    }
    algorithm = Algorithm.of(parse(raw, "c"), lambda groups: batch)
    samples = algorithm.transform(batch, algorithm.estimate(batch.rewards), 0.0)
    for part in minibatches_of(samples, STEPS, [1]):
        chosen = sorted({sample.group for sample in part})
        rows = ScoredBatch([batch.groups[number] for number in chosen], batch.rewards[chosen])
        generated = sum(len(rollout.tokens) for rollout in batch.rollouts)
        wanted = trl.trl_gradient(
            trainer, backend, rows, trl.LOSS_TYPES[normalization], 0.0, 0.0, steps=STEPS, generated=generated
        )
        backend.reset_optimizer()
        backend.update(part, loss_named("ppo"), Optimization(lr=0.0, max_grad_norm=1e9, micro_batches=2))
        state = backend.optimizer.state()
        found = trl.flat([10 * state[f"exp_avg.{name}"] for name in backend.policy.trainable()])
        assert np.linalg.norm(wanted) > 1e-4
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_a_run_with_several_updates_and_dropout_resumes_to_the_same_rows(model, tmp_path: Path):
    raw = {
        "model": {"model": model, "lora_rank": 4},
        "training": {
            "seed": 3,
            "max_steps": 3,
            "batch_size": 4,
            "group_size": 3,
            "max_tokens": 4,
            "temperature": 1.0,
            "lr": 1e-2,
            "updates_per_batch": 2,
            "minibatches": 2,
            "save_every": 1,
        },
        "algorithm": {"kl_coef": 0.01},
        "data": {"task": "successor"},
        "backend": {
            "backend": "local",
            "options": {"local_files_only": True, "device": "cpu", "lora_dropout": 0.2},
        },
    }
    whole = make_run(tmp_path / "whole", raw)
    assert worker.run(whole.directory, threading.Event()) == 0
    broken = make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAfterStep(broken, 2)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    rows = read_metrics(whole.directory)
    assert without_times(read_metrics(broken.directory)) == without_times(rows)
    assert {row["updates"] for row in rows} == {4}
    assert rows[-1]["approx_kl"] > 0
