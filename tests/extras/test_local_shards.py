"""Layers in pieces on two ranks: the draws and gradients of one, also where ranks have less to do or fail."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.backends import Optimization, Sampling
from retrain.backends.local.policy import LocalBackend
from retrain.base.errors import BackendMemoryError, ConfigError, RunFailedError
from retrain.base.rollouts import Loss
from retrain.control.rules.scaling import FIRST_SETTLED_STEP
from tests.extras.local_policies import as_samples, draw, gradient_of, open_backend, stir
from tests.extras.test_local_live_turns import follow, turns
from tests.extras.test_local_ranks import (
    HOW,
    PPO,
    PROMPTS,
    FullOnRankOne,
    assert_alike,
    fail_elsewhere,
    fail_here,
    steps_of,
    tokens_of,
)
from tests.extras.tiny_models import save_tiny_model
from tests.feeds import Script

pytestmark = [pytest.mark.extras, pytest.mark.timeout(600)]  # each rank takes seconds to start


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With a vocabulary of which ranks have different numbers of rows."""
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64, layers=3, vocabulary=41)


@pytest.fixture(scope="module", params=[True, False], ids=["adapters", "all-weights"])
def lora(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=["float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def how(lora: bool) -> Optimization:
    """Small steps of all weights: Adam's of a gradient near zero depends on how that was rounded."""
    return HOW if lora else replace(HOW, lr=1e-5)


@pytest.fixture(scope="module")
def alone(model: str, lora: bool, dtype: str) -> LocalBackend:
    return open_backend(model, lora=lora, dtype=dtype)


@pytest.fixture(scope="module")
def sharded(model: str, lora: bool, dtype: str) -> Iterator[LocalBackend]:
    options = {"devices": 2, "shard": True, "gradient_checkpointing": True}
    backend = open_backend(model, **options, lora=lora, dtype=dtype)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def start(alone: LocalBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a policy whose adapters do something, or of other weights than the model's."""
    directory = tmp_path_factory.mktemp("start")
    if alone.policy.adapters is not None:
        stir(alone)
    else:  # smaller ones, whose gradients round less
        with torch.no_grad():
            for parameter in alone.policy.trainable().values():
                parameter /= 2
    alone.save(directory)
    return directory


def bytes_of(backend: LocalBackend) -> int:
    pieces = (getattr(p, "to_local", lambda p=p: p)() for p in backend.policy.causal.parameters())
    return sum(piece.nbytes for piece in pieces)


def test_each_rank_holds_its_piece_of_every_layer(alone, sharded, lora, start, how):
    whole = alone.policy.causal
    cut = sum(p.nbytes for n, p in whole.named_parameters() if ".layers." in n and "lora" not in n)
    assert bytes_of(sharded) == bytes_of(alone) - cut // 2
    if not lora:  # of which the moments are in pieces, too
        steps_of(sharded, start, how, count=1)
        pieces = [kept["exp_avg_sq"] for kept in sharded.optimizer._adam.state.values()]
        rows = [(-(-len(p) // 2), p) for p in whole.parameters()]
        assert sum(piece.nbytes for piece in pieces) == sum(count * p[0].nbytes for count, p in rows)
    assert sharded.info.parameters == alone.info.parameters
    assert sharded.costs == alone.costs


@pytest.mark.parametrize("bonus", [0.0, 0.01])
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=len)  # the second rank has none of one
def test_pieces_draw_and_learn_as_the_whole(alone, sharded, lora, start, prompts, how, bonus):
    how = replace(how, kl_coef=0.1 if bonus and lora else 0, entropy_bonus=bonus)
    assert_alike(steps_of(sharded, start, how, prompts), steps_of(alone, start, how, prompts))


def test_the_gradients_noise_is_measured_between_ranks_or_steps(alone, sharded, lora, start, how):
    """Of all weights, no rank has a gradient of its own: it is compared with the previous step's."""
    how, count = replace(how, wants_moments=True), FIRST_SETTLED_STEP + 2
    whole = steps_of(alone, start, replace(how, micro_batches=2 if lora else 1), count=count)
    cut = steps_of(sharded, start, how, count=count)
    one, other = (steps.stats[-1].moments for steps in (whole, cut))
    assert one.consecutive == other.consecutive == (not lora)
    for name in ("local_sqr_norms", "mean_sqr_norm"):
        assert np.allclose(getattr(one, name), getattr(other, name), rtol=1e-3)
    assert_alike(cut, whole)


def test_turns_of_episodes_are_drawn_as_by_the_whole(alone, sharded, start):
    found = []
    for backend in (alone, sharded):
        backend.load(start)
        script = Script(turns(8), follow)
        backend.sample_turns(script, Sampling(1, 12, 1.0, seed=3))
        found.append({stream: rollout.tokens for stream, rollout in script.rollouts.items()})
    assert found[0] == found[1]


def test_a_checkpoint_does_not_tell_that_layers_were_cut(alone, sharded, start, how, tmp_path):
    steps_of(sharded, start, how)
    sharded.save(tmp_path)
    once, again = (steps_of(sharded, tmp_path, how) for _ in range(2))
    for one, other in zip(once.gradients, again.gradients, strict=True):
        assert all(torch.equal(values, other[name]) for name, values in one.items())
    assert_alike(once, steps_of(alone, tmp_path, how))


@pytest.mark.parametrize(("lora", "dtype"), [(False, "bfloat16")], indirect=True)
def test_pieces_in_bfloat16_are_stepped_in_float32_and_saved_as_whole_weights(
    alone, sharded, start, how, tmp_path
):
    alone.load(start)
    sharded.load(start)
    samples = as_samples(draw(alone, PROMPTS), drift=0.3)
    found = [gradient_of(each, samples, PPO, how) for each in (sharded, alone)]
    gradient, wanted = (torch.cat([g.flatten() for g in each.values()]) for each in found)
    assert (gradient - wanted).norm() < 0.03 * wanted.norm()  # of eight bits, added up in another order
    for name in ("cut", "whole"):
        (tmp_path / name).mkdir()
    sharded.save(tmp_path / "cut")
    once, again = (steps_of(sharded, tmp_path / "cut", how, count=1).gradients[0] for _ in range(2))
    assert all(torch.equal(values, again[name]) for name, values in once.items())
    alone.load(tmp_path / "cut")
    alone.save(tmp_path / "whole")
    for path in (path for path in (tmp_path / "cut").rglob("*") if path.is_file()):
        assert path.read_bytes() == (tmp_path / "whole" / path.relative_to(tmp_path / "cut")).read_bytes()


@contextmanager
def full(module: Any, *, forward: bool, times: int) -> Iterator[list[int]]:
    """Run out of memory in a layer of this rank, so many times."""
    failed: list[int] = []

    def fail(*_: Any) -> None:
        if len(failed) < times:
            failed.append(1)
            raise MemoryError

    register = module.register_forward_pre_hook if forward else module.register_full_backward_pre_hook
    handle = register(fail)
    try:
        yield failed
    finally:
        handle.remove()


def test_a_rank_that_runs_out_of_memory_while_sampling_leaves_no_other_waiting(alone, sharded, start):
    alone.load(start)
    sharded.load(start)
    with full(sharded.policy.body.layers[1].mlp, forward=True, times=2) as failed:
        drawn = draw(sharded, PROMPTS)
    assert len(failed) == 2
    assert tokens_of(drawn) == tokens_of(draw(alone, PROMPTS))


@pytest.mark.parametrize(("number", "forward"), [(1, True), (2, False), (0, False)])
def test_a_rank_that_runs_out_of_memory_in_a_layer_makes_all_cut_alike(
    alone, sharded, start, how, number, forward
):
    whole = steps_of(alone, start, how)
    sharded.load(start)
    samples = as_samples(draw(sharded, PROMPTS), drift=0.3)
    before = sharded.learner.tokens_at_a_time
    with full(sharded.policy.body.layers[number].mlp, forward=forward, times=1) as failed:
        gradient = gradient_of(sharded, samples, Loss("ppo", FullOnRankOne(100)), how)
    assert failed
    assert sharded.learner.tokens_at_a_time < before
    for name, values in whole.gradients[0].items():
        assert torch.allclose(gradient[name], values * 10, rtol=1e-4, atol=1e-6)
    assert_alike(steps_of(sharded, start, how), whole)


def test_another_rank_that_does_not_fit_makes_all_cut_alike(alone, sharded, start, how):
    sharded.load(start)
    samples = as_samples(draw(sharded, PROMPTS), drift=0.3)
    with pytest.raises(BackendMemoryError, match="one sequence of"):
        sharded.update(samples, Loss("ppo", FullOnRankOne(0)), how)
    assert_alike(steps_of(sharded, start, how), steps_of(alone, start, how))


@pytest.mark.parametrize(("fail", "kind"), [(fail_elsewhere, RunFailedError), (fail_here, ZeroDivisionError)])
def test_an_error_between_two_passes_of_a_rank_is_raised_on_all(alone, sharded, start, how, fail, kind):
    sharded.load(start)
    samples = as_samples(draw(sharded, PROMPTS))
    with pytest.raises(kind, match="a loss of mine"):
        sharded.update(samples, Loss("ppo", partial(fail, os.getpid())), how)
    assert_alike(steps_of(sharded, start, how), steps_of(alone, start, how))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shard": True}, 'shard: needs several devices; set devices = 2 or more, or "all"'),
        ({"shard": True, "devices": 2, "quantization": "4bit"}, "devices: quantized weights are trained on"),
    ],
)
def test_what_cannot_be_cut_is_refused(model, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_backend(model, **options)


def test_a_model_without_repeated_layers_is_refused(tmp_path):
    model = save_tiny_model(tmp_path, hidden=32, context=64, layers=1)
    with pytest.raises(ConfigError, match=r"\.shard: .* has no list of layers that could be cut; set it to"):
        open_backend(model, devices=2, shard=True)
