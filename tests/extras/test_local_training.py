"""Learning steps of a transformer: exact gradients however they are cut, clipping, memory, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from retrain.backends import Optimization, Sampling
from retrain.backends.local import loading, training
from retrain.base.errors import BackendMemoryError, NonFiniteError
from retrain.base.rollouts import Given, Loss, LossTerms, Prompt, Rollout, TrainingSample
from tests.extras.local_policies import (
    UNEVEN,
    as_samples,
    chosen,
    draw,
    gradient_of,
    loss_named,
    open_backend,
    plain_logprobs,
    stir,
)
from tests.extras.tiny_models import save_tiny_model

HOW = Optimization(lr=1e-3, max_grad_norm=1e9, temperature=0.8)
PPO = loss_named("ppo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


def prepared(model: str, **options: object):
    """A stirred backend and samples from it."""
    backend = open_backend(model, **options)
    if options.get("lora", True):
        stir(backend)
    return backend, as_samples(draw(backend), drift=0.3)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    assert largest > 1e-4
    for name, tensor in wanted.items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5 * largest), name


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tokens_per_micro_batch": 1}, 1),
        ({"tokens_per_micro_batch": 40}, 1),
        ({}, 5),
        ({"tokens_per_micro_batch": 30}, 2),
        ({"gradient_checkpointing": True}, 1),
    ],
)
def test_the_gradient_is_that_of_one_big_batch(model, options, parts):
    backend, samples = prepared(model)
    whole = gradient_of(backend, samples, PPO, HOW)
    other, _ = prepared(model, **options)
    cut = gradient_of(other, samples, PPO, Optimization(**{**asdict(HOW), "micro_batches": parts}))
    assert_same(cut, whole)


def test_given_tokens_are_read_but_not_trained_on(model):
    backend, _ = prepared(model)
    whole = Rollout(Prompt(0, "p", ""), "", (5, 6, 7, 8), np.zeros(4), ("",) * 4, truncated=False)
    whole = replace(whole, given=(Given(2, (9, 10, 11), ""),))
    first = replace(whole, tokens=(5, 6), logprobs=np.zeros(2), given=())
    second = replace(first, prompt=Prompt(1, "q", ""), tokens=(7, 8))
    prompts = {whole.prompt: (3, 4), second.prompt: (3, 4, 5, 6, 9, 10, 11)}

    def logprobs(*rollouts: Rollout) -> torch.Tensor:
        samples = [TrainingSample(one, np.ones(len(one.tokens)), 1.0) for one in rollouts]
        batches = training.lay_out(samples, prompts, 1, backend.policy)
        policy = backend.policy
        states = [training.predicting_states(policy, batch) for batch in batches]
        pairs = zip(states, batches, strict=True)
        return torch.cat([training.evaluate(policy, own, batch.targets, 1.0)[0] for own, batch in pairs])

    assert torch.allclose(logprobs(whole), torch.cat([logprobs(first), logprobs(second)]), atol=1e-5)


def test_prompts_with_one_text_and_other_tokens_are_read_apart(model):
    alike = [Prompt(number, "p", "", ids=ids) for number, ids in enumerate([(3, 4), (5, 6, 7)])]
    (one,), greedy = prepared(model)[0].sample(alike[1:], Sampling(1, 8, 0.0)), Sampling(1, 8, 0.0)
    backend, _ = prepared(model)
    groups = backend.sample(alike, greedy)
    assert np.allclose(groups[1].rollouts[0].logprobs, one.rollouts[0].logprobs, atol=1e-5)
    samples = as_samples(backend.sample(alike, Sampling(2, 8, HOW.temperature)))
    mismatch = backend.update(samples, PPO, HOW).mismatch
    assert mismatch
    assert mismatch.max < 1e-4


def asdict(how: Optimization) -> dict[str, object]:
    return {name: getattr(how, name) for name in Optimization.__slots__}


def test_pieces_of_the_vocabulary_projection_change_nothing(model, monkeypatch):
    backend, samples = prepared(model)
    whole = gradient_of(backend, samples, PPO, Optimization(**{**asdict(HOW), "entropy_bonus": 0.1}))
    other, _ = prepared(model)
    monkeypatch.setattr(loading, "LOGITS_AT_A_TIME", 300)
    assert_same(
        gradient_of(other, samples, PPO, Optimization(**{**asdict(HOW), "entropy_bonus": 0.1})), whole
    )


def slow_importance_sampling(new, old, advantages):
    return -(new - old).exp() * advantages


def slow_ppo(new, old, advantages):
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def slow_cispo(new, old, advantages):
    return -(new - old).exp().clamp(0.0, 5.0).detach() * advantages * new


def slow_gspo(new, old, advantages):
    ratio = (new - old).mean().exp()
    clipped = ratio.clamp(1 - 0.05, 1 + 0.05)
    return -torch.minimum(ratio * advantages, clipped * advantages)


SLOW: dict[str, tuple[Callable[..., torch.Tensor], dict[str, float]]] = {
    "importance_sampling": (slow_importance_sampling, {}),
    "ppo": (slow_ppo, {}),
    "cispo": (slow_cispo, {}),
    "gspo": (slow_gspo, {"clip_low": 0.05, "clip_high": 0.05}),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_loss_with_bonus_and_kl_has_the_gradient_of_its_slow_version(model, name):
    slow, params = SLOW[name]
    backend, samples = prepared(model)
    wanted = slow_gradient(backend, samples, slow, bonus=0.05, kl_coef=0.2)
    how = Optimization(lr=1e-3, max_grad_norm=1e9, entropy_bonus=0.05, kl_coef=0.2, temperature=0.8)
    found = gradient_of(backend, samples, loss_named(name, **params), how)
    assert_same(found, wanted)


def slow_gradient(backend, samples, slow, *, bonus, kl_coef):
    """Rollout after rollout through the model's own forward, differentiated by autograd as it stands."""
    references = plain_logprobs(backend, samples, 0.8, reference=True)
    total = torch.zeros(())
    for sample, logps, reference in zip(
        samples, plain_logprobs(backend, samples, 0.8), references, strict=True
    ):
        new = chosen(logps, sample)
        old, advantages = torch.tensor(sample.rollout.logprobs), torch.tensor(sample.advantages)
        apart = new - chosen(reference, sample)
        entropy = -(logps.exp() * logps).sum(-1)
        token_losses = slow(new, old, advantages) + kl_coef * apart**2 / 2 - bonus * entropy
        total = total + sample.token_weight * token_losses.sum()
    parameters = backend.policy.trainable()
    gradients = torch.autograd.grad(total, list(parameters.values()))
    return {f"exp_avg.{name}": g for name, g in zip(parameters, gradients, strict=True)}


