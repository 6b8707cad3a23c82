"""What the tinker backend decides before it talks to anybody: options, losses, datums, permits."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import connect as numpy_policy
from retrain.backends.numpy.gru import loss_gradient
from retrain.backends.objective import RatioCap
from retrain.backends.tinker import advise, check, check_options, connect
from retrain.backends.tinker.wire import ApiLoss, Linear, api_loss, loss_inputs
from retrain.base.distribution import install_command
from retrain.base.errors import ConfigError, NonFiniteError, RunFailedError
from retrain.base.event_loop import in_thread
from retrain.base.rollouts import Loss, LossTerms, Prompt, Rollout, TrainingSample
from retrain.config.schema import Config, ModelSection, TrainingSection
from retrain.plugins.losses import cispo, gspo, importance_sampling, ppo
from retrain.plugins.tasks import Task

GSPO = ApiLoss("gspo", {})


def sample(
    tokens: tuple[int, ...] = (7, 8, 9),
    logprobs: tuple[float, ...] = (-1.0, -2.0, -3.0),
    advantages: tuple[float, ...] = (0.5, 1.0, -1.0),
    weight: float = 0.1,
) -> TrainingSample:
    rollout = Rollout(Prompt(3, "ab", "c"), "", tokens, np.array(logprobs), ("",) * len(tokens), False)
    return TrainingSample(rollout, np.array(advantages), weight)


def test_a_datum_is_shifted_by_one_and_silent_on_the_prompt() -> None:
    inputs = loss_inputs((5, 6), sample(), GSPO)
    assert inputs["target_tokens"].tolist() == [6, 7, 8, 9]
    assert inputs["logprobs"].tolist() == [0, -1, -2, -3]
    assert inputs["advantages"].tolist() == pytest.approx([0, 0.05, 0.1, -0.1])
    assert inputs["sequence_ratio_mask"].tolist() == [0, 1, 1, 1]
    assert loss_inputs((5, 6), sample(), ApiLoss("cross_entropy", {})).keys() == {"target_tokens", "weights"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": (-1.0, -2.0)},
        {"advantages": (1.0,) * 4},
        {"tokens": (7,)},
        {"tokens": (), "logprobs": (), "advantages": ()},
    ],
)
def test_lengths_that_differ_are_refused_here_because_servers_accept_them(wrong: dict) -> None:
    with pytest.raises(RunFailedError, match="prompt 3 has"):
        loss_inputs((5,), sample(**wrong), GSPO)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": (-1.0, np.nan, -1.0)},
        {"advantages": (np.inf, 0, 0)},
        {"weight": np.nan},
        {"advantages": (1e39, 0, 0), "weight": 1.0},
    ],
)
def test_numbers_that_are_not_finite_as_float32_are_refused(wrong: dict) -> None:
    with pytest.raises(NonFiniteError, match="prompt 3 are not finite"):
        loss_inputs((5,), sample(**wrong), GSPO)


def test_a_prompt_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="no token"):
        loss_inputs((), sample(), GSPO)


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (Loss("importance_sampling", importance_sampling.evaluate), {}),
        (Loss("ppo", ppo.evaluate), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        (
            Loss("ppo", partial(ppo.evaluate, clip_high=0.28)),
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        ),
        (Loss("cispo", cispo.evaluate), {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}),
        (Loss("gspo", gspo.evaluate), {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
    ],
)
def test_clip_distances_become_absolute_bounds(loss: Loss, config: dict[str, float]) -> None:
    assert api_loss(loss) == ApiLoss(loss.name, pytest.approx(config))


def test_the_api_computes_neither_our_own_losses_nor_capped_ratios() -> None:
    assert api_loss(Loss("my.loss", ppo.evaluate)) is None
    assert api_loss(Loss("ppo", RatioCap(2.0).limit(ppo.evaluate), is_capped=True)) is None


@pytest.mark.parametrize("name", ["ppo", "importance_sampling", "cispo", "gspo"])
def test_a_weight_inside_the_advantages_is_a_weight_of_the_loss(name: str) -> None:
    evaluate = {"ppo": ppo, "importance_sampling": importance_sampling, "cispo": cispo, "gspo": gspo}[
        name
    ].evaluate
    random = np.random.default_rng(0)
    new, old, advantages = random.normal(size=(3, 12))
    weights = np.repeat(random.random(3), 4)
    sequence = np.repeat(np.arange(3), 4)
    outside, inside = (
        evaluate(new, old, advantages, sequence),
        evaluate(new, old, weights * advantages, sequence),
    )
    np.testing.assert_allclose(inside.value, weights * outside.value)
    np.testing.assert_allclose(inside.slope, weights * outside.slope)


def test_the_api_computes_gspo_for_equal_advantages_within_a_rollout_only() -> None:
    loss = Loss("gspo", gspo.evaluate)
    assert api_loss(loss, [sample(advantages=(1.0, 1.0, 1.0))]) is not None
    assert api_loss(loss, [sample()]) is None


def test_options_out_of_range_or_misspelt_are_named() -> None:
    wrong = {"tokeniser": "x", "beta1": 1.0, "requests_at_once": 2.5, "call_timeout_s": True}
    problems = check_options({**wrong, "system_prompt": "Count."})
    assert [problem.split(":")[0] for problem in problems] == [*wrong, "system_prompt"]
    assert "did you mean 'tokenizer'" in problems[0]


def test_what_would_stop_a_run_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    problems = [str(problem) for problem in check(Config(), Task((), (), "", 0))]
    for part in ("TINKER_API_KEY", "[model].model"):
        assert any(part in problem for problem in problems)


def test_a_temperature_at_which_the_api_does_not_score_is_warned_of() -> None:
    (line,) = advise(Config(training=TrainingSection(temperature=0.7)))
    assert "training.temperature = 1.0 keeps them exact" in line
    assert advise(Config(training=TrainingSection(temperature=1.0))) == []


def test_a_run_that_the_api_can_do_has_no_problem_but_a_missing_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    assert all(
        install_command("tinker") in problem.what
        for problem in check(Config(model=ModelSection(model="some/model")), Task((), (), "", 0))
    )


def test_a_missing_key_is_an_error_before_anything_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    with pytest.raises(ConfigError, match="set the environment variable TINKER_API_KEY"):
        connect(BackendSpec(seed=0, model="some/model"))


def test_a_late_result_that_nobody_wants_is_taken_back_while_the_loop_is_busy() -> None:
    may_come, taken_back = threading.Event(), threading.Event()

    async def check() -> None:
        came = in_thread(may_come.wait, unwanted=lambda _: taken_back.set())
        came.cancel()
        may_come.set()
        assert taken_back.wait(60)  # and the loop does not turn

    asyncio.run(check())


def test_the_entropy_bonus_is_estimated_from_sampled_tokens() -> None:
    backend = numpy_policy(BackendSpec(seed=1, alphabet="0123456789+="))
    backend.weights.flat[:] *= 3
    groups = backend.sample([Prompt(n, f"{n}=", "") for n in range(8)], Sampling(64, 8, 1.0))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    count = sum(len(rollout.tokens) for rollout in rollouts)
    samples = [
        TrainingSample(one, np.zeros(len(one.tokens)), 0.0, entropy_weight=1 / count) for one in rollouts
    ]
    prompts = [backend.characters.encode(one.prompt.text) for one in rollouts]
    loss, how = Loss("ppo", ppo.evaluate), Optimization(0.0, entropy_bonus=0.5)
    totals, exact = loss_gradient(backend.weights, backend.weights, prompts, samples, loss, how)
    scored = np.concatenate([one.logprobs for one in rollouts])
    linear = Linear.of(samples, loss, how, scored, None)
    api = Loss("cross_entropy", lambda now, _, weights, __: LossTerms(-weights * now, -weights, weights > 9))
    _, estimate = loss_gradient(
        backend.weights, backend.weights, prompts, linear.samples, api, Optimization(0.0)
    )
    assert linear.value == pytest.approx(totals.loss, rel=0.01)
    length = np.linalg.norm(exact.flat)
    assert np.linalg.norm(estimate.flat - exact.flat) < 0.3 * length  # of 4,000 tokens' noise
    assert exact.flat @ estimate.flat > 0.95 * length * np.linalg.norm(estimate.flat)
