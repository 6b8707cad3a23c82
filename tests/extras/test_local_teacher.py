"""Teachers of the local backend: the gradient, another prompt, other sizes, and what is refused."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

from retrain.backends import SELF, Optimization, Teacher, TeacherSpec
from retrain.backends.local import LocalOptions
from retrain.backends.local.loading import Policy
from retrain.backends.local.model_files import estimate, teacher_problems
from retrain.backends.local.policy import LocalBackend
from retrain.backends.local.training import jensen_shannon
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Given, TrainingSample
from retrain.campaign.run import reopen, start
from retrain.config.load import parse
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.extras.completions_server import serve
from tests.extras.local_policies import as_samples, chosen, draw, gradient_of, loss_named, open_backend, stir
from tests.extras.tiny_models import character_tokenizer, save_tiny_model
from tests.stopping import kill_when

TEMPERATURE = 0.8
HOW = Optimization(1e-3, max_grad_norm=1e9, temperature=TEMPERATURE)
LOSS = loss_named("importance_sampling")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A teacher of another size, whose vocabulary is rounded up."""
    return save_tiny_model(tmp_path_factory.mktemp("larger"), hidden=192, layers=3, vocabulary=64, seed=1)


def opened(backend: LocalBackend, name: str, *, is_whole: bool = False) -> Teacher:
    return backend.open_teacher(TeacherSpec(name, TEMPERATURE, is_whole))


def prepared(model: str, **options: object) -> tuple[LocalBackend, list[TrainingSample]]:
    backend = open_backend(model, **options)
    stir(backend)
    return backend, as_samples(draw(backend))


def taught(
    teacher: Teacher, samples: Sequence[TrainingSample], *, weight: float = 0.0, beta: float = 1.0
) -> list[TrainingSample]:
    scores = teacher.score([sample.rollout for sample in samples])
    return [
        replace(sample, teacher=replace(score, weight=weight, beta=beta))
        for sample, score in zip(samples, scores, strict=True)
    ]


def distributions(causal: torch.nn.Module, backend: LocalBackend, sample: TrainingSample) -> torch.Tensor:
    """Every rollout alone, without cache, padding or chunks."""
    prompt = backend.text.encode(sample.rollout.prompt)
    logits = causal(input_ids=torch.tensor([[*prompt, *sample.rollout.tokens]])).logits
    return (logits[0, len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)


@pytest.mark.parametrize("teacher", ["same", "larger"])
def test_scores_are_those_of_the_teachers_own_logits(model: str, larger: str, teacher: str) -> None:
    backend, samples = prepared(model)
    name = {"same": model, "larger": larger}[teacher]
    causal = open_backend(name, lora=False).policy.causal
    for sample in taught(opened(backend, name), samples):
        logp = distributions(causal, backend, sample)
        np.testing.assert_allclose(sample.teacher.logprobs, chosen(logp, sample).detach(), atol=2e-5)
        assert sample.teacher.likeliest.tolist() == logp.argmax(-1).tolist()


def generalised_jsd(student_logits, teacher_logits, beta, temperature):
    """The generalised divergence as TRL 1.16 writes it in `GKDTrainer.generalized_jsd_loss`, per token."""
    from torch.nn import functional

    student = functional.log_softmax(student_logits / temperature, dim=-1)
    teacher = functional.log_softmax(teacher_logits / temperature, dim=-1)
    if beta == 0:
        jsd = functional.kl_div(student, teacher, reduction="none", log_target=True)
    elif beta == 1:
        jsd = functional.kl_div(teacher, student, reduction="none", log_target=True)
    else:
        beta = torch.tensor(beta, dtype=student.dtype)
        mixture = torch.logsumexp(
            torch.stack([student + torch.log1p(-beta), teacher + torch.log(beta)]), dim=0
        )
        kl_teacher = functional.kl_div(mixture, teacher, reduction="none", log_target=True)
        kl_student = functional.kl_div(mixture, student, reduction="none", log_target=True)
        jsd = beta * kl_teacher + (1 - beta) * kl_student
    return jsd.sum(-1)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_is_trls_value_by_value(beta: float) -> None:
    student, teacher = torch.randn((2, 50, 30), generator=torch.Generator().manual_seed(3)).double() * 3
    ours = jensen_shannon(student.log_softmax(-1), teacher.log_softmax(-1), beta)
    torch.testing.assert_close(ours, generalised_jsd(student, teacher, beta, 1.0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, {"tokens_per_micro_batch": 30}, {"lora": False}], ids=str)
def test_the_gradient_is_autograds_of_loss_and_divergence(
    model: str, larger: str, beta: float, options: dict
) -> None:
    backend, samples = prepared(model, **options)
    samples = taught(opened(backend, larger, is_whole=True), samples, weight=0.7, beta=beta)
    causal, teacher = backend.policy.causal, open_backend(larger, lora=False).policy.causal
    tokens, total = len(causal.get_output_embeddings().weight), torch.zeros(())
    for sample in samples:
        logp = distributions(causal, backend, sample)
        theirs = distributions(teacher, backend, sample).detach()[:, :tokens]
        ratio = (chosen(logp, sample) - torch.tensor(sample.rollout.logprobs)).exp()
        jsd = generalised_jsd(logp, theirs, beta, 1.0)
        total = total + sample.token_weight * (0.7 * jsd - ratio * torch.tensor(sample.advantages)).sum()
    parameters = backend.policy.trainable()
    expected = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    got = gradient_of(backend, samples, LOSS, HOW)
    apart = sum(float((got[f"exp_avg.{n}"] - g).double().square().sum()) for n, g in expected.items())
    size = sum(float(g.double().square().sum()) for g in expected.values())
    assert apart**0.5 <= 1e-5 * size**0.5


def test_many_tokens_are_compared_in_chunks(model: str, larger: str, monkeypatch) -> None:
    from retrain.backends.local import loading

    backend, samples = prepared(model)
    samples = taught(opened(backend, larger, is_whole=True), samples, weight=0.7, beta=0.3)
    whole = gradient_of(backend, samples, LOSS, HOW)
    other, _ = prepared(model)
    monkeypatch.setattr(loading, "LOGITS_AT_A_TIME", 100)
    for name, gradient in gradient_of(other, samples, LOSS, HOW).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-4, atol=1e-7)


