"""A teacher at a server: the same signal as in this process, over HTTP, and what a server may do wrong."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from retrain.backends import ENGINE, BackendSpec, Optimization, Teacher, TeacherSpec
from retrain.backends.engines import openai as engine_module
from retrain.backends.local import LocalOptions, check, connect, servers, takes_permits
from retrain.backends.local import engine_teacher as teacher_module
from retrain.backends.local.model_files import estimate
from retrain.backends.local.policy import LocalBackend
from retrain.base.errors import ConfigError, InfrastructureError, LaunchError, NonFiniteError, RunFailedError
from retrain.base.rollouts import Given, TrainingSample
from retrain.campaign.run import reopen
from retrain.config.load import parse
from retrain.plugins.tasks import Task
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.extras.completions_server import CompletionsServer, serve
from tests.extras.local_policies import as_samples, draw, gradient_of, loss_named, open_backend, stir
from tests.extras.test_local_teacher import TEMPERATURE, chosen, distributions, generalised_jsd, started
from tests.extras.tiny_models import save_tiny_model
from tests.stopping import kill_when

HOW = Optimization(1e-3, max_grad_norm=1e9)
LOSS = loss_named("importance_sampling")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have calls made again sooner than users wait."""
    monkeypatch.setattr(engine_module, "FIRST_WAIT_S", 0.001)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden=64)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("larger"), layers=3, vocabulary=64, seed=1)


@pytest.fixture
def server(larger: str) -> Iterator[CompletionsServer]:
    with serve(larger) as running:
        yield running


def opened(backend: LocalBackend, name: str = ENGINE) -> Teacher:
    return backend.open_teacher(TeacherSpec(name, 1.0, is_whole=False))


def prepared(model: str, **options: Any) -> tuple[LocalBackend, list[TrainingSample]]:
    backend = open_backend(model, **options)
    stir(backend)
    return backend, as_samples(draw(backend, temperature=1.0))


def taught(teacher: Teacher, samples: list[TrainingSample]) -> list[TrainingSample]:
    """Samples with the log-ratio as their advantage, as `reverse_kl` has it."""
    scores = teacher.score([sample.rollout for sample in samples])
    return [
        replace(sample, teacher=score, advantages=score.logprobs - sample.rollout.logprobs)
        for sample, score in zip(samples, scores, strict=True)
    ]


def assert_alike(ours: list[TrainingSample], theirs: list[TrainingSample]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.teacher.logprobs, other.teacher.logprobs, atol=2e-5)
        np.testing.assert_array_equal(one.teacher.likeliest, other.teacher.likeliest)
        assert one.teacher.read == other.teacher.read


@pytest.mark.parametrize("tokens", [1, 60, 8192], ids="calls of {} tokens".format)
def test_a_server_teaches_what_the_model_would_in_this_process(
    model: str, larger: str, server: CompletionsServer, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "TOKENS_PER_CALL", tokens)
    backend, samples = prepared(model, teacher_url=server.url)
    at_server, here = taught(opened(backend), samples), taught(opened(backend, larger), samples)
    assert_alike(at_server, here)
    other, _ = prepared(model)
    wanted = gradient_of(other, here, LOSS, HOW)
    for name, gradient in gradient_of(backend, at_server, LOSS, HOW).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)
    calls = [body for path, body, _ in server.requests if "prompt_logprobs" in body]
    assert sum(len(call["prompt"]) for call in calls) == 1 + len(samples)
    assert all(len(call["prompt"]) == 1 or sum(map(len, call["prompt"])) <= tokens for call in calls)
    assert {(call["max_tokens"], call["temperature"], call["model"]) for call in calls} == {(1, 1.0, larger)}


