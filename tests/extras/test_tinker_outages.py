"""The API pauses, or is down: both are told at once, and count neither as failures nor as load."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tinker import APIStatusError

from retrain.backends import BackendSpec, Sampling
from retrain.backends.progress import BackendProgress, OutageProgress
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.calls import ApiCalls, Outages
from retrain.base.rollouts import Prompt
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.control.semaphore import FileSemaphore
from tests.extras.test_tinker_backend import Awaited, opened
from tests.tinker_api.running import MODEL, RunningServer, serve, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = [*CALLS_SDK, pytest.mark.timeout(300)]
ALPHABET = "01234="
PROMPTS = [Prompt(n, f"{n}=", str((n + 1) % 5)) for n in range(4)]
HOW = Sampling(group_size=2, max_tokens=3, temperature=1.0)


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, ALPHABET, "--latency", "0.01")


class Told:
    """What a backend reports of its API."""

    def __init__(self) -> None:
        self.outages: list[OutageProgress] = []
        self.calls: list[CallFacts] = []

    def observe(self, progress: BackendProgress) -> None:
        if isinstance(progress, OutageProgress):
            self.outages.append(progress)

    def of(self, kind: str) -> list[bool]:
        """Return whether calls of a kind were signs of overload."""
        return [call.overloaded for call in self.calls if call.kind == kind]

    async def until(self, phase: str) -> None:
        while not self.outages or self.outages[-1].phase != phase:
            await asyncio.sleep(0.01)


def story_of(
    server: RunningServer,
    directory: Path,
    told: Told,
    tell: Callable[[Awaited], Coroutine[Any, Any, None]],
    **options: object,
) -> None:
    """Run a coroutine with a connected backend whose first sampler is there."""
    tokenizer = write_tokenizer(directory / "tokenizer", ALPHABET)
    semaphore = FileSemaphore(directory / "permits", 6)
    spec = BackendSpec(
        seed=1,
        model=MODEL,
        base_url=server.url,
        options={"tokenizer": str(tokenizer), "first_retry_s": 0.01, **options},
        permit=lambda: semaphore,
        observe=told.observe,
        observe_call=told.calls.append,
    )

    async def whole() -> None:
        backend = await opened(spec)
        try:
            await backend.sample(PROMPTS, HOW)
            await tell(backend)
        finally:
            await backend.close()

    asyncio.run(whole())


@pytest.mark.parametrize("status", [408, 200])
def test_a_pause_for_capacity_is_told_and_is_neither_a_failure_nor_load(
    server: RunningServer, tmp_path: Path, status: int
) -> None:
    told = Told()

    async def tell(backend: Awaited) -> None:
        told.calls.clear()
        server.pause("paused_capacity", status)
        sampling = asyncio.ensure_future(backend.sample(PROMPTS, HOW))
        await told.until("API paused")
        while server.stats()["paused"] < len(
            PROMPTS
        ):  # one that comes after the pause is none of those in it
            await asyncio.sleep(0.01)
        assert not sampling.done()
        server.pause()
        assert len(await sampling) == len(PROMPTS)
        out_s = backend.out_s()
        assert out_s > 0
        await backend.sample(PROMPTS, HOW)
        assert backend.out_s() == out_s

    story_of(server, tmp_path, told, tell)
    assert {(one.phase, one.why) for one in told.outages} == {("API paused", "capacity"), ("", "")}
    assert told.outages[-1].phase == ""
    assert told.of("sample") == [False] * len(PROMPTS)  # those after the pause


def poll_answer(state: str) -> APIStatusError:
    """Return what the SDK raises when the API answers a poll with the state of its queue."""
    asked = httpx.Request("POST", "http://127.0.0.1/api/v1/retrieve_future")
    answer = httpx.Response(408, json={"type": "try_again", "queue_state": state}, request=asked)
    return APIStatusError("try again", response=answer, body=None)


async def poll(outages: Outages, state: str) -> None:
    with contextlib.suppress(APIStatusError), outages.request(is_poll=True):
        raise poll_answer(state)


def test_a_call_has_as_much_time_as_without_a_pause() -> None:
    calls = ApiCalls(BackendSpec(0), TinkerOptions(call_timeout_s=0.2))

    async def paused() -> str:
        await poll(calls.outages, "paused_capacity")
        while calls.outages.paused_s() < 0.5:
            await asyncio.sleep(0.01)
        return "done"

    async def endless() -> None:
        await poll(calls.outages, "active")
        await asyncio.Event().wait()

    assert asyncio.run(calls.once("sample", paused)) == "done"
    with pytest.raises(TimeoutError):
        asyncio.run(calls.once("sample", endless))


def test_a_pause_uses_up_no_time_for_retries() -> None:
    calls, tries = ApiCalls(BackendSpec(0), TinkerOptions(retry_budget_s=1.0, first_retry_s=0.001)), 0

    async def fails_around_a_pause() -> str:
        nonlocal tries
        tries += 1
        if tries == 2:
            await poll(calls.outages, "paused_capacity")
            while calls.outages.paused_s() < 1.2:
                await asyncio.sleep(0.01)
        if tries < 3:
            raise ConnectionError
        return "done"

    async def nothing(lost: bool) -> None:
        del lost

    assert asyncio.run(calls.persist("sampling", fails_around_a_pause, nothing)) == "done"


def test_calls_are_paused_while_none_of_them_goes_on() -> None:
    told = Told()
    outages = Outages(told.observe)

    async def tell() -> None:
        goes_on, ends = asyncio.Event(), asyncio.Event()

        async def other() -> None:
            await poll(outages, "active")
            await goes_on.wait()
            await poll(outages, "paused_capacity")
            ends.set()
            await asyncio.Event().wait()

        running = asyncio.ensure_future(other())
        await asyncio.sleep(0)
        await poll(outages, "paused_capacity")
        assert not told.outages
        goes_on.set()
        await ends.wait()
        assert told.outages[-1].why == "capacity"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(tell())
    assert told.outages[-1].phase == ""
    assert outages.paused_s() > 0
    assert outages.out_s() > 0


def test_a_pause_for_our_rate_limit_is_load(server: RunningServer, tmp_path: Path) -> None:
    told = Told()

    async def tell(backend: Awaited) -> None:
        told.calls.clear()
        server.pause("paused_rate_limit")
        sampling = asyncio.ensure_future(backend.sample(PROMPTS[:1], HOW))
        await told.until("API paused")
        while not told.calls:
            await asyncio.sleep(0.01)
        server.pause()
        await sampling

    story_of(server, tmp_path, told, tell)
    assert told.outages[0].why == "rate limit"
    assert told.of("sample") == [True]


def test_an_answered_heartbeat_does_not_end_an_outage_of_calls() -> None:
    told = Told()
    outages = Outages(told.observe)

    def fail() -> None:
        asked = httpx.Request("POST", "http://127.0.0.1/api/v1/asample")
        with contextlib.suppress(APIStatusError), outages.request(is_poll=False):
            raise APIStatusError("down", response=httpx.Response(503, request=asked), body=None)

    def succeed() -> str:
        with outages.request(is_poll=False):
            pass
        return told.outages[-1].phase

    async def tell() -> None:
        fail()
        assert succeed() == ""
        with outages.call("sample"):
            fail()
        assert succeed() == "API down"
        with outages.call("sample"):
            assert succeed() == ""

    asyncio.run(tell())


def test_a_bill_that_is_to_be_paid_is_told_as_a_pause(server: RunningServer, tmp_path: Path) -> None:
    told = Told()

    async def tell(backend: Awaited) -> None:
        told.calls.clear()
        server.fail("asample", times=1, status=402)
        assert len(await backend.sample(PROMPTS[:1], HOW)) == 1
        said = [(one.phase, one.why) for one in told.outages]
        assert said == [("API paused", "payment required"), ("", "")]
        server.pause("paused_capacity")
        sampling = asyncio.ensure_future(backend.sample(PROMPTS[:1], HOW))
        await told.until("API paused")
        server.pause()
        await sampling

    story_of(server, tmp_path, told, tell)
    assert (told.outages[-2].why, told.of("sample")) == ("capacity", [])


def test_a_server_that_is_down_is_told_with_how_long(
    server: RunningServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()

    async def tell(backend: Awaited) -> None:
        server.kill()
        sampling = asyncio.ensure_future(backend.sample(PROMPTS[:1], HOW))
        await told.until("API down")
        while not re.search(r"API has been down for \d+ s \(ConnectError\)", caplog.text):
            await asyncio.sleep(0.01)
        server.start()
        assert len(await sampling) == 1

    with caplog.at_level(logging.WARNING):
        story_of(server, tmp_path, told, tell)
    assert told.outages[-1].phase == ""
    assert "the API answers again" in caplog.text