def test_an_update_reports_loss_entropy_and_clipping(model):
    backend, samples = prepared(model)
    losses, nats, cut, tokens = 0.0, 0.0, 0, 0
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        logps = logps.detach().double()
        new, old = chosen(logps, sample), torch.tensor(sample.rollout.logprobs)
        advantages = torch.tensor(sample.advantages)
        ratio = (new - old).exp()
        losses += sample.token_weight * float(slow_ppo(new, old, advantages).sum())
        nats += float(-(logps.exp() * logps).sum())
        cut += int((((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))).sum())
        tokens += len(new)
    stats = backend.update(samples, PPO, HOW)
    assert stats.loss == pytest.approx(losses, rel=1e-4)
    assert stats.entropy == pytest.approx(nats / tokens, rel=1e-4)
    assert stats.clip_fraction == pytest.approx(cut / tokens)
    assert 0 < stats.memory_fraction < 1


def test_gradients_are_clipped_to_the_norm_and_the_unclipped_norm_is_told(model):
    backend, samples = prepared(model)
    other, _ = prepared(model)
    free = gradient_of(backend, samples, PPO, HOW)
    norm = float(torch.cat([tensor.flatten() for tensor in free.values()]).norm())
    stats = other.update(samples, PPO, Optimization(lr=1e-3, max_grad_norm=norm / 10, temperature=0.8))
    assert stats.grad_norm == pytest.approx(norm, rel=1e-4)
    moments = {k: t * 100 for k, t in other.optimizer.state().items() if k.startswith("exp_avg.")}
    assert_same(moments, free)


