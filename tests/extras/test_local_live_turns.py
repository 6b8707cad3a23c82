"""Turns of a model that join others while these are sampled: the same draws, exact log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.backends import Optimization, Sampling
from retrain.backends.local.policy import LocalBackend
from retrain.base.rollouts import FirstTurn, NextTurn, Prompt, Rollout, TrainingSample
from tests.extras.local_policies import loss_named, open_backend, stir
from tests.extras.tiny_models import save_tiny_model
from tests.feeds import Script

pytestmark = pytest.mark.extras
HOW = Sampling(group_size=1, max_tokens=12, temperature=1.0, seed=3)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    backend = open_backend(save_tiny_model(tmp_path / "model", hidden=32, context=96))
    stir(backend)
    return backend


def turns(count: int) -> dict[int, FirstTurn]:
    return {10 * n: FirstTurn(Prompt(n, "1" * (1 + n % 3) + "=", ""), 2 + n) for n in range(count)}


def follow(stream: int, rollout: Rollout) -> NextTurn | None:
    """Ask for three turns, of which only the first one's length depends on the episode."""
    return NextTurn(rollout, (("user", "no 3"),), 5) if len(rollout.given) < 2 else None


@pytest.mark.parametrize("cells", [70, 10**6])  # the first sends rows back to wait
@pytest.mark.parametrize("joins", [True, False])  # the second: a model whose rows begin together
def test_a_turn_draws_the_same_whichever_are_sampled_beside_it(
    backend: LocalBackend, cells: int, joins: bool
) -> None:
    if not joins:
        backend.sampler.windows = None
    backend.sampler.budgets["sample"] = cells
    together = Script(turns(8), follow)
    backend.sample_turns(together, HOW)
    assert len(together.rollouts) == 24
    for stream, turn in turns(8).items():
        alone = Script({stream: turn}, follow)
        backend.sample_turns(alone, HOW)
        for number, rollout in alone.rollouts.items():
            assert rollout.tokens == together.rollouts[number].tokens
            assert np.allclose(rollout.logprobs, together.rollouts[number].logprobs, atol=1e-5)


def test_turns_that_come_and_go_are_trained_with_the_log_probabilities_that_they_were_drawn_with(
    backend: LocalBackend,
) -> None:
    feed = Script(turns(8), follow)
    backend.sample_turns(feed, HOW)
    assert [stream for stream, _ in feed.answers] != sorted(stream for stream, _ in feed.answers)
    whole = [feed.rollouts[10 * n + 2] for n in range(8)]
    count = sum(len(one.tokens) for one in whole)
    samples = [TrainingSample(one, np.ones(len(one.tokens)), 1.0 / count) for one in whole]
    stats = backend.update(samples, loss_named("importance_sampling"), Optimization(lr=1e-3))
    assert stats.loss == pytest.approx(-1.0, rel=1e-4)  # every ratio is 1


@contextmanager
def room_for(backend: LocalBackend, most: int) -> Iterator[None]:
    """Let memory suffice for so many rows at a time."""

    def small(module: torch.nn.Module, arguments: object, named: dict[str, torch.Tensor]) -> None:
        if len(named["input_ids"]) > most:
            raise MemoryError("too many rows")

    hook = backend.policy.body.register_forward_pre_hook(small, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def test_turns_that_do_not_fit_in_memory_together_draw_the_same_in_parts(backend: LocalBackend) -> None:
    expected, parts = Script(turns(8), follow), Script(turns(8), follow)
    backend.sample_turns(expected, HOW)
    with room_for(backend, 4):
        backend.sample_turns(parts, HOW)
    assert {n: one.tokens for n, one in parts.rollouts.items()} == {
        n: one.tokens for n, one in expected.rollouts.items()
    }


def test_an_evaluation_that_does_not_fit_in_memory_leaves_training_its_budget(backend: LocalBackend) -> None:
    before = dict(backend.sampler.budgets)
    with room_for(backend, 4):
        backend.sample_turns(Script(turns(8), follow), replace(HOW, evaluates=True))
    assert backend.sampler.budgets["evaluate"] < before["evaluate"]
    assert backend.sampler.budgets["sample"] == before["sample"]


def test_a_turn_without_room_and_one_that_is_too_long_are_answered_so(backend: LocalBackend) -> None:
    backend.text.end_ids = ()

    def full(stream: int, rollout: Rollout) -> NextTurn:
        return NextTurn(rollout, (("user", "3" * (60 if stream == 0 else 200)),), 50)

    feed = Script({0: FirstTurn(Prompt(0, "1" * 40, ""), 5), 10: FirstTurn(Prompt(1, "1", ""), 5)}, full)
    feed2 = Script({0: FirstTurn(Prompt(0, "1" * 200, ""), 5)})
    backend.sample_turns(feed, HOW)
    backend.sample_turns(feed2, HOW)
    assert dict(feed.answers)[1] is None
    assert "an observation has 200 tokens" in str(dict(feed.answers)[11])
    assert str(dict(feed2.answers)[0]).startswith("prompt 0 has 200 tokens, which leaves no room")
