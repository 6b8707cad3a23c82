"""The numpy backend's gradients are exact, its steps are refused when not finite, and it learns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import connect
from retrain.backends.numpy.gru import Adam, Weights, clip_by_norm, initial_weights, loss_gradient, pack
from retrain.backends.numpy.policy import NumpyBackend
from retrain.backends.objective import scale_to_step, split_by_group
from retrain.base.errors import NonFiniteError
from retrain.base.rollouts import Loss, LossTerms, Prompt, Rollout, TrainingSample
from retrain.control.rules.scaling import GradientNoiseScale
from retrain.plugins.advantages import grpo, maxrl
from retrain.plugins.losses import gspo, importance_sampling, ppo
from retrain.plugins.rewards import partial
from retrain.plugins.tasks import copy

LOSSES = [Loss("ppo", ppo.evaluate), Loss("is", importance_sampling.evaluate), Loss("gspo", gspo.evaluate)]
PPO = LOSSES[0]


def nothing(logprobs, sampler_logprobs, advantages, sequence):
    zeros = np.zeros(len(logprobs))
    return LossTerms(zeros, zeros, zeros > 0)


NOTHING = Loss("nothing", nothing)
PROMPTS = [Prompt(0, "ab=", ""), Prompt(1, "", ""), Prompt(2, "abba=", "")]  # one of them empty
TEMPERATURE = 0.8


def policy(**options: object) -> NumpyBackend:
    return connect(BackendSpec(seed=0, alphabet="ab=", options={"hidden": 5, "embedding": 3, **options}))


def samples_of(backend: NumpyBackend, temperature: float = TEMPERATURE) -> list[TrainingSample]:
    """Sample groups of four, with token advantages and weights drawn at random."""
    random = np.random.default_rng(1)
    groups = backend.sample(PROMPTS, Sampling(4, 6, temperature))
    return [
        TrainingSample(r, random.normal(size=len(r.tokens)), random.random(), number)
        for number, group in enumerate(groups)
        for r in group.rollouts
    ]


def perturbed_weights(seed: int = 2) -> Weights:
    """Weights far enough from the sampler's that some ratios are clipped."""
    random = np.random.default_rng(seed)
    weights = initial_weights(3, 3, 5, "float64", random)
    weights.flat += 0.4 * random.normal(size=weights.flat.size)
    return weights


def prompt_ids(samples: list[TrainingSample]) -> list[tuple[int, ...]]:
    return [tuple("=ab".index(character) for character in s.rollout.prompt.text) for s in samples]


def gradient_of(weights: Weights, samples: list[TrainingSample], loss: Loss, how: Optimization):
    return loss_gradient(weights, perturbed_weights(seed=8), prompt_ids(samples), samples, loss, how)


def numerical_gradient(weights: Weights, samples: list[TrainingSample], loss: Loss, how: Optimization):
    gradient = np.empty_like(weights.flat)
    for index, kept in enumerate(weights.flat.tolist()):
        ends = []
        for shift in (1e-6, -1e-6):
            weights.flat[index] = kept + shift
            ends.append(gradient_of(weights, samples, loss, how)[0].loss)
        weights.flat[index] = kept
        gradient[index] = (ends[0] - ends[1]) / 2e-6
    return gradient


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_the_gradient_of_every_weight_is_that_of_finite_differences(loss):
    weights, samples = perturbed_weights(), samples_of(policy(dtype="float64"))
    how = Optimization(1e-2, entropy_bonus=0.3, kl_coef=0.4, temperature=TEMPERATURE)
    _, gradient = gradient_of(weights, samples, loss, how)
    assert np.abs(gradient.flat).max() > 0.1
    np.testing.assert_allclose(gradient.flat, numerical_gradient(weights, samples, loss, how), atol=2e-8)


def test_a_batch_has_the_sum_of_its_rollouts_losses_and_gradients():
    weights, samples = perturbed_weights(), samples_of(policy(dtype="float64"))
    how = Optimization(1e-2, entropy_bonus=0.1, kl_coef=0.1, temperature=TEMPERATURE)
    together, gradient = gradient_of(weights, samples, PPO, how)
    alone = [gradient_of(weights, [s], PPO, how) for s in samples]
    assert together.loss == pytest.approx(sum(totals.loss for totals, _ in alone), abs=1e-12)
    np.testing.assert_allclose(gradient.flat, sum(own.flat for _, own in alone), atol=1e-12)


