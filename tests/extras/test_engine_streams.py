"""Streamed completions: assembled from parts, watched for silence, cancelled where nobody waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from retrain.backends import BackendSpec, Sampling
from retrain.backends.engines import openai as engine_module
from retrain.backends.engines.openai import StreamedCompletion
from retrain.backends.local import connect
from retrain.backends.local.policy import LocalBackend
from retrain.backends.progress import BackendProgress, SamplingProgress
from retrain.backends.rows import CallsProgress
from retrain.base.errors import InfrastructureError, InterruptedRunError
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.extras.completions_server import CompletionsServer, serve
from tests.extras.local_policies import UNEVEN, as_samples, chosen, draw, plain_logprobs
from tests.extras.tiny_models import save_tiny_model
from tests.semaphore_processes import wait_until
from tests.trainer.test_trainer import make_run

LONG, WHOLE = 16, 10  # tokens, at most, of completions that are streamed here, and of those that are not


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have shorter completions streamed, and sooner again, than users do: a real policy writes them here."""
    monkeypatch.setattr(engine_module, "FIRST_WAIT_S", 0.001)
    monkeypatch.setattr(engine_module, "LONGEST_WHOLE", WHOLE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=128)


@pytest.fixture
def server(model: str) -> Iterator[CompletionsServer]:
    with serve(model) as running:
        yield running


def options_for(server: CompletionsServer, **more: object) -> dict[str, object]:
    where = {"engine": "openai", "engine_url": server.url, "device": "cpu", "local_files_only": True}
    return where | more


def through(server: CompletionsServer, model: str, **more: object) -> LocalBackend:
    return connect(BackendSpec(seed=0, model=model, lora_rank=4, options=options_for(server, **more)))


def assert_honest(backend: LocalBackend, **how: int) -> None:
    samples = as_samples(draw(backend, **how))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        ours, theirs = chosen(logps, sample).detach().tolist(), sample.rollout.logprobs.tolist()
        assert ours == pytest.approx(theirs, abs=1e-4)


def asked_of(server: CompletionsServer) -> list[bool]:
    """Return for each call that samples whether it asked for a stream."""
    return [bool(body.get("stream")) for path, body, _ in server.requests if path == "/v1/completions"]


def test_long_completions_come_in_parts_with_all_tokens_and_logprobs(server, model):
    backend = through(server, model)
    assert_honest(backend, max_tokens=LONG)
    assert_honest(backend, max_tokens=9)
    assert asked_of(server) == [True, False]


def test_a_call_tells_how_far_it_is(server, model):
    told: list[BackendProgress] = []
    spec = BackendSpec(0, model=model, lora_rank=4, options=options_for(server), observe=told.append)
    began_s: list[float] = []

    def is_held(body: object) -> bool:
        """Hold the answers until progress was told, which it is every half second."""
        began_s.append(time.monotonic())
        return time.monotonic() < began_s[0] + 0.6

    server.is_held = is_held
    draw(connect(spec), max_tokens=LONG)
    first = next(progress for progress in told if isinstance(progress, SamplingProgress))
    assert first.rollouts == 15
    assert first.finished < 15
    assert first.tokens > 0


def test_a_call_may_begin_while_another_tells_how_far_it_is() -> None:
    progress = CallsProgress(lambda _: None, every_s=0.0)
    second = progress.call()  # kept, because a call that is let go of ends
    beginning = threading.Thread(target=second.__enter__)

    class Rows(list[StreamedCompletion]):
        def __iter__(self) -> Iterator[StreamedCompletion]:
            if beginning.ident is None:
                beginning.start()
                beginning.join(0.1)
            return super().__iter__()

    with progress.call() as tell:
        tell(Rows([StreamedCompletion()]))
    beginning.join()
    assert progress.is_busy()


def test_a_server_that_does_not_stream_as_vllm_does_is_asked_for_whole_answers(model):
    with serve(model, prefix="") as server:
        assert_honest(through(server, model, engine_reload="/load_lora_adapter"), max_tokens=LONG)
        assert asked_of(server) == [False]


def test_a_stream_that_breaks_off_is_asked_for_again(server, model):
    server.broken_streams = 2
    assert_honest(through(server, model), max_tokens=LONG)
    assert len(asked_of(server)) == 3


def test_a_server_that_falls_silent_is_given_up(server, model):
    server.is_held = lambda body: True
    with pytest.raises(InfrastructureError, match=r"no data for 0\.1 s"):
        draw(through(server, model, engine_timeout_s=0.1), max_tokens=LONG)
    wait_until(lambda: server.running == 0)


