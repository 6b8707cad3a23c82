"""The tinker backend against a real server: it trains, survives what servers do, and loses no update."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from retrain.backends import BackendSpec, Optimization, Sampling, UpdateStats
from retrain.backends.options import parsed
from retrain.backends.tinker import TinkerOptions, connect
from retrain.backends.tinker.calls import ApiCalls
from retrain.backends.tinker.policy import TinkerBackend
from retrain.base import registry
from retrain.base.errors import ConfigError, InfrastructureError, NonFiniteError, RecordsError, RunFailedError
from retrain.base.rollouts import Group, Loss, Prompt, TrainingSample
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.control.semaphore import FileSemaphore
from retrain.control.semaphore.adaptive import SharedLimit
from tests.tinker_api.running import KEY, MODEL, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ALPHABET = "01234="
PROMPTS = [Prompt(n, f"{n}=", str((n + 1) % 5)) for n in range(4)]
HOW = Sampling(group_size=4, max_tokens=3, temperature=1.0)
STEP = Optimization(lr=1e-2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tinker")


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[RunningServer]:
    running = RunningServer(place, ALPHABET)
    yield running
    running.end()


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> Path:
    return write_tokenizer(place / "tokenizer", ALPHABET)


@pytest.fixture
def spec(
    server: RunningServer, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> BackendSpec:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    semaphore = FileSemaphore(tmp_path / "permits", 3)
    options = {"tokenizer": str(tokenizer), "first_retry_s": 0.01, "retry_budget_s": 60.0, "probe": False}
    return BackendSpec(
        seed=1, model=MODEL, base_url=server.url, options=options, permit=lambda: semaphore, run_name="run"
    )


def with_options(spec: BackendSpec, **options: object) -> BackendSpec:
    return replace(spec, options={**spec.options, **options})


class Awaited:
    """A backend whose methods are awaited in the event loop of the test, which they otherwise wait for."""

    def __init__(self, backend: TinkerBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        method = getattr(getattr(TinkerBackend, name, None), "__wrapped__", None)
        return getattr(self._backend, name) if method is None else partial(method, self._backend)

    async def close(self) -> None:
        await self.session.close()


async def opened(spec: BackendSpec) -> Awaited:
    backend = Awaited(TinkerBackend(spec, parsed(TinkerOptions, spec.options, [])))
    try:
        await backend.open()
    except BaseException:
        await backend.close()
        raise
    return backend


def during(spec: BackendSpec, story: Callable[[Awaited], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a connected backend."""

    async def whole() -> Any:
        backend = await opened(spec)
        try:
            return await story(backend)
        finally:
            await backend.close()

    return asyncio.run(whole())


def loss_of(name: str) -> Loss:
    return Loss(name, registry.find_plugin("losses", name))


def samples_of(groups: list[Group], scale: float = 1.0) -> list[TrainingSample]:
    """Advantages that are equal within a rollout and differ between rollouts."""
    rollouts = [(r, number) for number, group in enumerate(groups) for r in group.rollouts]
    return [
        TrainingSample(r, np.full(len(r.tokens), scale * (-1.0) ** i * (1 + i)), 0.01, number)
        for i, (r, number) in enumerate(rollouts)
    ]


async def train(backend: Awaited, steps: list[list[TrainingSample]]) -> list[UpdateStats]:
    return [await backend.update(samples, loss_of("ppo"), STEP) for samples in steps]


async def fixed_steps(backend: Awaited) -> list[list[TrainingSample]]:
    """Four different steps of data, all sampled from the first policy."""
    groups = await backend.sample(PROMPTS, HOW)
    return [samples_of(groups, scale) for scale in (1.0, -0.5, 2.0, 0.7)]