def test_moments_are_norms_of_the_parts_gradients(model):
    backend, samples = prepared(model)
    still = {**asdict(HOW), "lr": 0.0, "wants_moments": True}
    told = [
        backend.update(samples, PPO, Optimization(**{**still, "micro_batches": parts})).moments
        for parts in (5, 5, 5, 1, 1, 1, 1, 5)
    ]
    # Adam's bias-corrected second moment of one gradient, again and again, is its square: as Adam
    # sees it, every entry is 1 (or less where eps shows).
    whole = gradient_of(prepared(model)[0], samples, PPO, HOW)
    roots = {name: tensor.abs() + 1e-8 for name, tensor in whole.items()}
    alone = []
    for number in range(5):
        other, _ = prepared(model)
        gradient = gradient_of(other, [s for s in samples if s.group == number], PPO, HOW)
        alone.append(sum(float((t * 5 / roots[name]).square().sum()) for name, t in gradient.items()))
    entries = sum(float((tensor / roots[name]).square().sum()) for name, tensor in whole.items())
    assert [moments is not None for moments in told] == [False] * 5 + [True] * 3
    assert [moments.consecutive for moments in told[5:]] == [True, True, False]
    assert told[6].local_sqr_norms[:, 0] == pytest.approx([entries] * 2, rel=0.01)
    assert told[7].local_sqr_norms[:, 0] == pytest.approx(alone, rel=0.01)
    assert told[7].mean_sqr_norm[0] == pytest.approx(entries, rel=0.01)


