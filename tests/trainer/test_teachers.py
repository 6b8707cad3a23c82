"""A teacher's signal: the log-ratio as advantage, or the divergence of whole distributions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from retrain.backends import SELF, BackendSpec, Optimization, Sampling, TeacherSpec
from retrain.backends.numpy import connect
from retrain.backends.numpy.gru import loss_gradient
from retrain.backends.numpy.policy import NumpyBackend
from retrain.backends.objective import jensen_shannon
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Given, Loss, Prompt, Rollout, TrainingSample
from retrain.config.load import parse
from retrain.config.schema import Config, TeacherSection
from retrain.plugins.losses import importance_sampling
from retrain.trainer.batch import BoundAlgorithm, ScoredBatch
from retrain.trainer.teachers import TeacherSignal, as_read

PROMPTS = [Prompt(0, "ab=", "b"), Prompt(1, "", ""), Prompt(2, "abba=", "a")]
LOSS = Loss("is", importance_sampling.evaluate)
TEMPERATURE = 0.8


def policy(seed: int = 0, hidden: int = 5) -> NumpyBackend:
    options = {"hidden": hidden, "embedding": 3, "dtype": "float64"}
    backend = connect(BackendSpec(seed=seed, alphabet="ab=", options=options))
    backend.weights.flat[:] += 0.4 * np.random.default_rng(seed + 5).normal(size=backend.weights.flat.size)
    return backend


def config_of(**teacher: object) -> Config:
    training = {"temperature": TEMPERATURE, "max_steps": 10}
    return parse({"teacher": {"teacher": "self", **teacher}, "training": training}, "t.toml")


def samples_of(backend: NumpyBackend) -> list[TrainingSample]:
    groups = backend.sample(PROMPTS, Sampling(3, 5, TEMPERATURE))
    return [
        TrainingSample(rollout, np.full(len(rollout.tokens), 0.5), 0.1, number)
        for number, group in enumerate(groups)
        for rollout in group.rollouts
    ]


def taught(backend: NumpyBackend, samples: list[TrainingSample], progress: float = 0.0, **teacher: object):
    signal = TeacherSignal(config_of(**teacher), backend)
    backend._teacher.flat[:] = policy(seed=9).weights.flat  # another policy than the one that samples
    return signal.teach(samples, progress)


def test_the_log_ratio_of_a_token_is_added_to_its_advantage_times_the_weight() -> None:
    backend, teacher = policy(), policy(seed=9)
    samples = samples_of(backend)
    for sample, learned in zip(samples, taught(backend, samples, weight=2.0), strict=True):
        at_teacher = recomputed(teacher, sample.rollout)
        expected = 0.5 + 2.0 * (at_teacher - sample.rollout.logprobs)
        np.testing.assert_allclose(learned.advantages, expected, rtol=1e-10)


def recomputed(backend: NumpyBackend, rollout: Rollout) -> np.ndarray:
    """Log-probabilities of a rollout's tokens, one token at a time, by training's own forward pass."""
    seen: list[np.ndarray] = []

    def recording(logprobs, sampler_logprobs, advantages, sequence):
        seen.append(logprobs)
        return importance_sampling.evaluate(logprobs, sampler_logprobs, advantages, sequence)

    sample = TrainingSample(rollout, np.ones(len(rollout.tokens)), 1.0)
    backend.update([sample], Loss("seen", recording), Optimization(1e-18, temperature=TEMPERATURE))
    return seen[0]


def test_the_cap_of_importance_ratios_holds_for_a_teachers_stale_samples() -> None:
    backend, cap = policy(), 1.05
    config = config_of(weight=2.0)
    table = replace(config.algorithm, loss_mode="importance_sampling", ratio_cap=cap)
    algorithm = BoundAlgorithm(
        replace(config, algorithm=table), lambda groups, step: None
    )  # of the loss only
    samples = taught(backend, samples_of(backend), weight=2.0)
    backend.weights.flat[:] += 0.2 * np.random.default_rng(3).normal(size=backend.weights.flat.size)
    expected, is_capped = 0.0, False
    for sample in samples:
        ratio = np.exp(recomputed(backend, sample.rollout) - sample.rollout.logprobs)
        is_capped |= bool((ratio > cap).any() and (ratio < cap).any())
        expected -= float((sample.token_weight * np.minimum(ratio, cap) * sample.advantages).sum())
    assert is_capped
    stats = backend.update(samples, algorithm.loss, Optimization(1e-18, temperature=TEMPERATURE))
    assert stats.loss == pytest.approx(expected, rel=1e-9)


def test_a_schedule_lets_the_weight_decay() -> None:
    backend = policy()
    samples = samples_of(backend)
    whole, half = (taught(backend, samples, at, schedule="linear") for at in (0.0, 0.5))
    for first, later in zip(whole, half, strict=True):
        np.testing.assert_allclose(later.advantages - 0.5, (first.advantages - 0.5) / 2)


@pytest.mark.parametrize(
    "table",
    [{}, {"mode": "jsd", "beta": 0.0}, {"mode": "jsd", "beta": 0.3}, {"mode": "jsd", "beta": 1.0}],
    ids=["reverse_kl", "forward", "jsd", "reverse"],
)
def test_the_gradient_of_every_weight_is_that_of_finite_differences(table: dict[str, object]) -> None:
    backend = policy()
    samples = taught(backend, samples_of(backend), **table)
    weights, how = policy(seed=3).weights, Optimization(1e-2, temperature=TEMPERATURE)
    prompts = [backend.characters.of(sample.rollout.prompt) for sample in samples]

    def evaluated():
        return loss_gradient(weights, weights, prompts, samples, LOSS, how)

    gradient, expected = evaluated()[1].flat, np.empty_like(weights.flat)
    for index, kept in enumerate(weights.flat.tolist()):
        ends = []
        for shift in (1e-5, -1e-5):
            weights.flat[index] = kept + shift
            ends.append(evaluated()[0].loss)
        weights.flat[index] = kept
        expected[index] = (ends[0] - ends[1]) / 2e-5
    assert np.linalg.norm(gradient - expected) <= 1e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(expected) > 0.01


def test_the_divergence_is_that_of_its_definition() -> None:
    policy_p, teacher_p, beta = np.array([[0.5, 0.3, 0.2]]), np.array([[0.1, 0.1, 0.8]]), 0.3
    mixture = beta * teacher_p + (1 - beta) * policy_p
    kl = [float(np.sum(p * np.log(p / mixture))) for p in (teacher_p, policy_p)]
    value, _ = jensen_shannon(np.log(policy_p), np.log(teacher_p), beta)
    assert value == pytest.approx([beta * kl[0] + (1 - beta) * kl[1]])
    reverse, forward = (jensen_shannon(np.log(policy_p), np.log(teacher_p), end)[0] for end in (1.0, 0.0))
    assert reverse == pytest.approx([np.sum(policy_p * np.log(policy_p / teacher_p))])
    assert forward == pytest.approx([np.sum(teacher_p * np.log(teacher_p / policy_p))])


def test_a_teacher_may_be_of_another_size() -> None:
    small, large = policy(hidden=4), policy(seed=2, hidden=9)
    rollouts = [sample.rollout for sample in samples_of(small)]
    scores = large.open_teacher(TeacherSpec(SELF, TEMPERATURE, is_whole=True)).score(rollouts)
    for rollout, score in zip(rollouts, scores, strict=True):
        np.testing.assert_allclose(score.logprobs, recomputed(large, rollout), rtol=1e-10)
        np.testing.assert_allclose(np.exp(score.whole).sum(axis=1), 1)
        assert score.likeliest.tolist() == score.whole.argmax(axis=1).tolist()


def test_what_an_environment_gave_is_read_and_not_scored() -> None:
    backend = policy()
    rollout = samples_of(backend)[-1].rollout
    episode = replace(rollout, given=(Given(1, (0, 1), "=a"),)) if len(rollout.tokens) > 1 else rollout
    (score,) = backend.open_teacher(TeacherSpec(SELF, TEMPERATURE, is_whole=False)).score([episode])
    assert len(score.logprobs) == len(rollout.tokens)
    assert score.read == len("abba=") + episode.length


def test_its_own_prompt_stands_before_the_same_tokens() -> None:
    rollout = Rollout(PROMPTS[0], tokens=(1, 2), logprobs=np.zeros(2))
    read = as_read(rollout, TeacherSection(prompt="{prompt}{answer}="))
    assert (read.prompt.text, read.tokens, rollout.prompt.text) == ("ab=b=", (1, 2), "ab=")
    talk = replace(PROMPTS[0], messages=(("system", "be brief"), ("user", "ab="), ("assistant", "?")))
    hinted = as_read(replace(rollout, prompt=talk), TeacherSection(prompt="{prompt} ({answer})"))
    assert hinted.prompt.messages == (("system", "be brief"), ("user", "ab= (b)"), ("assistant", "?"))


def test_what_an_environment_said_later_may_stand_before_an_episode() -> None:
    given = (Given(1, (3,), "\nno: the sum is 7\n"), Given(2, (3,), "yes"))
    rollout = Rollout(PROMPTS[0], tokens=(1, 2), logprobs=np.zeros(2), given=given)
    read = as_read(rollout, TeacherSection(prompt="{feedback} {prompt}"))
    assert read.prompt.text == "no: the sum is 7\nyes ab="
    assert (read.tokens, read.given) == (rollout.tokens, given)
    unspoken = as_read(replace(rollout, given=()), TeacherSection(prompt="{feedback}{prompt}"))
    assert unspoken.prompt.text == "ab="


def test_a_prompt_that_is_given_as_tokens_cannot_be_hinted() -> None:
    rollout = Rollout(replace(PROMPTS[0], ids=(0, 1)), tokens=(1, 2), logprobs=np.zeros(2))
    with pytest.raises(ConfigError, match=r"\[teacher\].prompt: .* tokens"):
        as_read(rollout, TeacherSection(prompt="{prompt}{answer}="))


def test_without_a_reward_every_rollout_is_trained_on_and_scored() -> None:
    backend = policy()
    groups = backend.sample(PROMPTS, Sampling(3, 5, TEMPERATURE))
    signal = TeacherSignal(config_of(), backend)
    algorithm = BoundAlgorithm(config_of(), lambda groups, step: batch, signal)
    batch = ScoredBatch(groups, np.full((3, 3), np.nan))
    samples = algorithm.transform(batch, algorithm.estimate(batch), 0.0)
    assert len(samples) == 9
    assert all(sample.teacher is not None for sample in samples)


def test_truncated_completions_are_not_scored_where_the_loss_leaves_them_out() -> None:
    backend = policy()
    groups = backend.sample(PROMPTS, Sampling(3, 2, TEMPERATURE))
    whole = sum(not rollout.truncated for group in groups for rollout in group.rollouts)
    assert 0 < whole < 9
    config = replace(config_of(), algorithm=replace(config_of().algorithm, mask_truncated=True))
    batch = ScoredBatch(groups, np.ones((3, 3)))
    algorithm = BoundAlgorithm(config, lambda groups, step: batch, TeacherSignal(config, backend))
    samples = algorithm.transform(batch, algorithm.estimate(batch), 0.0)
    assert [sample.rollout.truncated for sample in samples] == [False] * whole


def test_a_backend_without_teachers_is_refused(tmp_path) -> None:
    from retrain.plan.preflight import _teacher_problems

    config = replace(config_of(), backend=replace_backend("tests.small_memory.connect"))
    (problem,) = _teacher_problems(config)
    assert "backend 'tests.small_memory.connect' cannot learn from one" in str(problem)
    assert "a backend that can: local, numpy, tinker" in str(problem)


def test_a_mode_that_only_the_options_rule_out_is_refused_as_that() -> None:
    from retrain.plan.preflight import _teacher_problems

    backend = {"backend": "local", "options": {"devices": 2}}
    tables = {"teacher": {"teacher": "some/model", "mode": "jsd"}, "backend": backend}
    (problem,) = _teacher_problems(parse(tables, "t.toml", try_plugins=False))
    assert str(problem) == (
        """[teacher].mode: got "jsd"; backend 'local' with these [backend.options] can learn by: reverse_kl"""
    )


def test_characters_that_a_policy_cannot_read_are_told_once_for_all_prompts() -> None:
    from retrain.plan.build import plan_runs
    from retrain.plan.preflight import preflight

    tables = {"teacher": {"teacher": "self", "prompt": "{prompt} {answer}"}, "training": {"max_tokens": 8}}
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(tables, "t.toml"), "t.toml"), "t.toml")
    (problem,) = caught.value.problems
    assert "holds ' ', which is not in the alphabet of task 'sort'" in problem
    assert problem.endswith("(899 others hold such characters too)")


def replace_backend(name: str):
    return parse({"backend": {"backend": name}}, "t.toml", try_plugins=False).backend


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"teacher": {"weight": 2.0}}, r"\[teacher\].weight: has no effect; set teacher"),
        ({"reward": {"reward": "none"}}, r"\[reward\].reward: .*set \[teacher\].teacher"),
        ({"teacher": {"teacher": "self", "beta": 0.1}}, r"\[teacher\].beta: .*jsd"),
        ({"teacher": {"teacher": "self", "prompt": "{hint}"}}, r"\[teacher\].prompt: .*\{answer\}"),
        (
            {"teacher": {"teacher": "self", "prompt": "{feedback}"}},
            r"\[teacher\].prompt: .*with an \[environment\]",
        ),
        (
            {"teacher": {"teacher": "self"}, "reward": {"reward": "none"}, "data": {"refill": "tied"}},
            r"\[data\].refill: .*no rewards",
        ),
    ],
)
def test_keys_that_would_have_no_effect_are_refused(tables: dict[str, dict], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(tables, "t.toml")