def test_rollouts_carry_what_the_server_sampled(spec: BackendSpec, server: RunningServer) -> None:
    async def story(backend: Awaited) -> None:
        for group, prompt in zip(await backend.sample(PROMPTS, HOW), PROMPTS, strict=True):
            assert group.prompt is prompt
            for rollout in group.rollouts:
                assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.pieces)
                assert "".join(rollout.pieces) == rollout.text
                assert rollout.truncated == (rollout.tokens[-1] != len(ALPHABET))

    during(spec, story)
    assert server.stats()["stops"] == [f"[{len(ALPHABET)}]"]  # the end token is always asked for


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_the_servers_sum_is_our_normalised_loss(
    spec: BackendSpec, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(backend: Awaited) -> list[tuple[float, float]]:
        found = []
        for _ in range(3):
            samples = samples_of(await backend.sample(PROMPTS, HOW))
            stats = await backend.update(samples, loss_of(name), STEP)
            value = -sum(s.token_weight * s.advantages.sum() for s in samples)  # at ratio 1
            if name == "cispo":
                value = -sum(s.token_weight * (s.advantages * s.rollout.logprobs).sum() for s in samples)
            found.append((stats.loss, value))
            assert stats.grad_norm > 0
        return found

    with caplog.at_level(logging.WARNING):
        found = during(spec, story)
    assert [loss for loss, _ in found] == pytest.approx([value for _, value in found], abs=1e-4)
    assert not caplog.records  # the auditor compares the server's own sum, and the sampler with the trainer


def test_a_policy_version_counts_the_updates_that_its_sampler_has_seen(spec: BackendSpec) -> None:
    async def story(backend: Awaited) -> list[int]:
        versions = []
        for _ in range(3):
            groups = await backend.sample(PROMPTS[:1], HOW)
            versions.append(groups[0].rollouts[0].policy_version)
            await backend.update(samples_of(groups), loss_of("ppo"), STEP)
        return versions

    assert during(spec, story) == [0, 1, 2]


def test_a_sampler_is_made_once_for_all_updates_of_a_batch(spec: BackendSpec) -> None:
    async def story(backend: Awaited) -> list[tuple[int, float | None]]:
        found = []
        samples = samples_of(await backend.sample(PROMPTS, HOW))
        for is_last in (False, False, True):
            stats = await backend.update(samples, loss_of("ppo"), replace(STEP, lr=0.05, is_last=is_last))
            groups = await backend.sample(PROMPTS[:1], HOW)
            found.append((groups[0].rollouts[0].policy_version, stats.approx_kl))
        return found

    versions, distances = zip(*during(spec, story), strict=True)
    assert versions == (0, 0, 3)
    assert distances[0] < 1e-4 < distances[1] < distances[2]


def test_a_resumed_run_goes_on_with_its_optimizer(spec: BackendSpec, tmp_path: Path) -> None:
    (checkpoint := tmp_path / "step").mkdir()

    async def first(backend: Awaited) -> tuple[list[list[TrainingSample]], list[UpdateStats]]:
        steps = await fixed_steps(backend)
        await train(backend, steps[:2])
        await backend.save(checkpoint)
        return steps, await train(backend, steps[2:])

    steps, undisturbed = during(spec, first)

    async def second(backend: Awaited) -> list[UpdateStats]:
        await backend.load(checkpoint)
        return await train(backend, steps[2:])

    assert during(replace(spec, seed=9), second) == undisturbed
    assert json.loads((checkpoint / "tinker.json").read_text())["version"] == 2


@pytest.mark.parametrize("saves", [False, True], ids=["fresh", "saved"])
def test_a_lost_session_costs_no_update(
    spec: BackendSpec, server: RunningServer, tmp_path: Path, saves: bool
) -> None:
    async def undisturbed(backend: Awaited) -> tuple[list[list[TrainingSample]], list[UpdateStats]]:
        steps = await fixed_steps(backend)
        return steps, await train(backend, steps)

    steps, expected = during(spec, undisturbed)

    async def disturbed(backend: Awaited) -> list[UpdateStats]:
        found = await train(backend, steps[:2])
        if saves:
            await backend.save(tmp_path)
        found += await train(backend, steps[2:3])
        server.forget()
        found += await train(backend, steps[3:])
        server.forget()
        groups = await backend.sample(PROMPTS, HOW)
        assert groups[0].rollouts[0].policy_version == 4
        return found

    assert during(spec, disturbed) == expected


def test_updates_beyond_the_replay_limit_are_saved_by_the_way(
    spec: BackendSpec, server: RunningServer
) -> None:
    before = server.stats()["requests"].get("save_weights", 0)

    async def story(backend: Awaited) -> None:
        await train(backend, await fixed_steps(backend))

    during(with_options(spec, replay_steps=2), story)
    assert server.stats()["requests"]["save_weights"] - before == 1


@pytest.mark.parametrize("path", ["asample", "retrieve_future", "forward_backward", "optim_step"])
def test_bursts_of_refusals_and_broken_connections_are_survived(
    spec: BackendSpec, server: RunningServer, path: str
) -> None:
    async def story(backend: Awaited) -> list[UpdateStats]:
        steps = await fixed_steps(backend)
        for status in (502, 429, 0):
            server.fail(path, times=1, status=status)
        await backend.sample(PROMPTS, HOW)
        return await train(backend, steps[:1])

    assert len(during(spec, story)) == 1


def test_a_call_that_hangs_is_given_up_and_made_again(spec: BackendSpec, server: RunningServer) -> None:
    async def story(backend: Awaited) -> int:
        server.fail("asample", times=1, status=504, hang_s=30.0)
        return len(await backend.sample(PROMPTS, HOW))

    assert during(with_options(spec, call_timeout_s=2.0), story) == 4


def test_never_more_calls_are_in_flight_than_there_are_permits(
    server: RunningServer, spec: BackendSpec, tmp_path: Path
) -> None:
    fresh = RunningServer(tmp_path, ALPHABET, "--latency", "0.005")
    semaphore = FileSemaphore(tmp_path / "two", 2)

    async def story(backend: Awaited) -> None:
        groups = await backend.sample(PROMPTS * 3, HOW)
        await asyncio.gather(
            backend.update(samples_of(groups), loss_of("ppo"), STEP), backend.sample(PROMPTS * 3, HOW)
        )
        (tmp_path / "step").mkdir()
        await backend.save(tmp_path / "step")

    try:
        during(replace(spec, base_url=fresh.url, permit=lambda: semaphore), story)
        assert fresh.stats()["most_in_flight"] == 2
        assert not FileSemaphore.inspect(tmp_path / "two").holders
    finally:
        fresh.end()


def test_samples_that_overlap_share_the_requests_of_their_run(spec: BackendSpec) -> None:
    calls: set[object] = set()
    at_once: list[int] = []

    @asynccontextmanager
    async def permit() -> AsyncIterator[None]:
        calls.add(call := object())
        at_once.append(len(calls))
        try:
            yield
        finally:
            calls.remove(call)

    async def story(backend: Awaited) -> None:
        await asyncio.gather(*(backend.sample([prompt], HOW) for prompt in PROMPTS))

    during(with_options(replace(spec, permit=permit), requests_at_once=1), story)
    assert max(at_once) == 1


def test_a_large_step_is_cut_into_requests_that_go_one_after_another(
    spec: BackendSpec, tmp_path: Path
) -> None:
    async def story(backend: Awaited) -> tuple[list[list[TrainingSample]], list[UpdateStats]]:
        steps = await fixed_steps(backend)
        return steps, await train(backend, steps[:2])

    steps, whole = during(spec, story)
    narrow = RunningServer(tmp_path, ALPHABET, "--latency", "0.005", "--chunk", "3")
    semaphore = FileSemaphore(tmp_path / "one", 1)
    try:
        alone = replace(spec, base_url=narrow.url, permit=lambda: semaphore)
        cut = during(alone, lambda backend: train(backend, steps[:2]))
        stats = narrow.stats()
    finally:
        narrow.end()
    assert stats["requests"]["forward_backward"] == 2 * 6  # of 3 datums, 16 in all
    assert stats["most_in_flight"] == 1
    assert [s.loss for s in cut] == pytest.approx([s.loss for s in whole], rel=1e-4)


def test_a_step_that_is_not_finite_is_taken_back(spec: BackendSpec) -> None:
    async def story(backend: Awaited) -> tuple[list[UpdateStats], list[UpdateStats]]:
        steps = await fixed_steps(backend)
        rollout = replace(steps[0][0].rollout, logprobs=np.full(len(steps[0][0].rollout.tokens), -900.0))
        with pytest.raises(NonFiniteError, match="taken back"), np.errstate(all="ignore"):
            await backend.update(
                [replace(steps[0][0], rollout=rollout)], loss_of("importance_sampling"), STEP
            )
        return await train(backend, steps), steps

    after, steps = during(spec, story)
    assert after == during(spec, lambda backend: train(backend, steps))


def test_a_session_that_was_given_up_ends_once_its_calls_have(
    spec: BackendSpec, server: RunningServer
) -> None:
    before = server.stats()["sessions"]

    async def story(backend: Awaited) -> None:
        await backend.sample(PROMPTS[:1], HOW)
        await backend.session.renew(backend.session.generation)
        await backend.sample(PROMPTS[:1], HOW)
        while server.stats()["sessions"] > before + 1:
            await asyncio.sleep(0.01)

    during(spec, story)
    assert server.stats()["sessions"] == before


def test_without_a_permit_to_say_goodbye_a_session_falls_silent(
    spec: BackendSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.backends.tinker.session.GOODBYE_S", 0.1)
    semaphore = FileSemaphore(tmp_path / "one", 1)

    async def story(backend: Awaited) -> list[Any]:
        holders = [(await backend.session.connection.service()).holder]
        await backend.session.renew(backend.session.generation)
        holders.append((await backend.session.connection.service()).holder)
        await semaphore.__aenter__()  # the first session's goodbye may hold the permit on this event loop
        return holders

    for holder in during(replace(spec, permit=lambda: semaphore), story):
        with pytest.raises(RuntimeError, match="closed"), holder.aclient(ClientConnectionPoolType.SESSION):
            pass
    semaphore.release()


def test_an_api_that_stays_away_ends_the_run_as_infrastructure(spec: BackendSpec, tmp_path: Path) -> None:
    doomed = RunningServer(tmp_path, ALPHABET)

    async def story(backend: Awaited) -> None:
        await backend.sample(PROMPTS[:1], HOW)
        doomed.kill()
        impatient = TinkerOptions(first_retry_s=0.01, call_timeout_s=1.0, retry_budget_s=0.6)
        backend.session.connection.calls.options = impatient
        with pytest.raises(InfrastructureError, match=r"sampling prompt 0: failed \d times") as raised:
            await backend.sample(PROMPTS[:1], HOW)
        assert raised.value.exit_code == 75

    try:
        during(replace(spec, base_url=doomed.url), story)
    finally:
        doomed.end()


def test_an_unreachable_server_is_named_before_anything_is_spent(spec: BackendSpec) -> None:
    away = with_options(replace(spec, base_url="http://127.0.0.1:9"), connect_timeout_s=0.5)
    with pytest.raises(InfrastructureError, match=r"127\.0\.0\.1:9 cannot be reached.*base_url"):
        during(away, train)  # type: ignore[arg-type]  # never called


UNPAID = pytest.mark.parametrize("path", ["create_session", "client/config"])


@UNPAID
def test_a_bill_that_is_to_be_paid_before_a_session_opens_is_told(
    spec: BackendSpec, server: RunningServer, path: str
) -> None:
    server.fail(path, times=1, status=402)
    with pytest.raises(InfrastructureError, match=r"waits for its bill to be paid .*402.* `retrain resume`"):
        during(spec, train)  # type: ignore[arg-type]  # never called


@UNPAID
def test_a_bill_that_is_to_be_paid_before_a_session_is_renewed_is_waited_for(
    spec: BackendSpec, server: RunningServer, path: str
) -> None:
    async def story(backend: Awaited) -> list[Group]:
        await backend.sample(PROMPTS, HOW)
        server.forget()
        server.fail(path, times=1, status=402)
        return await backend.sample(PROMPTS, HOW)

    assert len(during(with_options(spec, first_retry_s=0.01), story)) == len(PROMPTS)


@pytest.mark.parametrize("key", ["tml-another", "no-prefix"])
def test_a_refused_key_is_an_error_of_configuration(
    spec: BackendSpec, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(ConfigError, match="TINKER_API_KEY") as raised:
        during(spec, train)  # type: ignore[arg-type]  # never called
    assert key not in str(raised.value)


def test_an_unknown_model_is_named_with_its_key(spec: BackendSpec) -> None:
    with pytest.raises(
        ConfigError, match=r"\[model\].model: .* refuses 'no/model'.*there is 'test/characters'"
    ):
        during(replace(spec, model="no/model"), lambda backend: backend.sample(PROMPTS, HOW))


def test_a_checkpoint_that_the_api_has_deleted_is_said(spec: BackendSpec, tmp_path: Path) -> None:
    facts = {"format": 1, "path": "tinker://gone/weights/a", "version": 3, "model": MODEL, "lora_rank": 32}
    (tmp_path / "tinker.json").write_text(json.dumps(facts))
    with pytest.raises(RecordsError, match=r"tinker://gone/weights/a: the API does not load.*remove"):
        during(spec, lambda backend: backend.load(tmp_path))


def test_a_tokenizer_without_an_end_is_refused(spec: BackendSpec, tmp_path: Path) -> None:
    endless = with_options(spec, tokenizer=str(write_tokenizer(tmp_path / "t", ALPHABET, end=None)))
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        during(endless, train)  # type: ignore[arg-type]  # never called


def test_a_tokenizer_that_is_not_there_is_named(spec: BackendSpec, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer: the tokenizer '.*nowhere' cannot be loaded"):
        during(with_options(spec, tokenizer=str(tmp_path / "nowhere")), train)  # type: ignore[arg-type]


def test_samples_whose_lengths_differ_never_reach_the_server(
    spec: BackendSpec, server: RunningServer
) -> None:
    async def story(backend: Awaited) -> None:
        sample = (await fixed_steps(backend))[0][0]
        with pytest.raises(RunFailedError, match="advantages"):
            await backend.update([replace(sample, advantages=np.ones(7))], loss_of("ppo"), STEP)

    before = server.stats()["requests"].get("forward_backward", 0)
    during(spec, story)
    assert server.stats()["requests"].get("forward_backward", 0) == before


def test_a_lost_call_tells_permits_nothing(tmp_path: Path) -> None:
    async def lost() -> None:
        raise ConnectionError("gone")

    told: list[CallFacts] = []
    semaphore = FileSemaphore(tmp_path, 1)
    spec = BackendSpec(0, permit=lambda: semaphore, observe_call=told.append)
    calls = ApiCalls(spec, TinkerOptions())
    with pytest.raises(ConnectionError):
        asyncio.run(calls.once("sample", lost))
    assert told == []


def test_overload_answers_that_the_sdk_swallows_halve_the_permits(
    spec: BackendSpec, server: RunningServer, tmp_path: Path
) -> None:
    semaphore = FileSemaphore(tmp_path / "adaptive", 8)

    async def story(backend: Awaited) -> None:
        await backend.sample(PROMPTS, HOW)
        server.fail("asample", times=1, status=429)
        await backend.sample(PROMPTS, HOW)

    shared = SharedLimit(tmp_path / "adaptive", semaphore, "run")
    during(replace(spec, permit=lambda: semaphore, observe_call=shared.observe), story)
    assert semaphore.permits == 4
    assert "overloaded" in (tmp_path / "adaptive" / "adaptive.jsonl").read_text()


class Gate:
    """A permit that is given at once, or waited for without an end."""

    def __init__(self) -> None:
        self.is_shut = False
        self.is_waited_for, self.is_given_up = threading.Event(), threading.Event()

    async def __aenter__(self) -> None:
        if self.is_shut:
            self.is_waited_for.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.is_given_up.set()

    async def __aexit__(self, *error: object) -> None:
        """Nothing to give back."""


def test_an_interrupt_ends_the_call_in_flight_and_the_session_closes(spec: BackendSpec) -> None:
    gate, main = Gate(), threading.get_ident()
    backend = connect(replace(spec, permit=lambda: gate))  # type: ignore[arg-type, return-value]

    def interrupt() -> None:
        gate.is_waited_for.wait()
        while sys._current_frames()[main].f_code.co_name != "wait":  # for the call, which it still begins
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    gate.is_shut = True
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        backend.sample(PROMPTS, Sampling(1, 2, 1.0))
    assert gate.is_given_up.wait(60)
    gate.is_shut = False
    backend.close()
    backend.close()