def test_packing_puts_longest_first_and_keeps_only_living_rows():
    packed = pack([[7], [4, 5, 6], [8, 9]])
    assert packed.order.tolist() == [1, 2, 0]
    assert packed.offsets == (0, 3, 5, 6)
    assert packed.inputs[3:].tolist() == [4, 8, 5]  # what leads to the states of times 1 and 2
    assert packed.last().tolist() == [2, 5, 4]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("float64", 1e-13)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_training_sees_the_samplers_own_log_probabilities(dtype, tolerance, temperature):
    seen = []

    def recording(logprobs, sampler_logprobs, advantages, sequence):
        seen.append(np.abs(logprobs - sampler_logprobs).max())
        return ppo.evaluate(logprobs, sampler_logprobs, advantages, sequence)

    backend = policy(dtype=dtype, hidden=64)
    for _ in range(5):
        samples = samples_of(backend, temperature)
        backend.update(samples, Loss("ppo", recording), Optimization(1e-2, temperature=temperature))
    assert max(seen) < tolerance


def test_greedy_log_probabilities_are_those_of_temperature_one():
    backend = policy(dtype="float64")
    greedy = [g.rollouts[0] for g in backend.sample(PROMPTS, Sampling(1, 6, 0.0))]
    samples = [TrainingSample(r, np.ones(len(r.tokens)), 1.0) for r in greedy]
    stats = backend.update(samples, LOSSES[1], Optimization(1e-2, temperature=1.0))
    assert stats.loss == pytest.approx(-sum(len(r.tokens) for r in greedy))  # every ratio is 1


def weights_after(micro_batches: int, directory) -> tuple[np.ndarray, object]:
    backend = policy(dtype="float64")
    stats = backend.update(samples_of(backend), PPO, Optimization(1e-2, micro_batches=micro_batches))
    directory.mkdir()
    backend.save(directory)
    with np.load(directory / "policy.npz") as arrays:
        return arrays["weights"], stats


def test_micro_batches_do_not_change_the_step(tmp_path):
    whole, stats = weights_after(1, tmp_path / "whole")
    parts, part_stats = weights_after(3, tmp_path / "parts")
    np.testing.assert_allclose(parts, whole, atol=1e-10)
    assert stats.moments is None
    for field in ("loss", "grad_norm", "entropy", "clip_fraction"):
        assert getattr(part_stats, field) == pytest.approx(getattr(stats, field), abs=1e-12)


def test_moments_are_of_part_means_whose_mean_is_the_steps_gradient():
    backend = policy(dtype="float64", optimizer="sgd")
    same = samples_of(backend)[:4]
    twins = [TrainingSample(s.rollout, s.advantages, s.token_weight, g) for g in (0, 1) for s in same]
    stats = backend.update(twins, PPO, measured(parts=2))
    assert stats.moments.local_sqr_norms.shape == (2, 1)
    assert stats.moments.mean_sqr_norm == pytest.approx([stats.grad_norm**2])
    assert stats.moments.local_sqr_norms[:, 0] == pytest.approx([stats.grad_norm**2] * 2)  # no noise


def test_parts_of_unequal_size_count_by_their_size():
    backend = policy(dtype="float64", optimizer="sgd")
    same = samples_of(backend)[:4]
    triplets = [TrainingSample(s.rollout, s.advantages, s.token_weight, g) for g in (0, 1, 2) for s in same]
    moments = backend.update(triplets, PPO, measured(parts=2)).moments
    assert moments.local_sqr_norms.mean() == pytest.approx(moments.mean_sqr_norm[0])  # no noise


def test_parts_of_unequal_size_estimate_the_truth():
    # A group's gradient: mean (3, 4), variance 2 in each coordinate. Steps of 5 groups in 4 parts.
    rng, noise = np.random.default_rng(0), GradientNoiseScale(0.9999)
    for _ in range(6000):
        groups = rng.normal([3, 4], math.sqrt(2), size=(5, 2)) / 5
        parts = np.array([groups[0], groups[1:3].sum(0), groups[3], groups[4]])
        squares = scale_to_step(np.square(parts).sum(axis=1), [1, 2, 1, 1])
        noise.update(np.array(squares)[:, None], np.array([np.square(groups.sum(0)).sum()]), 1.0)
    assert noise.sqr[0] == pytest.approx(25, rel=0.01)
    assert noise.var[0] == pytest.approx(2 * 2 / 5, rel=0.05)