def test_every_parameter_learns_without_adapters(model):
    backend, samples = prepared(model, lora=False)
    before = {name: p.detach().clone() for name, p in backend.policy.causal.named_parameters()}
    backend.update(samples, PPO, HOW)
    after = dict(backend.policy.causal.named_parameters())
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_only_adapters_learn_with_adapters(model):
    backend, samples = prepared(model)
    before = {name: p.detach().clone() for name, p in backend.policy.causal.named_parameters()}
    backend.update(samples, PPO, HOW)
    after = dict(backend.policy.causal.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_small_steps_are_not_lost_in_bfloat16(model):
    backend, samples = prepared(model, lora=False, dtype="bfloat16")
    for _ in range(4):
        backend.update(samples, PPO, Optimization(lr=1e-6, temperature=0.8))
    state = backend.optimizer.state()
    name = next(n for n in state if n.startswith("master.") and "q_proj" in n)
    stored = dict(backend.policy.causal.named_parameters())[name.removeprefix("master.")]
    assert stored.dtype == torch.bfloat16
    assert torch.equal(stored, state[name].bfloat16())
    assert not torch.equal(stored.float(), state[name])


class FailsFirst:
    """A loss in whose first calls an allocation fails, as PyTorch reports it."""

    def __init__(self, error: BaseException, times: int) -> None:
        self.error, self.times, self.tokens = error, times, []

    def __call__(self, logprobs, sampler_logprobs, advantages, sequence) -> LossTerms:
        self.tokens.append(int(sequence.max()) + 1)
        if self.times:
            self.times -= 1
            raise self.error
        return PPO.evaluate(logprobs, sampler_logprobs, advantages, sequence)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    MemoryError("no more"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_a_step_that_does_not_fit_is_repeated_in_halves_and_loses_nothing(model, error):
    backend, samples = prepared(model)
    whole = gradient_of(backend, samples, PPO, HOW)
    other, _ = prepared(model)
    evaluate = FailsFirst(error, times=2)
    assert_same(gradient_of(other, samples, Loss("ppo", evaluate), HOW), whole)
    largest = [evaluate.tokens[0], evaluate.tokens[1], max(evaluate.tokens[2:])]
    assert largest[0] == len(samples)
    assert largest == sorted(set(largest), reverse=True)
    assert sum(evaluate.tokens[2:]) == len(samples)


@pytest.mark.parametrize("options", [{}, {"lora": False}], ids=str)
def test_memory_that_runs_out_as_the_optimizer_begins_costs_nothing(model, monkeypatch, options):
    """The moments are made at the first step, and memory may end after any of them."""
    backend, samples = prepared(model, **options)
    other, _ = prepared(model, **options)
    how = Optimization(**{**asdict(HOW), "wants_moments": True})
    whole = [gradient_of(other, samples, PPO, how) for _ in range(2)]
    zeros, made = torch.zeros_like, []

    def refuse_third(tensor, **named):
        made.append(tensor)
        if len(made) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return zeros(tensor, **named)

    monkeypatch.setattr(torch, "zeros_like", refuse_third)
    found = [gradient_of(backend, samples, PPO, how) for _ in range(2)]
    assert len(made) > 3
    for one, another in zip(found, whole, strict=True):
        assert_same(one, another)
    assert backend.optimizer.steps == 2


def test_the_smaller_micro_batch_is_kept_for_later_steps(model):
    backend, samples = prepared(model)
    backend.update(samples, Loss("ppo", FailsFirst(OUT_OF_MEMORY[0], times=1)), HOW)
    later = FailsFirst(OUT_OF_MEMORY[0], times=0)
    backend.update(samples, Loss("ppo", later), HOW)
    assert len(later.tokens) > 1


def test_a_sequence_that_does_not_fit_alone_is_a_memory_error_and_changes_nothing(model):
    backend, samples = prepared(model)
    before = {name: p.detach().clone() for name, p in backend.policy.trainable().items()}
    with pytest.raises(BackendMemoryError, match=r"one sequence of \d+ tokens did not fit"):
        backend.update(samples, Loss("ppo", FailsFirst(OUT_OF_MEMORY[0], times=10**9)), HOW)
    assert all(torch.equal(before[name], p) for name, p in backend.policy.trainable().items())


def test_a_batch_of_prompts_that_does_not_fit_is_sampled_in_halves(model):
    backend = open_backend(model)
    rows: list[int] = []

    def refuse_many(module, arguments, named):
        rows.append(len(named["input_ids"]))
        if rows[-1] > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    backend.policy.body.register_forward_pre_hook(refuse_many, with_kwargs=True)
    samples = as_samples(draw(backend, group_size=2))
    assert rows[0] == 5
    assert len(samples) == 10
    for sample, logps in zip(samples, plain_logprobs_without_hooks(backend, samples), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-5)


def test_a_measurement_that_does_not_fit_leaves_the_training_samples_as_they_are(model):
    disturbed, undisturbed = open_backend(model), open_backend(model)

    def refuse_many(module, arguments, named):
        if len(named["input_ids"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = disturbed.policy.body.register_forward_pre_hook(refuse_many, with_kwargs=True)
    disturbed.sample(UNEVEN, Sampling(2, 9, 0.8, seed=3))
    hook.remove()
    ours, theirs = draw(disturbed), draw(undisturbed)
    assert [r.tokens for g in ours for r in g.rollouts] == [r.tokens for g in theirs for r in g.rollouts]


def plain_logprobs_without_hooks(backend, samples):
    backend.policy.body._forward_pre_hooks.clear()
    return plain_logprobs(backend, samples, 0.8)


@pytest.mark.parametrize("name", ["advantages", "logprobs"])
def test_what_is_not_finite_stops_the_step_before_the_optimizer(model, name):
    backend, samples = prepared(model)
    before = {key: p.detach().clone() for key, p in backend.policy.trainable().items()}
    target = samples[3].advantages if name == "advantages" else samples[3].rollout.logprobs
    target[0] = float("nan")
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        backend.update(samples, PPO, HOW)
    assert all(torch.equal(before[key], p) for key, p in backend.policy.trainable().items())
    assert backend.optimizer.steps == 0


def test_a_gradient_that_is_not_finite_names_its_parameter(model):
    backend, samples = prepared(model)

    def infinite(logprobs, sampler_logprobs, advantages, sequence):
        return LossTerms(
            np.zeros(len(logprobs)), np.full(len(logprobs), np.inf), np.zeros(len(logprobs), bool)
        )

    with pytest.raises(NonFiniteError, match=r"gradient of model\.layers\.0"):
        backend.update(samples, Loss("infinite", infinite), HOW)