def test_the_policy_as_its_own_teacher_agrees_until_it_learns(model: str) -> None:
    backend, samples = prepared(model)
    teacher = opened(backend, SELF)
    first = taught(teacher, samples)
    for sample in first:
        np.testing.assert_allclose(sample.teacher.logprobs, sample.rollout.logprobs, atol=2e-5)
    stats = backend.update(first, LOSS, replace(HOW, lr=0.1))
    assert stats.teacher_agreement == 1
    for sample, before in zip(taught(teacher, samples), first, strict=True):
        np.testing.assert_array_equal(sample.teacher.logprobs, before.teacher.logprobs)
    teacher.refresh()
    later = zip(taught(teacher, samples), first, strict=True)
    assert any((a.teacher.logprobs != b.teacher.logprobs).any() for a, b in later)


@pytest.mark.parametrize("options", [{}, {"lora": False}, {"lora": False, "teacher_offload": True}], ids=str)
def test_the_policys_own_teacher_is_in_its_checkpoint(model: str, tmp_path: Path, options: dict) -> None:
    backend, samples = prepared(model, **options)
    teacher = opened(backend, SELF)
    teacher.refresh()
    backend.update(samples, LOSS, HOW)
    backend.save(tmp_path)
    other = open_backend(model, **options)
    resumed = opened(other, SELF)
    other.load(tmp_path)
    for sample, again in zip(taught(teacher, samples), taught(resumed, samples), strict=True):
        np.testing.assert_array_equal(sample.teacher.logprobs, again.teacher.logprobs)


def test_another_prompt_stands_before_the_very_tokens(model: str) -> None:
    backend, samples = prepared(model)
    teacher = opened(backend, SELF)
    for sample in samples:
        hinted = replace(sample.rollout, prompt=sample.rollout.prompt.hinted("{prompt}={answer} "))
        text = f"{sample.rollout.prompt.text}={sample.rollout.prompt.answer} "
        assert backend.read(hinted) == (*character_tokenizer().encode(text), *sample.rollout.tokens)
        (score,) = teacher.score([hinted])
        logp = distributions(backend.policy.causal, backend, replace(sample, rollout=hinted))
        np.testing.assert_allclose(score.logprobs, chosen(logp, sample).detach(), atol=2e-5)
        assert score.read == len(text) + sample.rollout.length


def absent(policy: Policy) -> list[str]:
    """Names of the parameters that have no values at present."""
    return [name for name, parameter in policy.causal.named_parameters() if parameter.is_meta]


def saved_adapters(model: str, directory: Path) -> str:
    source, _ = prepared(model, rank=8)
    source.save(directory)
    return str(directory / "adapter")


