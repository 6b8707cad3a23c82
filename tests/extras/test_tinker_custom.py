"""Losses that the Tinker API does not compute: by their slopes, with the gradient of the local backend."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from retrain.backends import BackendSpec, Optimization, UpdateStats
from retrain.backends.numpy.gru import loss_gradient
from retrain.backends.objective import RatioCap
from retrain.backends.tinker.wire import ApiLoss, Linear, loss_inputs
from retrain.base import registry
from retrain.base.rollouts import Loss, TrainingSample
from tests.backends.test_tinker_parts import sample
from tests.extras.test_tinker_backend import HOW, PROMPTS, STEP, Awaited, during, loss_of, samples_of
from tests.extras.test_tinker_backend import place as place
from tests.extras.test_tinker_backend import server as server
from tests.extras.test_tinker_backend import spec as spec
from tests.extras.test_tinker_backend import tokenizer as tokenizer
from tests.tinker_api.policies import Policy
from tests.tinker_api.running import RunningServer
from tests.tinker_api.sdk import CALLS_SDK
from tests.tinker_api.wire import Datum, ForwardBackward

pytestmark = CALLS_SDK
CAPS = (None, RatioCap(1.1), RatioCap(1.1, "sequence", "mask"))


def gradient(policy: Policy, prompts: list[tuple[int, ...]], data: list[TrainingSample], loss: str) -> bytes:
    """Have the server of the tests differentiate; return its answer."""
    form = ApiLoss("cross_entropy", {})
    wire = []
    for prompt, one in zip(prompts, data, strict=True):
        inputs = loss_inputs(prompt, one, form)
        wire.append(Datum([*prompt, *one.rollout.tokens[:-1]], inputs))
    return policy.forward_backward(ForwardBackward("m", 1, "cross_entropy", {}, wire, loss == "forward"))


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize("name", ["ppo", "importance_sampling", "cispo", "gspo"])
def test_a_linearized_loss_has_the_gradient_of_the_local_backend(
    name: str, kl_coef: float, cap: RatioCap | None
) -> None:
    if name == "gspo" and cap is not None and cap.scope == "token":
        return
    random, policy, base = np.random.default_rng(1), Policy("01234=", 3), Policy("01234=", 4)
    prompts = [(1, 2), (3,), (0, 5)]
    data = [
        replace(
            sample(advantages=random.normal(size=3)),
            token_weight=0.1 * (1 + number),
            rollout=replace(sample().rollout, tokens=(4, number, 2), logprobs=random.normal(-1.7, 0.3, 3)),
        )
        for number in range(3)
    ]
    evaluate = registry.find_plugin("losses", name)
    loss = Loss(name, evaluate if cap is None else cap.limit(evaluate), is_capped=cap is not None)
    how = Optimization(0.1, kl_coef=kl_coef)
    totals, local = loss_gradient(policy.weights, base.weights, prompts, data, loss, how)

    def scored(of: Policy) -> np.ndarray:
        ended = [replace(one, advantages=np.zeros(3)) for one in data]
        answer = pb.ForwardBackwardOutput.FromString(gradient(of, prompts, ended, "forward"))
        (record,) = answer.loss_fn_outputs
        flat = np.frombuffer(record.fields["logprobs"].data, np.float32).astype(float)
        offsets = np.frombuffer(record.fields["logprobs"].offsets, np.int64) // 4
        return np.concatenate([flat[end - 3 : end] for end in offsets[1:]])

    near = scored(base) if kl_coef else None
    linear = Linear.of(data, loss, how, scored(policy), near)
    gradient(policy, prompts, linear.samples, "backward")
    assert linear.value == pytest.approx(totals.loss, rel=1e-5)
    np.testing.assert_allclose(policy.gradient.flat, local.flat, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_an_update_by_slopes_equals_that_of_the_built_in_loss(spec: BackendSpec, name: str) -> None:
    evaluate = registry.find_plugin("losses", name)

    data: list[TrainingSample] = []

    def story(loss: Loss) -> Callable[[Awaited], Coroutine[Any, Any, list[UpdateStats]]]:
        async def update(backend: Awaited) -> list[UpdateStats]:
            data.extend([] if data else samples_of(await backend.sample(PROMPTS, HOW)))
            return [await backend.update(data, loss, replace(STEP, lr=0.05)) for _ in range(3)]

        return update

    built_in = during(spec, story(Loss(name, evaluate)))
    ours = during(spec, story(Loss("my_losses.mine", evaluate)))
    for one, other in zip(built_in, ours, strict=True):
        assert other.loss == pytest.approx(one.loss, abs=1e-4)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
        assert other.clip_fraction == pytest.approx(one.clip_fraction, abs=0.03)
        assert other.approx_kl == pytest.approx(one.approx_kl, abs=1e-4)


def test_the_kl_term_is_to_the_base_model(spec: BackendSpec, server: RunningServer) -> None:
    data: list[TrainingSample] = []
    before = server.stats()["requests"]
    how = replace(STEP, lr=0.05, kl_coef=0.2)

    async def update(backend: Awaited) -> list[UpdateStats]:
        data.extend(samples_of(await backend.sample(PROMPTS, HOW)))
        loss = Loss("ppo", registry.find_plugin("losses", "ppo"))
        return [await backend.update(data, loss, how) for _ in range(3)]

    found = during(replace(spec, seed=0), update)  # the server's base model: a model of seed 0 begins there
    distances = [stats.reference_kl for stats in found]
    assert distances[0] == pytest.approx(0.0, abs=1e-5)
    assert 1e-3 < distances[1] < distances[2]
    asked = server.stats()["requests"]
    assert asked["create_sampling_session"] == before.get("create_sampling_session", 0) + 1


def test_a_base_model_that_was_lost_is_made_again(spec: BackendSpec, server: RunningServer) -> None:
    async def update(backend: Awaited) -> UpdateStats:
        data = samples_of(await backend.sample(PROMPTS[:2], HOW))
        loss, how = Loss("ppo", registry.find_plugin("losses", "ppo")), replace(STEP, kl_coef=0.2)
        await backend.update(data, loss, how)
        server.forget()
        return await backend.update(data, loss, how)

    assert during(replace(spec, seed=0), update).reference_kl > 0


def test_an_entropy_bonus_spreads_a_sharp_policy(spec: BackendSpec) -> None:
    ppo = loss_of("ppo")

    async def step(backend: Awaited, advantage: float, bonus: float) -> float:
        """Reward each token 0, and return the entropy of what was sampled before."""
        data = samples_of(await backend.sample(PROMPTS, replace(HOW, group_size=16)))
        data = [replace(one, advantages=advantage * (np.array(one.rollout.tokens) == 0)) for one in data]
        return (await backend.update(data, ppo, replace(STEP, lr=0.005, entropy_bonus=bonus))).entropy

    async def story(backend: Awaited) -> None:
        entropy = begun = await step(backend, 1.0, 0.0)
        for _ in range(50):  # until sharp, but not so sharp that no other token is drawn
            if (entropy := await step(backend, 1.0, 0.0)) < begun - 0.4:
                break
        assert entropy < begun - 0.4
        sharp = entropy
        for _ in range(50):
            if (entropy := await step(backend, 0.0, 1.0)) > sharp + 0.3:
                break
        assert entropy > sharp + 0.3

    during(spec, story)
