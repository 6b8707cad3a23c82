"""What the loss is divided by: the published formulas, tied groups included, or groups with a signal."""

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import connect
from retrain.backends.numpy.gru import loss_gradient
from retrain.backends.objective import split_by_group
from retrain.base.errors import ConfigError, RunFailedError
from retrain.base.rollouts import LossTerms, Prompt, TrainingSample
from retrain.config.keys import CURRENT
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from retrain.trainer.batch import BoundAlgorithm, ScoredBatch
from tests.long.test_numpy_backend_learning import perturbed_weights
from tests.trainer.test_trainer import make_run, train, with_

MAX_TOKENS = 7
BETA, BONUS = 0.3, 0.05
REWARDS = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, np.nan, 1.0], [0.0, 0.0, 0.0]])
ADVANTAGES = np.array([[2, -1, -1], [0, 0, 0], [-1.5, 0, 1.5], [0, 0, 0]]) / 3  # reward - mean, by hand


def algorithm_of(normalization, *, kl_coef=0.0, entropy_bonus=0.0):
    raw = {
        "training": {"max_tokens": MAX_TOKENS, "entropy_bonus": entropy_bonus},
        "algorithm": {"advantage_mode": "grpo", "loss_normalization": normalization, "kl_coef": kl_coef},
    }
    return BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch_of(REWARDS))


def batch_of(rewards):
    backend = connect(BackendSpec(seed=3, alphabet="ab=", options={"hidden": 5, "embedding": 3}))
    prompts = [Prompt(number, text, "") for number, text in enumerate(["ab=", "b=", "abba=", "a="])]
    return ScoredBatch(backend.sample(prompts, Sampling(3, MAX_TOKENS, 1.0)), rewards)


def test_completions_that_were_cut_off_enter_the_baseline_but_not_the_loss():
    batch = batch_of(REWARDS)
    raw = {
        "training": {"max_tokens": MAX_TOKENS, "entropy_bonus": BONUS},
        "algorithm": {"advantage_mode": "grpo", "mask_truncated": True},
    }
    algorithm = BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch)
    samples = algorithm.transform(batch, algorithm.estimate(batch), 0.0)
    kept = [(a, rollout) for a, rollout in rollouts_of(batch) if not rollout.truncated]
    assert 0 < len(kept) < len(rollouts_of(batch))
    assert [sample.rollout for sample in samples] == [rollout for _, rollout in kept]
    assert np.allclose([sample.advantages[0] for sample in samples], [advantage for advantage, _ in kept])
    tokens = sum(len(rollout.tokens) for _, rollout in kept)
    assert {sample.token_weight for sample in samples} == {1 / tokens}


def gradient_of(samples, loss, how):
    """The gradient of a step's loss at weights away from the sampler's, in one part."""
    characters = connect(
        BackendSpec(seed=0, alphabet="ab=", options={"hidden": 5, "embedding": 3})
    ).characters
    prompts = [characters.encode(sample.rollout.prompt.text) for sample in samples]
    reference = perturbed_weights(seed=5)
    return loss_gradient(perturbed_weights(), reference, prompts, samples, loss, how)[1].flat


def rollouts_of(batch):
    """(advantage, rollout) of every scored rollout of a batch, tied or not."""
    pairs = zip(ADVANTAGES.ravel(), batch.rollouts, strict=True)
    return [pair for pair, reward in zip(pairs, batch.rewards.ravel(), strict=True) if np.isfinite(reward)]


def published(name, batch, loss, *, beta, bonus):
    """The gradient of TRL's loss: each rollout's sums over its tokens, then the formula of the loss_type."""
    policy, kl, entropy, lengths = [], [], [], []
    for advantage, rollout in rollouts_of(batch):
        one, nothing = np.full(len(rollout.tokens), advantage), np.zeros(len(rollout.tokens))
        policy.append(gradient_of([TrainingSample(rollout, one, 1.0)], loss, Optimization(0.0)))
        kl.append(gradient_of([TrainingSample(rollout, nothing, 1.0)], loss, Optimization(0.0, kl_coef=1.0)))
        alone = Optimization(0.0, entropy_bonus=1.0)
        entropy.append(-gradient_of([TrainingSample(rollout, nothing, 0.0, 0, 1.0)], loss, alone))
        lengths.append(len(rollout.tokens))
    sums = np.array(policy) + beta * np.array(kl)
    mean_entropy = np.sum(entropy, axis=0) / sum(lengths)
    loss_by_type = {
        "token": sums.sum(axis=0) / sum(lengths),  # dapo
        "sequence": (sums / np.array(lengths)[:, None]).mean(axis=0),  # grpo
        "constant": sums.sum(axis=0) / (len(lengths) * MAX_TOKENS),  # dr_grpo
    }
    return loss_by_type[name] - bonus * mean_entropy