def test_a_lone_parts_gradient_is_compared_with_the_update_before():
    backend = policy(dtype="float64", optimizer="sgd")
    alone = samples_of(backend)[:4]
    stopped = Optimization(lr=0.0, max_grad_norm=1e9, wants_moments=True)
    first, second = (backend.update(alone, PPO, stopped) for _ in range(2))
    assert first.moments is None
    assert second.moments.consecutive
    both = [second.grad_norm**2] * 2
    assert second.moments.local_sqr_norms[:, 0] == pytest.approx(both)  # the weights stood still
    assert second.moments.mean_sqr_norm == pytest.approx(both[:1])


def test_a_step_of_several_parts_stands_between_lone_ones():
    backend = policy(optimizer="sgd")
    samples = samples_of(backend)
    kinds = [
        (moments := backend.update(samples[:count], PPO, measured(3)).moments) and moments.consecutive
        for count in (4, 12, 4, 4)
    ]
    assert kinds == [None, False, None, True]


def test_a_loaded_policy_remembers_the_lone_gradient(tmp_path):
    stopped, resumed = policy(optimizer="sgd"), policy(optimizer="sgd")
    samples = samples_of(stopped)[:4]
    stopped.update(samples, PPO, measured(1))
    stopped.save(tmp_path)
    resumed.load(tmp_path)
    pair = [backend.update(samples, PPO, measured(1)).moments for backend in (stopped, resumed)]
    assert pair[0].mean_sqr_norm == pair[1].mean_sqr_norm
    assert (pair[0].local_sqr_norms == pair[1].local_sqr_norms).all()


def test_moments_wait_until_adam_knows_its_second_moment_and_are_divided_by_it():
    backend = policy(dtype="float64")
    samples = samples_of(backend)
    told = [backend.update(samples, PPO, measured(3)) for _ in range(6)]
    assert [stats.moments is not None for stats in told] == [False] * 5 + [True]
    # equal gradients would have a norm of 1 in each of the weights that they move
    assert told[5].moments.mean_sqr_norm[0] > 100 * told[5].grad_norm ** 2


def measured(parts: int) -> Optimization:
    return Optimization(1e-2, micro_batches=parts, wants_moments=True)


@pytest.mark.parametrize(("parts", "sizes"), [(1, [5]), (2, [2, 3]), (5, [1] * 5), (9, [1] * 5)])
def test_parts_hold_whole_groups_of_nearly_equal_number(parts, sizes):
    rollout = policy().sample(PROMPTS[:1], Sampling(1, 1, 1.0))[0].rollouts[0]
    samples = [TrainingSample(rollout, np.ones(1), 1.0, number % 5) for number in range(10)]
    cut = split_by_group(samples, parts)
    assert [len({s.group for s in part}) for part in cut] == sizes
    assert [len(part) for part in cut] == [2 * size for size in sizes]


def greedy(backend: NumpyBackend) -> list[tuple[tuple[int, ...], list[float]]]:
    groups = backend.sample(PROMPTS, Sampling(1, 6, 0.0))
    return [(g.rollouts[0].tokens, g.rollouts[0].logprobs.tolist()) for g in groups]


def steep(logprobs, sampler_logprobs, advantages, sequence):
    """A loss that is finite, with a slope that is not."""
    return LossTerms(np.zeros(len(logprobs)), np.full(len(logprobs), np.inf), np.zeros(len(logprobs), bool))


@pytest.mark.parametrize(
    ("loss", "advantage", "cause"),
    [
        (PPO, math.nan, "the loss is nan"),
        (PPO, math.inf, "the loss is "),
        (PPO, 1e300, "the gradient of 'embedding' is not finite"),
        (Loss("steep", steep), 1.0, "the gradient of 'output' is not finite"),
    ],
)
def test_a_step_that_is_not_finite_is_refused_and_names_its_cause(loss, advantage, cause):
    backend = policy()
    before = greedy(backend)
    samples = [
        TrainingSample(s.rollout, np.full(len(s.advantages), advantage), 1.0, s.group)
        for s in samples_of(backend)
    ]
    with pytest.raises(NonFiniteError, match="the optimizer step was not taken") as raised:
        backend.update(samples, loss, Optimization(1e-2))
    assert cause in str(raised.value)
    assert greedy(backend) == before
    assert backend.sample(PROMPTS, Sampling(1, 1, 0.0))[0].rollouts[0].policy_version == 0