def test_a_run_that_leaves_frees_its_places_on_the_server_and_measures_to_the_end(server, model):
    is_leaving, is_held = threading.Event(), threading.Event()
    is_held.set()
    server.is_held = lambda body: is_held.is_set()
    spec = BackendSpec(0, model=model, lora_rank=4, options=options_for(server), is_leaving=is_leaving.is_set)
    backend = connect(spec)
    with ThreadPoolExecutor(2) as threads:
        training = threads.submit(draw, backend, max_tokens=LONG)
        measuring = threads.submit(backend.sample, UNEVEN, Sampling(1, LONG, 0.8, seed=1, evaluates=True))
        wait_until(lambda: server.running == 2)
        is_leaving.set()
        with pytest.raises(InterruptedRunError):
            training.result()
        wait_until(lambda: server.running == 1)
        is_held.clear()
        assert len(measuring.result()) == len(UNEVEN)
    with pytest.raises(InterruptedRunError):
        draw(backend)
    backend.close()


def run_on(
    server: CompletionsServer,
    model: str,
    directory: Path,
    engine_spare: float = 0.0,
    max_tokens: int = LONG,
    **more: object,
) -> RunFiles:
    training = {"seed": 0, "max_steps": 4, "batch_size": 2, "group_size": 2, "max_tokens": max_tokens}
    training["eval_at_start"] = False  # the first prompts that the server sees are those of the first step
    raw = {
        "model": {"model": model, "lora_rank": 4},
        "training": training,
        "data": {"task": "addition", "options": {"digits": 1}},
        "backend": {"backend": "local", "options": options_for(server, engine_spare=engine_spare)},
        **more,
    }
    return make_run(directory, raw)


def prompts_of(server: CompletionsServer) -> list[object]:
    return [body["prompt"] for path, body, _ in server.requests if path == "/v1/completions"]


def test_a_run_stops_in_the_middle_of_a_step_and_takes_it_again(server, model, tmp_path):
    files, stop = run_on(server, model, tmp_path / "run"), threading.Event()
    server.is_held = lambda body: len(prompts_of(server)) > 2
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.run, files.directory, stop)
        wait_until(lambda: server.running == 1 and len(prompts_of(server)) == 3)
        stop.set()
        assert running.result() == 130
    wait_until(lambda: server.running == 0)
    assert [row["step"] for row in read_metrics(files.directory)] == [1, 2]
    server.is_held = lambda body: False
    assert worker.run(files.directory, threading.Event()) == 0
    assert [row["step"] for row in read_metrics(files.directory)] == [1, 2, 3, 4]
    assert prompts_of(server)[2] == prompts_of(server)[3]


def test_the_load_of_the_server_is_in_the_rows(server, model, tmp_path):
    files = run_on(server, model, tmp_path / "run")
    server.is_held = lambda body: server.looks < 2  # then the first one is known
    assert worker.run(files.directory, threading.Event()) == 0
    first = read_metrics(files.directory)[0]
    assert (first["engine_running"], first["engine_waiting"], first["engine_kv_fraction"]) == (1, 2, 0.25)


def test_the_slowest_prompts_are_cancelled_and_due_in_the_next_step(server, model, tmp_path):
    files = run_on(server, model, tmp_path / "run", engine_spare=0.5)

    def is_slow(body: dict[str, Any], index: int) -> bool:
        """The first prompt of the first step never ends; in the second step it is waited for."""
        first = prompts_of(server)[0]
        return body["prompt"] == first and index < 2

    server.is_slow = is_slow
    assert worker.run(files.directory, threading.Event()) == 0
    seen = prompts_of(server)[:4]  # then held-out prompts
    assert [len(prompts) for prompts in seen] == [3] * 4
    assert seen[1][0] == seen[0][0]
    assert [row["batch_size"] for row in read_metrics(files.directory)] == [2] * 4
    wait_until(lambda: server.running == 0)


def test_further_prompts_of_a_refill_begin_while_slow_ones_finish(server, model, tmp_path):
    """The first prompt is answered once a third one was asked for, in place of the second, which ties."""
    data = {"task": "addition", "options": {"digits": 1}, "refill": "tied", "eval_prompts": 1}
    files = run_on(server, model, tmp_path / "run", data=data)

    def is_held(body: dict[str, Any]) -> bool:
        asked = prompts_of(server)
        return body["prompt"] == asked[0] and len(asked) < 3

    server.is_held = is_held
    assert worker.run(files.directory, threading.Event()) == 0
    for row in read_metrics(files.directory):
        assert row["batch_size"] == 2
        assert row["refill_sampled"] == 6  # nothing that an untrained policy writes is right
        assert row["zero_signal_group_fraction"] == 1.0
    trained = prompts_of(server)[: 4 * 8]
    assert all(len(prompts) == 1 for prompts in trained[3:8])  # each in a call of its own


def test_what_nobody_trains_on_any_more_is_cancelled_at_the_end(server, model, tmp_path):
    in_turn = run_on(server, model, tmp_path / "in-turn")
    assert worker.run(in_turn.directory, threading.Event()) == 0
    needed = prompts_of(server)
    files = run_on(server, model, tmp_path / "run", rate_limiter={"max_staleness": 8, "workers": 3})
    server.is_held = lambda body: body["prompt"] not in needed
    assert worker.run(files.directory, threading.Event()) == 0
    wait_until(lambda: server.running == 0)
    assert len(read_metrics(files.directory)) == 4