@pytest.mark.parametrize(("beta", "bonus"), [(0.0, 0.0), (BETA, 0.0), (0.0, BONUS), (BETA, BONUS)])
@pytest.mark.parametrize("name", ["token", "sequence", "constant"])
def test_a_step_with_ties_has_the_gradient_of_the_published_formula(name, beta, bonus):
    batch, algorithm = batch_of(REWARDS), algorithm_of(name, kl_coef=beta, entropy_bonus=bonus)
    advantages = algorithm.estimate(batch)
    assert np.allclose(advantages, ADVANTAGES)
    samples = algorithm.transform(batch, advantages, 0.0)
    how = Optimization(0.0, entropy_bonus=bonus, kl_coef=beta)
    wanted = published(name, batch, algorithm.loss, beta=beta, bonus=bonus)
    assert np.linalg.norm(wanted) > 1e-3
    for parts in (1, 2, 4):
        found = sum(gradient_of(part, algorithm.loss, how) for part in split_by_group(samples, parts))
        assert np.allclose(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["token", "sequence", "constant"])
def test_ties_do_not_amplify_the_other_groups(name):
    """With as many tied groups again, every weight is half as large; with informative_, it stays."""

    def weights(normalization, ties):
        batch, algorithm = batch_of(REWARDS), algorithm_of(normalization)
        twice = ScoredBatch(
            [*batch.groups[:1], *batch.groups[:1] * ties], np.array([[1.0, 0, 0], *[[1] * 3] * ties])
        )
        return [s.token_weight for s in algorithm.transform(twice, algorithm.estimate(twice), 0.0)]

    assert weights(name, 1) == pytest.approx([w / 2 for w in weights(name, 0)])
    assert weights(f"informative_{name}", 3) == weights(f"informative_{name}", 0) == weights(name, 0)


def test_tied_groups_cost_no_work_where_they_have_no_gradient():
    batch = batch_of(REWARDS)
    for how, count in (({}, 5), ({"kl_coef": 0.1}, 11), ({"entropy_bonus": 0.1}, 11)):
        algorithm = algorithm_of("token", **how)
        assert len(algorithm.transform(batch, algorithm.estimate(batch), 0.0)) == count


def test_a_batch_of_ties_still_feels_the_entropy_bonus_and_the_kl_term(tmp_path):
    raw = with_("reward", reward="tests.plugins.always_right")
    raw["training"] = {**raw["training"], "entropy_bonus": 0.1}
    raw["algorithm"] = {"kl_coef": 0.5}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert {row["zero_signal_group_fraction"] for row in rows} == {1.0}
    assert all(row["grad_norm"] > 0 for row in rows)
    assert rows[-1]["reference_kl"] > 0


def test_informative_groups_alone_are_what_those_of_that_name_divide_by():
    batch, algorithm = batch_of(REWARDS), algorithm_of("informative_token", kl_coef=BETA, entropy_bonus=BONUS)
    samples = algorithm.transform(batch, algorithm.estimate(batch), 0.0)
    with_signal = [batch.groups[0].rollouts[i] for i in range(3)] + [
        batch.groups[2].rollouts[i] for i in (0, 2)
    ]
    assert [sample.rollout for sample in samples] == with_signal
    tokens = sum(len(rollout.tokens) for rollout in with_signal)
    assert {(s.token_weight, s.bonus_weight) for s in samples} == {(1 / tokens, 1 / tokens)}


def test_another_denominator_is_another_experiment():
    names = ("token", "sequence", "constant")
    raw = [
        {"algorithm": {"loss_normalization": f"{scope}{name}"}}
        for name in names
        for scope in ("", "informative_")
    ]
    hashes = {plan_runs(parse({**one, "training": {"seed": 0}}, "c")).config_hash for one in raw}
    assert len(hashes) == 6


def test_a_new_run_says_what_its_keys_mean(tmp_path):
    files = make_run(tmp_path / "r", with_("training", max_steps=1))
    assert worker.read_run(files).algorithm.loss_normalization == "token"
    files.run_toml.write_text(files.run_toml.read_text().replace(f"version = {CURRENT}\n", ""))
    with pytest.raises(ConfigError, match="was changed since it was planned"):
        worker.read_run(files)


def gives_nothing(*given):
    pass


def gives_one(*given):
    return np.ones(1)


def gives_nan(rollout, advantage, progress):
    return np.full(len(rollout.tokens), np.nan)


@pytest.mark.parametrize(
    ("transform", "says"), [("nothing", r"shape \(\)"), ("one", r"shape \(1,\)"), ("nan", "nan; ")]
)
def test_a_transform_that_does_not_give_each_token_an_advantage_is_named(transform, says):
    raw = {"algorithm": {"transform_mode": f"{__name__}.gives_{transform}"}}
    batch = batch_of(REWARDS)
    algorithm = BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch)
    with pytest.raises(RunFailedError, match=f"gives_{transform}' returned {says}"):
        algorithm.transform(batch, ADVANTAGES, 0.0)


def one_term_only(logprobs, sampler_logprobs, advantages, sequence):
    return LossTerms(np.ones(1), -advantages, np.zeros(1, dtype=np.bool_))


@pytest.mark.parametrize(
    ("loss", "says"), [("gives_nothing", "a NoneType; needs .*LossTerms"), ("one_term_only", "another shape")]
)
def test_a_loss_that_does_not_return_terms_for_each_token_is_named(loss, says):
    raw = {"algorithm": {"loss_mode": f"{__name__}.{loss}", "ratio_cap": 2.0}}
    algorithm = BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch_of(REWARDS))
    zeros = np.zeros(3)
    with pytest.raises(RunFailedError, match=f"{loss}' returned .*{says}"):
        algorithm.loss.evaluate(zeros, zeros, zeros, np.zeros(3, dtype=np.int64))
