"""Sampling through an OpenAI-compatible server on loopback: same protocol, same log-probabilities."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.engines import openai as engine_module
from retrain.backends.local import connect
from retrain.base.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.base.rollouts import Prompt
from retrain.config.schema import EnvironmentSection
from retrain.control.semaphore import FileSemaphore
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from retrain.trainer.episodes import Episodes
from retrain.trainer.turn_sampling import TurnSampler
from tests.extras.completions_server import CompletionsServer, serve
from tests.extras.local_policies import (
    UNEVEN,
    as_samples,
    chosen,
    draw,
    loss_named,
    open_backend,
    plain_logprobs,
    stir,
)
from tests.extras.tiny_models import save_tiny_model
from tests.trainer.test_trainer import make_run

HOW = Optimization(lr=1e-2, temperature=0.8)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """Have calls made again sooner than users wait."""
    monkeypatch.setattr(engine_module, "FIRST_WAIT_S", 0.001)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture
def server(model):
    with serve(model) as running:
        yield running


def through(server: CompletionsServer, model: str, **options):
    backend = open_backend(model, engine="openai", engine_url=server.url, **options)
    stir(backend)
    return backend


def assert_honest(backend, samples, temperature: float = 0.8) -> None:
    for sample, logps in zip(samples, plain_logprobs(backend, samples, temperature), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)


def test_a_server_samples_with_the_adapters_of_every_update(server, model):
    backend = through(server, model)
    for step in range(3):
        groups = draw(backend)
        assert [len(g.rollouts) for g in groups] == [3] * 5
        samples = as_samples(groups)
        assert_honest(backend, samples)
        assert {s.rollout.policy_version for s in samples} == {step}
        backend.update(samples, loss_named("ppo"), HOW)
    names = [body["lora_name"] for path, body, _ in server.requests if path.endswith("/load_lora_adapter")]
    assert len(set(names)) == len(names) == 3
    assert len(server.adapters) == 1


def test_a_server_is_given_adapters_once_for_all_updates_of_a_batch(server, model):
    backend = through(server, model)
    samples = as_samples(draw(backend))
    for is_last in (False, True):
        backend.update(samples, loss_named("ppo"), replace(HOW, is_last=is_last))
    fresh = as_samples(draw(backend))
    assert_honest(backend, fresh)
    assert {s.rollout.policy_version for s in fresh} == {2}
    assert sum(path.endswith("/load_lora_adapter") for path, _, _ in server.requests) == 2


def beside(backend, **how):
    """Groups drawn by another thread, while this one waits."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(draw, backend, **how).result(timeout=120)


def test_a_server_is_checked_while_an_update_has_its_adapters_switched_off(server, model):
    backend, fresh = through(server, model), []
    samples = as_samples(draw(backend))
    backend.update(samples, loss_named("ppo"), HOW)  # the next answers are checked

    def meanwhile(*_: object) -> None:  # the first pass of an update with a KL term is the reference's
        waiting.remove()
        fresh.extend(beside(backend))

    waiting = backend.policy.body.register_forward_pre_hook(meanwhile)
    backend.update(samples, loss_named("ppo"), replace(HOW, kl_coef=0.1))
    assert {r.policy_version for group in fresh for r in group.rollouts} == {1}


def test_a_server_is_given_the_adapters_that_a_run_starts_from(server, model, tmp_path):
    first = open_backend(model)
    stir(first)
    first.save(tmp_path)
    backend, fresh = open_backend(model, engine="openai", engine_url=server.url, seed=9), []
    backend.start_from(str(tmp_path / "adapter"), is_reference=True)
    samples = as_samples(draw(backend))
    assert_honest(first, samples)

    def meanwhile(*_: object) -> None:  # while the reference's adapters are in the model
        waiting.remove()
        fresh.extend(beside(backend))

    waiting = backend.policy.body.register_forward_pre_hook(meanwhile)
    stats = backend.update(samples, loss_named("ppo"), replace(HOW, kl_coef=0.1))
    assert stats.reference_kl == pytest.approx(0, abs=1e-9)
    assert_honest(first, as_samples(fresh))
    assert (
        backend.update(as_samples(draw(backend)), loss_named("ppo"), replace(HOW, kl_coef=0.1)).reference_kl
        > 0
    )