def in_steps(teacher: Teacher, samples: list[TrainingSample], beta: float) -> list[TrainingSample]:
    """Samples with a divergence from the teacher, as `jsd` has it."""
    scores = teacher.score([sample.rollout for sample in samples])
    return [
        replace(sample, teacher=replace(score, weight=0.7, beta=beta))
        for sample, score in zip(samples, scores, strict=True)
    ]


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_all_tokens_that_a_server_tells_are_whole_distributions(
    model: str, larger: str, server: CompletionsServer, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server's vocabulary is rounded up to more than the policy's."""
    monkeypatch.setattr(teacher_module, "TOP", 1000)
    backend, samples = prepared(model, teacher_url=server.url)
    at_server, here = (
        in_steps(backend.open_teacher(TeacherSpec(name, 1.0, is_whole=True)), samples, beta)
        for name in (ENGINE, larger)
    )
    assert_alike(at_server, here)
    other, _ = prepared(model)
    wanted = gradient_of(other, here, LOSS, HOW)
    for name, gradient in gradient_of(backend, at_server, LOSS, HOW).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_likeliest_tokens_and_all_others_together_are_compared(
    model: str, tmp_path: Path, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_module, "TOP", 5)
    deeper = save_tiny_model(tmp_path, layers=3, seed=1)
    with serve(deeper) as server:
        backend, samples = prepared(model, teacher_url=server.url)
        taught = in_steps(backend.open_teacher(TeacherSpec(ENGINE, 1.0, is_whole=True)), samples, beta)
        assert {body["prompt_logprobs"] for _, body, _ in server.requests if "prompt_logprobs" in body} == {5}
    causal, theirs = backend.policy.causal, open_backend(deeper, lora=False).policy.causal
    total, lost = torch.zeros(()), 0.0
    for sample in taught:
        own, its = (
            torch.log_softmax(TEMPERATURE * distributions(m, backend, sample), -1) for m in (causal, theirs)
        )
        top = its.topk(5, dim=-1).indices
        coarse = [
            torch.cat([p.gather(1, top), 1 - p.gather(1, top).sum(1, keepdim=True)], 1).log()
            for p in (own.exp(), its.detach().exp())
        ]
        nats = generalised_jsd(*coarse, beta, 1.0)
        lost += float((generalised_jsd(own, its, beta, 1.0) - nats).detach().min())
        ratio = (chosen(own, sample) - torch.tensor(sample.rollout.logprobs)).exp()
        total = total + sample.token_weight * (0.7 * nats - ratio * torch.tensor(sample.advantages)).sum()
    assert lost > 0
    parameters = backend.policy.trainable()
    expected = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))
    got = gradient_of(backend, taught, LOSS, HOW)
    apart = sum(float((got[f"exp_avg.{n}"] - g).double().square().sum()) for n, g in expected.items())
    size = sum(float(g.double().square().sum()) for g in expected.values())
    assert apart**0.5 <= 1e-4 * size**0.5


def test_what_an_environment_wrote_is_read_and_not_scored(
    model: str, larger: str, server: CompletionsServer
) -> None:
    backend, samples = prepared(model, teacher_url=server.url)
    sample = max(samples, key=lambda one: len(one.rollout.tokens))
    episode = replace(sample, rollout=replace(sample.rollout, given=(Given(1, (5, 6), "35"),)))
    hinted = replace(
        sample, rollout=replace(sample.rollout, prompt=sample.rollout.prompt.hinted("a{prompt}"))
    )
    assert_alike(*(taught(opened(backend, name), [episode, hinted]) for name in (ENGINE, larger)))


def test_the_model_of_the_sampling_server_teaches_without_the_policys_adapters(model: str) -> None:
    with serve(model) as server:
        backend, samples = prepared(model, engine="openai", engine_url=server.url)
        teacher = opened(backend)
        assert_alike(taught(teacher, samples), taught(opened(backend, model), samples))
        backend.update(samples, LOSS, replace(HOW, lr=0.1))
        assert_alike(taught(teacher, samples), taught(opened(backend, model), samples))
        again = as_samples(draw(backend, temperature=1.0))  # is checked against the policy
        assert {sample.rollout.policy_version for sample in again} == {1}
        backend.close()


def test_adapters_at_the_server_teach_if_they_are_named(model: str, larger: str, tmp_path: Path) -> None:
    source, _ = prepared(larger)
    source.save(tmp_path)
    with serve(larger) as server:
        server.adapters["expert"] = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        backend, samples = prepared(model, teacher_url=server.url, teacher_model="expert")
        assert_alike(
            taught(opened(backend), samples), taught(opened(backend, str(tmp_path / "adapter")), samples)
        )
        nobody, _ = prepared(model, teacher_url=server.url, teacher_model="nobody")
        words = rf"teacher_model: got 'nobody'; the server has these models: {larger}, expert; name one"
        with pytest.raises(ConfigError, match=words):
            opened(nobody)


def test_every_call_of_a_teacher_holds_a_permit_and_is_reported(
    model: str, server: CompletionsServer
) -> None:
    entered, told = [], []

    @contextmanager
    def permit() -> Iterator[None]:
        entered.append(1)
        yield

    options = {"teacher_url": server.url, "device": "cpu", "local_files_only": True}
    spec = BackendSpec(0, model=model, lora_rank=4, options=options, permit=permit, observe_call=told.append)
    backend = connect(spec)
    samples = as_samples(draw(backend, temperature=1.0))
    assert not entered  # this process samples
    taught(opened(backend), samples)
    assert len(entered) == len(told) == 3  # models, the first tokens, the samples
    assert takes_permits(options)


WRONG = {
    "none": (lambda scores: None, r"it has no prompt_logprobs\); the server must take `prompt_logprobs`"),
    "fewer": (lambda scores: scores[:-1], r"it has \d+ prompt_logprobs of a prompt of \d+ tokens"),
    "others": (lambda scores: [None] + [{"0": {"logprob": -1.0}}] * (len(scores) - 1), r"KeyError\('\d+'\)"),
    "no facts": (lambda scores: [None] + ["?"] * (len(scores) - 1), "TypeError"),
    "logits": (lambda scores: changed(scores, 3.0), "gives 3 as a log-probability; .*--logprobs-mode"),
}


def changed(scores: list[Any], logprob: float) -> list[Any]:
    return [one and {token: facts | {"logprob": logprob} for token, facts in one.items()} for one in scores]


@pytest.mark.parametrize(("misread", "words"), WRONG.values(), ids=WRONG)
def test_a_server_that_cannot_teach_is_refused_before_the_first_step_and_later(
    model: str, server: CompletionsServer, misread: Any, words: str
) -> None:
    backend, samples = prepared(model, teacher_url=server.url)
    teacher = opened(backend)
    server.misread = misread
    with pytest.raises(RunFailedError, match=words):
        taught(teacher, samples)
    with pytest.raises(ConfigError, match=rf"^\[teacher\].teacher: .*{words}"):
        opened(backend)


@pytest.mark.parametrize("logprob", [-9999.0, float("nan"), float("-inf")])
def test_log_probabilities_that_are_not_finite_fail_the_run(
    model: str, server: CompletionsServer, logprob: float
) -> None:
    backend, samples = prepared(model, teacher_url=server.url)
    teacher = opened(backend)
    server.misread = lambda scores: changed(scores, logprob)
    with pytest.raises(NonFiniteError, match=r"\[teacher\].teacher: .* gives no finite log-probabilities"):
        taught(teacher, samples)


def test_other_tokens_are_refused_with_one_that_differs(model: str, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path, characters="0123456789+abcdefghijklmnopqrstuvwxyz ")
    with serve(other) as server, pytest.raises(ConfigError, match="token 12 is '\\+' in the teacher and '='"):
        opened(open_backend(model, teacher_url=server.url))
    fewer = save_tiny_model(tmp_path, characters="0123456789=abc")
    with serve(fewer) as server, pytest.raises(ConfigError, match="400 Token id 39 is out of vocabulary"):
        opened(open_backend(model, teacher_url=server.url))


def test_a_token_that_differs_is_found_when_it_is_first_scored(model: str, server: CompletionsServer) -> None:
    backend, samples = prepared(model, teacher_url=server.url)
    teacher = opened(backend)
    server.tokenizer = type("Other", (), {"decode": staticmethod(lambda ids: "<|other|>")})
    ends = [sample for sample in samples if not sample.rollout.truncated]  # the end is no plain token
    with pytest.raises(ConfigError, match=r"token 1 is '<\|other\|>' in the teacher and '<eos>' in"):
        taught(teacher, ends)


def test_texts_that_are_not_told_are_not_compared_and_said_so(
    model: str, server: CompletionsServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.misread = lambda scores: [
        one and {token: {"logprob": facts["logprob"]} for token, facts in one.items()} for one in scores
    ]
    backend, samples = prepared(model, teacher_url=server.url)
    taught(opened(backend), samples)
    assert "does not tell its tokens' texts" in caplog.text


def test_completions_that_leave_the_servers_context_are_told(model: str, tmp_path: Path) -> None:
    short = save_tiny_model(tmp_path, context=12)
    with serve(short) as server:
        backend, samples = prepared(model, teacher_url=server.url)
        with pytest.raises(
            ConfigError, match=r"has \d\d tokens, and the server's context is 12, .*max-model-len"
        ):
            taught(opened(backend), samples)


def test_a_server_that_is_away_for_a_while_is_asked_again(model: str, server: CompletionsServer) -> None:
    server.failures = 3
    backend, samples = prepared(model, teacher_url=server.url)
    teacher = opened(backend)
    server.failures = 3
    assert len(taught(teacher, samples)) == len(samples)
    server.failures = 100
    with pytest.raises(InfrastructureError, match=r"503 .*\[backend.options\].teacher_url"):
        taught(teacher, samples)


def test_a_server_that_stays_silent_or_dies_is_told(model: str, larger: str) -> None:
    with serve(larger) as server:
        backend, samples = prepared(model, teacher_url=server.url, engine_timeout_s=0.1)
        teacher, address = opened(backend), server.url
        with server.lock, pytest.raises(InfrastructureError, match=r"no data for 0.1 s; .*teacher_url"):
            taught(teacher, samples)
    with pytest.raises(InfrastructureError, match=rf"{address}/v1/completions: .*refused; .*teacher_url"):
        taught(teacher, samples)
    with pytest.raises(InfrastructureError, match=rf"{address}/v1/models: .*refused"):
        opened(backend)


def test_a_wrong_key_is_told_by_its_variable(model: str, server: CompletionsServer, monkeypatch) -> None:
    server.key = "right"
    monkeypatch.setenv("OPENAI_API_KEY", "wrong")
    with pytest.raises(ConfigError, match=r"\[teacher\].teacher: .* 401 no key; set OPENAI_API_KEY"):
        opened(open_backend(model, teacher_url=server.url))
    monkeypatch.setenv("OPENAI_API_KEY", "right")
    opened(open_backend(model, teacher_url=server.url)).close()


TEACHER = {"teacher": ENGINE}


def config_of(model: str, **tables: dict[str, Any]):
    raw = {
        "model": {"model": model},
        "training": {"temperature": 1.0},
        "teacher": TEACHER,
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu"}},
        **tables,
    }
    return parse(raw, "t.toml", try_plugins=False)


def with_options(**options: object) -> dict[str, Any]:
    chosen = {"local_files_only": True, "device": "cpu", **options}
    return {"backend": {"backend": "local", "options": chosen}}


AWAY = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("tables", "problem"),
    [
        (with_options(), '[teacher].teacher: got "engine", and no server; set [backend.options].teacher_url'),
        (
            {**with_options(teacher_url=AWAY), "training": {"temperature": 0.7}},
            "[training].temperature: got 0.7; a server scores a teacher's tokens at 1",
        ),
        (
            {**with_options(teacher_url=AWAY), "teacher": {}},
            '[backend.options].teacher_url: has no effect; set [teacher].teacher = "engine"',
        ),
        (
            {**with_options(teacher_model="x"), "teacher": {"teacher": "self"}},
            "[backend.options].teacher_model: has no effect",
        ),
    ],
)
def test_what_a_server_cannot_teach_is_refused_by_the_plan(model: str, tables: dict, problem: str) -> None:
    (found,) = check(config_of(model, **tables), Task((), (), "", 0))
    assert str(found).startswith(problem)


def test_a_plan_knows_the_server_and_that_it_takes_no_memory_here(model: str) -> None:
    config = config_of(model, **with_options(teacher_url=AWAY))
    assert [*check(config, Task((), (), "", 0))] == []
    assert servers(config) == {AWAY: "[backend.options].teacher_url"}
    options = LocalOptions(device="cpu", local_files_only=True, teacher_url=AWAY)
    assert estimate(config, options, []) == estimate(config_of(model, teacher={}), options, [])


COMPARED = ("loss", "grad_norm", "teacher_kl", "teacher_agreement", "teacher_outside", "teacher_tokens")


def run_with(place: Path, name: str, model: str, teacher: dict[str, Any], **options: object):
    training = {
        "batch_size": 2,
        "group_size": 2,
        "max_tokens": 4,
        "temperature": 1.0,
        "lr": 0.01,
        "save_every": 2,
    }
    return started(place, name, model, training=training, teacher=teacher, **with_options(**options))


def adapters_of(files: RunFiles) -> dict[str, torch.Tensor]:
    return load_file(files.checkpoints / "step-000006" / "adapter" / "adapter_model.safetensors")


def assert_same_run(one: RunFiles, other: RunFiles, *, within: float) -> None:
    rows = zip(read_metrics(one.directory), read_metrics(other.directory), strict=True)
    for ours, theirs in rows:
        assert [ours[key] for key in COMPARED] == pytest.approx([theirs[key] for key in COMPARED], abs=within)
    weights = adapters_of(other)
    for name, ours in adapters_of(one).items():
        torch.testing.assert_close(ours, weights[name], rtol=within, atol=within)


def test_a_run_learns_the_same_by_a_server_and_in_process_and_after_a_kill(
    here: Path, model: str, larger: str, server: CompletionsServer
) -> None:
    _, local = run_with(here, "local", model, {"teacher": larger})
    assert worker.run(local.directory, threading.Event()) == 0
    _, whole = run_with(here, "whole", model, TEACHER, teacher_url=server.url)
    assert worker.run(whole.directory, threading.Event()) == 0
    assert read_metrics(whole.directory)[-1]["teacher_kl"] > 0
    assert_same_run(whole, local, within=1e-5)
    directory, killed = run_with(here, "killed", model, TEACHER, teacher_url=server.url)
    command = [sys.executable, "-m", "retrain", "resume", str(directory)]
    kill_when(lambda: len(read_metrics(killed.directory)) >= 3, command, here)
    assert reopen(directory).execute().exit_code == 0
    assert_same_run(killed, whole, within=0)


def test_a_run_outlives_a_server_that_dies_in_its_midst(
    here: Path, model: str, larger: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with serve(larger) as server:
        _, files = run_with(here, "cut", model, TEACHER, teacher_url=server.url)
        first = server.score

        def dies(body: dict[str, Any]) -> tuple[int, bytes]:
            return (502, b"gone") if server.scored > 13 else first(body)

        monkeypatch.setattr(server, "score", dies)
        assert worker.run(files.directory, threading.Event()) == InfrastructureError.exit_code
        assert "502 gone; check that the server runs" in capfd.readouterr().err
        assert 0 < len(read_metrics(files.directory)) < 6
        monkeypatch.setattr(server, "score", first)
        assert worker.run(files.directory, threading.Event()) == 0
    assert [row["step"] for row in read_metrics(files.directory)] == [1, 2, 3, 4, 5, 6]


def test_a_campaign_does_not_start_without_its_teachers_server(here: Path, model: str) -> None:
    with pytest.raises(
        LaunchError, match=r"\[backend.options\].teacher_url: no answer from http://127.0.0.1:9"
    ):
        run_with(here, "away", model, TEACHER, teacher_url=AWAY)