@pytest.mark.parametrize("kind", ["larger", "same size", "adapters on another base", "itself"])
def test_an_offloaded_teacher_scores_alike_a_layer_at_a_time(
    model: str, larger: str, tmp_path: Path, kind: str
) -> None:
    """Bit for bit; adapters within rounding, whose parts are called one by one."""
    name, options = larger, {}
    if kind == "adapters on another base":
        name = saved_adapters(larger, tmp_path)
    elif kind != "larger":
        name, options = (SELF if kind == "itself" else model), {"lora": False}
    gradients, scores = [], []
    for offloads in (False, True):
        backend, samples = prepared(model, **options, teacher_offload=offloads)
        teacher = opened(backend, name, is_whole=True)
        policy, at_a_time = teacher._policy, set[int]()
        layers = next(part for part in policy.body.modules() if isinstance(part, torch.nn.ModuleList))
        moved = [name for name, _ in policy.causal.named_parameters() if offloads and ".layers." in name]
        assert absent(policy) == moved

        def look(*_: object, layers=layers, at_a_time=at_a_time) -> None:
            at_a_time.add(sum(has_values(layer) for layer in layers))

        for layer in layers:
            next(layer.children()).register_forward_pre_hook(look)
        samples = taught(teacher, samples, weight=0.7, beta=0.3)
        assert at_a_time == {1 if offloads else len(layers)}
        scores.append(np.concatenate([sample.teacher.logprobs for sample in samples]))
        gradients.append(gradient_of(backend, samples, LOSS, HOW))
        assert absent(policy) == moved
    close = 1e-6 if name.endswith("adapter") else 0
    np.testing.assert_allclose(scores[1], scores[0], rtol=0, atol=close)
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, rtol=close, atol=close * 0.1)


def has_values(part: torch.nn.Module) -> bool:
    return not any(p.is_meta for p in part.parameters())


def test_what_an_environment_wrote_is_read_and_not_scored(model: str) -> None:
    backend, samples = prepared(model)
    sample = max(samples, key=lambda one: len(one.rollout.tokens))
    rollout = replace(sample.rollout, given=(Given(1, (5, 6), "35"),))
    (score,) = opened(backend, SELF).score([rollout])
    first, rest = rollout.tokens[:1], rollout.tokens[1:]
    prompt = backend.text.encode(rollout.prompt)
    logits = backend.policy.causal(input_ids=torch.tensor([[*prompt, *first, 5, 6, *rest]])).logits[0]
    logp = (logits / TEMPERATURE).log_softmax(-1)
    places = [len(prompt) - 1, *range(len(prompt) + 2, len(prompt) + 2 + len(rest))]
    expected = logp[places, [*rollout.tokens]].detach()
    np.testing.assert_allclose(score.logprobs, expected, atol=2e-5)


def test_adapters_on_the_same_base_share_its_frozen_weights(model: str, tmp_path: Path) -> None:
    source, samples = prepared(model, rank=8)
    source.save(tmp_path)
    backend = open_backend(model, rank=4)
    scores = taught(opened(backend, str(tmp_path / "adapter")), samples)
    frozen = {id(p) for p in backend.policy.causal.parameters() if not p.requires_grad}
    policy = backend.open_teacher(TeacherSpec(str(tmp_path / "adapter"), 1.0, is_whole=False))._policy
    own = [p for name, p in policy.causal.named_parameters() if "lora" not in name]
    assert {id(p) for p in own} <= frozen
    for sample in scores:
        logp = distributions(source.policy.causal, source, sample)
        np.testing.assert_allclose(sample.teacher.logprobs, chosen(logp, sample).detach(), atol=2e-5)


def test_other_tokens_are_refused_with_the_first_that_differs(model: str, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path, characters="0123456789+abcdefghijklmnopqrstuvwxyz ")
    expected = r"token 12 is '\+' in the teacher and '=' in \[model\].model"
    with pytest.raises(ConfigError, match=rf"\[teacher\].teacher: {expected}"):
        opened(open_backend(model), other)
    (problem,) = problems(model, other)
    assert problem.startswith("token 12 is '+' in the teacher and '=' in [model].model")


def config_of(model: str, teacher: str):
    tables = {
        "model": {"model": model},
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu"}},
        "teacher": {"teacher": teacher},
    }
    return parse(tables, "t.toml", try_plugins=False)


def problems(model: str, teacher: str) -> list[str]:
    return [*teacher_problems(teacher, config_of(model, teacher), LocalOptions(local_files_only=True))]


def test_what_is_no_teacher_is_refused_before_anything_starts(model: str, tmp_path: Path) -> None:
    assert problems(model, SELF) == problems(model, model) == []
    assert "is neither a directory nor in" in problems(model, "quickstart/fast_s0")[0]
    assert "has neither adapter_model.safetensors nor checkpoints" in problems(model, str(tmp_path))[0]
    (tmp_path / "run.toml").write_text("")
    assert "is a run without a checkpoint" in problems(model, str(tmp_path))[0]
    (tmp_path / "checkpoints/step-000002/model").mkdir(parents=True)
    (tmp_path / "checkpoints/step-000002/model/config.json").write_text("{}")
    assert "is a run that is not finished" in problems(model, str(tmp_path))[0]