def test_samples_drawn_beside_an_optimizer_step_are_of_the_policy_before_it(server, model, tmp_path):
    samples = as_samples(draw(open_backend(model)))
    backend, fresh = through(server, model), []
    backend.save(tmp_path)
    hook = register_optimizer_step_post_hook(lambda *_: fresh.extend(beside(backend)))
    try:
        backend.update(samples, loss_named("ppo"), HOW)
    finally:
        hook.remove()
    before = open_backend(model)
    before.load(tmp_path)
    assert_honest(before, as_samples(fresh))
    assert {r.policy_version for group in fresh for r in group.rollouts} == {0}


def test_adapters_stay_loaded_while_a_call_samples_with_them(server, model, tmp_path):
    samples, calls, later = as_samples(draw(open_backend(model))), iter(range(100)), []

    @contextmanager
    def permit():
        if next(calls) == 1:  # the first call that samples, after the one that loads the adapters
            backend.update(samples, loss_named("ppo"), HOW)
            later.extend(draw(backend))
        yield

    options = {"engine": "openai", "engine_url": server.url, "device": "cpu", "local_files_only": True}
    backend = connect(BackendSpec(seed=0, model=model, lora_rank=4, options=options, permit=permit))
    backend.save(tmp_path)
    first = as_samples(draw(backend))
    before = open_backend(model)
    before.load(tmp_path)
    assert_honest(before, first)
    assert_honest(backend, as_samples(later))
    assert [s.rollout.policy_version for s in (first[0], *as_samples(later)[:1])] == [0, 1]
    backend.update(samples, loss_named("ppo"), HOW)
    draw(backend)
    assert len(server.adapters) == 1


def test_a_run_samples_on_a_server_beside_its_training_with_a_kl_term(server, model, tmp_path):
    options = {"engine": "openai", "engine_url": server.url, "device": "cpu", "local_files_only": True}
    files = make_run(
        tmp_path / "run",
        {
            "model": {"model": model, "lora_rank": 4},
            "training": {
                "seed": 0,
                "max_steps": 8,
                "batch_size": 2,
                "group_size": 4,
                "max_tokens": 8,
                "temperature": 1.0,
                "lr": 1e-2,
            },
            "algorithm": {"kl_coef": 0.05},
            "data": {"task": "addition", "options": {"digits": 1}},
            "backend": {"backend": "local", "options": options},
            "rate_limiter": {"max_staleness": 2, "workers": 2},
        },
    )
    assert worker.run(files.directory, threading.Event()) == 0
    assert len(read_metrics(files.directory)) == 8


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_measurement_by_a_server_draws_nothing_from_the_run_s_random_numbers(server, model, temperature):
    backend = through(server, model)
    before = backend.generator.get_state()
    backend.sample(UNEVEN, Sampling(2, 4, temperature, seed=3))
    assert torch.equal(backend.generator.get_state(), before)


def test_adapters_are_not_sent_again_between_updates(server, model):
    backend = through(server, model)
    draw(backend)
    draw(backend)
    assert [path for path, _, _ in server.requests].count("/v1/load_lora_adapter") == 1


def test_a_restored_policy_is_sent_again(server, model, tmp_path):
    backend = through(server, model)
    draw(backend)
    backend.save(tmp_path)
    stir(backend, seed=1)
    backend.load(tmp_path)
    assert_honest(backend, as_samples(draw(backend)))


def test_sglang_s_ways_are_known(model):
    with serve(model, prefix="") as server:
        backend = through(server, model, engine_reload="/load_lora_adapter")
        assert_honest(backend, as_samples(draw(backend)))
        assert len(server.adapters) == 1


def test_closing_has_the_server_forget_and_leaves_no_files(server, model, tmp_path):
    backend = through(server, model, engine_adapters=str(tmp_path / "shared"))
    draw(backend)
    assert list((tmp_path / "shared").iterdir())
    backend.close()
    backend.close()
    assert (server.adapters, list((tmp_path / "shared").iterdir())) == ({}, [])