def test_weights_that_blew_up_are_noticed_when_sampling():
    backend = policy()
    backend.update(samples_of(backend), PPO, Optimization(lr=1e38))
    with pytest.raises(NonFiniteError, match="lower lr"):
        backend.sample(PROMPTS, Sampling(4, 6, 1.0))


def test_adams_first_step_has_the_learning_rates_size_against_the_gradients_sign():
    weights = np.array([1.0, 2.0, 3.0])
    Adam(weights).step(weights, np.array([5.0, -0.01, 0.0]), lr=0.1)
    assert weights == pytest.approx([0.9, 2.1, 3.0], abs=1e-6)


def test_clipping_keeps_the_direction_and_tells_the_norm_before():
    gradient = np.array([3.0, 4.0])
    assert clip_by_norm(gradient, 1.0) == pytest.approx(5.0)
    assert gradient == pytest.approx([0.6, 0.8])
    assert clip_by_norm(gradient, 2.0) == pytest.approx(1.0)
    assert gradient == pytest.approx([0.6, 0.8])


def first_token_entropy(backend: NumpyBackend) -> float:
    return backend.sample(PROMPTS, Sampling(1, 1, 1.0))[0].rollouts[0].mean_entropy


def favour(backend: NumpyBackend, strength: float, entropy_bonus: float) -> None:
    """Take 40 steps that make token 1 likelier, by `strength`."""
    for _ in range(40):
        samples = [
            TrainingSample(s.rollout, strength * (np.array(s.rollout.tokens) == 1), 0.1, s.group)
            for s in samples_of(backend, 1.0)
        ]
        backend.update(samples, PPO, Optimization(2e-2, entropy_bonus=entropy_bonus))


def test_an_entropy_bonus_alone_flattens_the_policy():
    backend = policy()
    favour(backend, strength=1.0, entropy_bonus=0.0)
    sharp = first_token_entropy(backend)
    favour(backend, strength=0.0, entropy_bonus=1.0)
    assert first_token_entropy(backend) > sharp + 0.2


def test_a_kl_term_alone_leads_back_to_the_policy_before_training():
    backend = policy()
    favour(backend, strength=1.0, entropy_bonus=0.0)
    how = Optimization(2e-2, kl_coef=1.0)
    away = [backend.update(samples_of(backend, 1.0), NOTHING, how).reference_kl for _ in range(60)]
    assert away[0] > 0.3
    assert away[-1] < away[0] / 20


def test_the_policy_before_training_is_known_after_a_resume(tmp_path):
    backend, other = policy(), policy()
    favour(backend, strength=1.0, entropy_bonus=0.0)
    backend.save(tmp_path)
    other.load(tmp_path)
    stats = [b.update(samples_of(b), PPO, Optimization(1e-2, kl_coef=0.5)) for b in (backend, other)]
    assert [s.grad_norm for s in stats] == [stats[0].grad_norm] * 2
    assert stats[0].reference_kl == stats[1].reference_kl > 0


def step(backend: NumpyBackend, prompts: list[Prompt], estimate) -> float:
    groups = backend.sample(prompts, Sampling(16, 4, 1.0))
    rewards = np.array([[partial.score(r.text, r.prompt) for r in g.rollouts] for g in groups])
    advantages = estimate(rewards)
    rollouts: list[tuple[Rollout, float, int]] = [
        (rollout, advantages[number, i], number)
        for number, group in enumerate(groups)
        for i, rollout in enumerate(group.rollouts)
    ]
    weight = 1 / sum(len(rollout.tokens) for rollout, _, _ in rollouts)
    samples = [TrainingSample(r, np.full(len(r.tokens), a), weight, number) for r, a, number in rollouts]
    backend.update(samples, PPO, Optimization(lr=1e-2, entropy_bonus=0.03))
    return float(rewards.mean())


@pytest.mark.parametrize("estimate", [grpo.estimate, maxrl.estimate], ids=["grpo", "maxrl"])
def test_copying_two_symbols_is_learnt_from_rewards_alone(estimate):
    task = copy.build(length=2, base=3, held_out=0, seed=0)
    backend = connect(BackendSpec(seed=0, alphabet=task.alphabet, options={"hidden": 32}))
    rewards = [step(backend, list(task.train), estimate) for _ in range(100)]
    assert rewards[0] < 0.1
    assert np.mean(rewards[-10:]) > 0.8