def test_the_teachers_weights_count_in_the_memory_of_a_run(model: str, larger: str) -> None:
    options = LocalOptions(device="cpu", local_files_only=True)
    held = {
        name: estimate(config_of(model, name), options, []).held.get("teacher", 0)
        for name in ("", model, SELF, larger)
    }
    weights = sum(p.numel() for p in open_backend(larger, lora=False).policy.causal.parameters())
    assert (held[""], held[model], held[larger]) == (0, 0, 4 * weights)
    assert 0 < held[SELF] < held[larger]


def started(place: Path, name: str, model: str, **tables: dict) -> tuple[Path, RunFiles]:
    """A campaign of one run on the tiny model that is not yet executed."""
    raw = {
        "model": {"model": model, "lora_rank": 4},
        "training": {"batch_size": 2, "group_size": 2, "max_tokens": 4, "lr": 0.01, "save_every": 2},
        "data": {"task": "successor"},
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu"}},
        "campaign": {"name": name, "seeds": [0], "max_steps": 6, "launcher": "inline"},
        "logging": {"log_dir": str(place / "logs")},
        "reward": {"reward": "none"},
        **tables,
    }
    (place / f"{name}.toml").write_text(tomli_w.dumps(raw))
    directory = start(place / f"{name}.toml").directory
    (run,) = (directory / "runs").iterdir()
    return directory, RunFiles(run)


def compared(files: RunFiles) -> list[dict[str, object]]:
    keys = ("step", "loss", "grad_norm", "teacher_kl", "teacher_agreement", "teacher_outside")
    return [{key: row[key] for key in keys} for row in read_metrics(files.directory)]


@pytest.mark.parametrize(
    "teacher",
    [
        {"teacher": "first/maxrl_s0", "mode": "jsd"},
        {"teacher": "self", "refresh": True, "prompt": "{answer}{prompt}"},  # else it agrees with itself
    ],
    ids=["run", "refresh"],
)
def test_a_run_that_is_killed_goes_on_as_if_it_was_not(here: Path, larger: str, model: str, teacher) -> None:
    _, first = started(here, "first", larger, reward={"reward": "match"})
    assert worker.run(first.directory, threading.Event()) == 0
    _, whole = started(here, "whole", model, teacher=teacher)
    assert worker.run(whole.directory, threading.Event()) == 0
    offloaded = {"local_files_only": True, "device": "cpu", "teacher_offload": True}
    backend = {"backend": "local", "options": offloaded}  # which changes nothing
    directory, killed = started(here, "killed", model, teacher=teacher, backend=backend)
    command = [sys.executable, "-m", "retrain", "resume", str(directory)]
    kill_when(lambda: len(read_metrics(killed.directory)) >= 3, command, here)
    assert reopen(directory).execute().exit_code == 0
    assert compared(killed) == compared(whole)
    assert len(compared(whole)) == 6
    assert compared(whole)[-1]["teacher_kl"] > 0


@pytest.mark.parametrize("is_lora", [True, False], ids=["adapters", "every parameter"])
def test_a_finished_run_teaches_whatever_it_trained(
    here: Path, model: str, larger: str, is_lora: bool
) -> None:
    options = {"local_files_only": True, "device": "cpu", "lora": is_lora}
    tables = {"backend": {"backend": "local", "options": options}, "reward": {"reward": "match"}}
    _, first = started(here, "first", larger, **tables)
    assert worker.run(first.directory, threading.Event()) == 0
    backend, samples = prepared(model)
    trained = first.checkpoints / "step-000006"
    source = open_backend(larger, lora=is_lora)
    source.load(trained)
    for sample in taught(opened(backend, str(first.directory)), samples):
        logp = distributions(source.policy.causal, backend, sample)
        np.testing.assert_allclose(sample.teacher.logprobs, chosen(logp, sample).detach(), atol=2e-5)


def test_completions_of_a_server_are_scored_in_this_process(model: str, larger: str) -> None:
    with serve(model) as server:
        backend = open_backend(model, engine="openai", engine_url=server.url)
        samples = taught(opened(backend, larger), as_samples(draw(backend)))
        backend.close()
    causal = open_backend(larger, lora=False).policy.causal
    for sample in samples:
        logp = distributions(causal, backend, sample)
        np.testing.assert_allclose(sample.teacher.logprobs, chosen(logp, sample).detach(), atol=2e-5)