@pytest.mark.parametrize("name", ["file/shared", "\0"])
def test_a_directory_for_adapters_that_cannot_be_made_is_named(server, model, tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"\[backend.options\].engine_adapters: cannot be made \("):
        through(server, model, engine_adapters=str(tmp_path / name))


def test_a_full_disk_that_has_no_room_for_adapters_may_be_freed(server, model, tmp_path, monkeypatch):
    def refuse(**_: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(InfrastructureError, match=r"engine_adapters: cannot be made \(.*No space left"):
        through(server, model, engine_adapters=str(tmp_path))


def test_a_server_s_hiccup_is_waited_out(server, model):
    server.failures = 3
    assert len(draw(through(server, model))) == 5


def test_a_server_that_stays_away_is_an_infrastructure_failure_that_names_it(server, model):
    backend = through(server, model)
    server.failures = 100
    with pytest.raises(InfrastructureError, match=f"{server.url}/v1/load_lora_adapter: 503 warming up"):
        draw(backend)


def test_nobody_listening_is_an_infrastructure_failure(model):
    with serve(model) as gone:
        backend = through(gone, model)
    with pytest.raises(
        InfrastructureError, match=r"check that the server runs and \[backend.options\].engine_url"
    ):
        draw(backend)


def test_a_refusal_is_a_mistake_in_the_configuration_and_not_tried_again(server, model):
    backend = through(server, model, engine_reload="/v2/load_lora_adapter")
    with pytest.raises(ConfigError, match=r"404 no such path; .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        draw(backend)
    assert len(server.requests) == 1


def test_a_refused_key_is_a_mistake_in_the_configuration(server, model):
    server.refusal = b"who are you?"
    with pytest.raises(ConfigError, match=r"401 who are you\?; set OPENAI_API_KEY"):
        draw(through(server, model))
    assert len(server.requests) == 1


def test_a_server_that_was_begun_anew_is_given_the_adapters_again(server, model):
    backend = through(server, model)
    draw(backend)
    server.adapters.clear()
    assert_honest(backend, as_samples(draw(backend)))
    assert len(server.adapters) == 1


def test_a_server_that_stops_to_apply_adapters_is_found_out(server, model):
    server.ignores_adapters = True
    backend = through(server, model)
    backend.update(as_samples(draw(backend)), loss_named("ppo"), HOW)
    stir(backend, seed=1)
    with pytest.raises(RunFailedError, match="applies the adapters"):
        draw(backend)


def test_an_answer_without_token_ids_is_told(server, model):
    server.forgets_token_ids = True
    with pytest.raises(RunFailedError, match="return_token_ids"):
        draw(through(server, model))


def choice(**changes: object) -> bytes:
    logprobs = {"tokens": ["token_id:3"], "token_logprobs": [-1.0]}
    return json.dumps(
        {"choices": [{"index": 0, "finish_reason": "stop", "logprobs": logprobs} | changes]}
    ).encode()


@pytest.mark.parametrize(
    "rubbish",
    [
        b"[]",
        b"null",
        b'{"choices": [3]}',
        b'{"choices": null}',
        b'{"error": "out of quota"}',
        choice(logprobs=None),
        choice(logprobs={"tokens": [3], "token_logprobs": [-1.0]}),
        choice(logprobs={"tokens": ["token_id:3"], "token_logprobs": [None]}),
        choice(logprobs={"tokens": ["token_id:3"], "token_logprobs": [-1.0, -2.0]}),
        choice(logprobs={"tokens": [], "token_logprobs": []}),
        choice(),
    ],
    ids=lambda rubbish: rubbish[:60].decode(),
)
def test_an_answer_that_is_none_ends_the_run(server, model, rubbish):
    server.rubbish = rubbish
    with pytest.raises(RunFailedError, match=server.url):
        draw(through(server, model))


@pytest.mark.parametrize(
    "rubbish", [b"", b"<html>busy</html>", b"[" * 100_000], ids=["nothing", "html", "deep"]
)
def test_an_answer_that_is_no_json_is_asked_for_again(server, model, rubbish):
    server.rubbish = rubbish
    with pytest.raises(InfrastructureError, match="/v1/completions"):
        draw(through(server, model))
    assert [path for path, _, _ in server.requests].count("/v1/completions") == engine_module.ATTEMPTS


@pytest.mark.parametrize("code", ["overloaded", "503", None, 1e999])
def test_an_error_in_an_answer_is_told_whatever_its_code(server, model, code):
    server.rubbish = json.dumps({"error": {"message": "out of pages", "code": code}}).encode()
    with pytest.raises(InfrastructureError, match=r"/v1/completions: .*out of pages"):
        draw(through(server, model))


@pytest.mark.parametrize("token", [-1, 40, 10**9])
def test_a_token_that_the_model_does_not_know_is_told(server, model, token):
    logprobs = {"tokens": [f"token_id:{token}"], "token_logprobs": [-1.0]}
    server.rubbish = json.dumps(
        {"choices": [json.loads(choice(logprobs=logprobs))["choices"][0] | {"index": i} for i in range(15)]}
    ).encode()
    with pytest.raises(RunFailedError, match=f"drew token {token}, and this model knows 40"):
        draw(through(server, model))


def test_the_key_goes_nowhere_else_and_is_not_repeated(server, model, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with serve(model) as other:
        server.moved_to = f"{other.url}/v1/load_lora_adapter"
        with pytest.raises(ConfigError, match="302"):
            draw(through(server, model))
        assert not other.requests
    server.moved_to, server.refusal = "", b"unknown key: secret"
    with pytest.raises(ConfigError, match=r"401 unknown key: \*\*\*"):
        draw(through(server, model))


@pytest.mark.parametrize("temperature", [0.7, 3.0])
def test_logprobs_before_the_temperature_are_told_with_the_flag_to_set(server, model, temperature):
    server.reports_raw_logprobs = True
    with pytest.raises(RunFailedError, match="--logprobs-mode processed_logprobs"):
        draw(through(server, model), temperature=temperature)


def test_logprobs_before_the_cut_are_told_likewise(model):
    with serve(model, top_p=0.9) as server:
        server.reports_raw_logprobs = True
        with pytest.raises(RunFailedError, match="--logprobs-mode processed_logprobs"):
            draw(through(server, model, top_p=0.9), temperature=1.0)


def test_a_server_cuts_the_distribution_as_it_is_asked_to(model):
    with serve(model, top_k=3, min_p=0.01) as server:
        draw(through(server, model, top_k=3, min_p=0.01))
        (asked,) = [body for path, body, _ in server.requests if path == "/v1/completions"]
        assert (asked["top_k"], asked["min_p"], asked["top_p"]) == (3, 0.01, 1.0)


def test_a_server_that_does_not_cut_is_told(server, model):
    with pytest.raises(RunFailedError, match="log-probabilities are"):
        draw(through(server, model, top_k=2))


def test_a_server_with_other_weights_is_told(model, tmp_path):
    other = save_tiny_model(tmp_path, hidden=32, context=64, seed=1)
    with serve(other) as server, pytest.raises(RunFailedError, match="serves the same weights"):
        draw(through(server, model))


def test_every_call_holds_a_permit(server, model):
    held, most = threading.Semaphore(1), []

    @contextmanager
    def permit():
        assert held.acquire(blocking=False)
        most.append(1)
        yield
        held.release()

    options = {"engine": "openai", "engine_url": server.url, "device": "cpu", "local_files_only": True}
    backend = connect(BackendSpec(seed=0, model=model, lora_rank=4, options=options, permit=permit))
    draw(backend)
    assert backend.info.remote
    assert len(most) == len(server.requests) == 2
    backend.close()
    assert len(most) == len(server.requests) == 3


def test_leaving_waits_for_no_permit_that_others_hold(server, model, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_module, "RELEASE_S", 0.05)
    semaphore = FileSemaphore(tmp_path, 1)
    options = {"engine": "openai", "engine_url": server.url, "device": "cpu", "local_files_only": True}
    spec = BackendSpec(seed=0, model=model, lora_rank=4, options=options, permit=lambda: semaphore)
    backend = connect(spec)
    draw(backend)
    semaphore.acquire()
    backend.close()
    assert server.adapters
    semaphore.release()


def test_refusals_are_told_where_permits_adapt(server, model):
    server.failures, told = 2, []
    options = {"engine": "openai", "engine_url": server.url, "device": "cpu", "local_files_only": True}
    draw(connect(BackendSpec(0, model=model, lora_rank=4, options=options, observe_call=told.append)))
    assert [call.overloaded for call in told] == [True, True, False, False]


def test_a_call_that_reached_nobody_tells_permits_nothing(model):
    told = []
    with serve(model) as gone:
        options = {"engine": "openai", "engine_url": gone.url, "device": "cpu", "local_files_only": True}
        spec = BackendSpec(0, model=model, lora_rank=4, options=options, observe_call=told.append)
        backend = connect(spec)
    with pytest.raises(InfrastructureError):
        draw(backend)
    assert told == []


def test_the_key_comes_from_the_environment(server, model, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    draw(through(server, model))
    assert {key for _, _, key in server.requests} == {"Bearer secret"}


def test_a_key_that_no_header_can_hold_is_refused_unshown(server, model, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sec\nret")
    with pytest.raises(ConfigError, match="OPENAI_API_KEY is not a valid key") as raised:
        through(server, model)
    assert "ret" not in str(raised.value).replace("retrain", "")


def test_equal_prompts_of_a_call_are_sampled_apart(server, model):
    backend = through(server, model)
    groups = backend.sample([UNEVEN[0]] * 8, Sampling(1, 9, 1.0))
    assert len({group.rollouts[0].tokens for group in groups}) == 8


def test_a_prompt_near_the_end_of_the_context_cuts_no_other(server, model):
    backend = through(server, model)
    lengths = {len(backend.text.encode(prompt)): prompt for prompt in UNEVEN}
    room, context = 5, backend.policy.context
    filler = "1" * (context - room - min(lengths))
    long = Prompt(9, lengths[min(lengths)].text + filler, "1")
    assert len(backend.text.encode(long)) == context - room
    prompts = [UNEVEN[0], long, UNEVEN[1]]
    groups = backend.sample(prompts, Sampling(8, 30, 1.0, enough=3, due=1))
    assert [group.prompt for group in groups] == prompts
    longest = [max(len(one.tokens) for one in group.rollouts) for group in groups]
    assert longest[1] <= room < min(longest[0], longest[2])
    assert_honest(backend, as_samples(groups), 1.0)


def test_episodes_on_a_server_are_sampled_by_several_calls_at_once(server, model):
    backend = through(server, model)
    first_asks = threading.Event()

    class Talk:
        """Its second prompt asks once the first one's call is on its way."""

        async def start(self, prompt):
            if prompt.id:
                await asyncio.to_thread(first_asks.wait, 60)
            return prompt.text

        async def step(self, completion):
            return "3", 1.0, False

    sampler, is_joined = TurnSampler(backend, 4), threading.Barrier(2, timeout=60)

    def sample(asked, how):
        first_asks.set()
        if any(isinstance(one, Prompt) for one in asked):
            is_joined.wait()  # the calls for the two prompts are made at the same time
        return sampler(asked, how)

    episodes = Episodes(EnvironmentSection(max_turns=3), Talk, sample, calls_at_once=2)
    groups = episodes.play([Prompt(n, "7=", "") for n in range(2)], Sampling(1, 12, 0.8))
    episodes.close()
    for rollout in (group.rollouts[0] for group in groups):
        prompt, (read, places) = backend.text.encode(rollout.prompt), rollout.placed()
        logits = backend.policy.causal(input_ids=torch.tensor([[*prompt, *read]])).logits[0] / 0.8
        at = [len(prompt) - 1 + place for place in places]
        logps = logits[at].log_softmax(-1)[range(len(at)), list(rollout.tokens)]
        assert np.allclose(logps.detach(), rollout.logprobs, atol=1e-4)
        assert len(rollout.given) > 0
