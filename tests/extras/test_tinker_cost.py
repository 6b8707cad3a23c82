"""What the tinker backend counts is what a server bills, request by request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.metering import Meter
from retrain.backends.tinker import PRICES, price
from retrain.base import registry
from retrain.base.errors import ConfigError, RunFailedError
from retrain.base.rollouts import Loss, Prompt
from retrain.config.schema import Config, ModelSection
from retrain.records.spending import Tokens
from tests.extras.test_tinker_backend import Awaited, opened, samples_of
from tests.tinker_api.running import KEY, MODEL, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ALPHABET = "01234="
PROMPTS = [Prompt(n, f"{n}=" * (1 + n), "0") for n in range(4)]
HOW = Sampling(group_size=4, max_tokens=3, temperature=1.0)
PPO = Loss("ppo", registry.find_plugin("losses", "ppo"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    running = RunningServer(tmp_path, ALPHABET, "--chunk", "3")  # an update takes several requests
    yield running
    running.end()


def spec_of(server: RunningServer, tmp_path: Path) -> BackendSpec:
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer", ALPHABET))
    options = {"tokenizer": tokenizer, "first_retry_s": 0.01, "probe": False}
    return BackendSpec(seed=1, model=MODEL, base_url=server.url, options=options, meter=Meter())


async def take_steps(backend: Awaited, count: int) -> None:
    for _ in range(count):
        samples = samples_of(await backend.sample(PROMPTS, HOW))
        await backend.update(samples, PPO, Optimization(lr=1e-2))


def test_the_meter_counts_what_the_server_bills(server: RunningServer, tmp_path: Path) -> None:
    spec = spec_of(server, tmp_path)

    async def story() -> None:
        backend = await opened(spec)
        await take_steps(backend, 2)
        server.fail("asample", times=2, status=429)  # refused: not billed
        server.forget()  # the first update is repeated in a new session, and billed again
        await take_steps(backend, 1)
        await backend.close()

    asyncio.run(story())
    assert (Tokens(**server.stats()["billed"]), spec.meter.open) == (spec.meter.tokens, Tokens())
    assert spec.meter.unsure == Tokens()
    prompts = sum(len(prompt.text) for prompt in PROMPTS)
    assert (spec.meter.tokens.prefill, spec.meter.tokens.cached) == (3 * prompts, 9 * prompts)


@pytest.mark.parametrize("status", [410, 401, 400])
def test_a_result_that_is_not_handed_out_was_billed(
    server: RunningServer, tmp_path: Path, status: int
) -> None:
    """Its request was accepted: whether it is sampled again, or the key has expired, nothing is left out."""
    spec = spec_of(server, tmp_path)

    async def story() -> None:
        backend = await opened(spec)
        await backend.sample(PROMPTS[:1], HOW)
        lost = {"error": "not handed out"}
        server.fail("retrieve_future", times=4 if status == 400 else 1, status=status, content=lost)
        with nullcontext() if status == 410 else pytest.raises((ConfigError, RunFailedError)):
            await backend.sample(PROMPTS[:1], HOW)
        await backend.close()

    asyncio.run(story())
    billed = Tokens(**{"train": 0, **server.stats()["billed"]})
    at_most = spec.meter.tokens + spec.meter.unsure
    assert (billed.prefill, billed.cached) == (at_most.prefill, at_most.cached)
    assert spec.meter.tokens.sample <= billed.sample <= at_most.sample


def test_a_call_that_takes_too_long_counts_at_most(server: RunningServer, tmp_path: Path) -> None:
    spec = spec_of(server, tmp_path)
    spec = replace(spec, options={**spec.options, "call_timeout_s": 3.0})

    async def story() -> None:
        backend = await opened(spec)
        await backend.sample(PROMPTS[:1], HOW)
        server.fail("asample", times=1, hang_s=10.0, status=429)
        await backend.sample(PROMPTS[:1], HOW)
        await backend.close()

    asyncio.run(story())
    known, billed = spec.meter.tokens, Tokens(**{"train": 0, **server.stats()["billed"]})
    at_most = known + spec.meter.unsure
    assert spec.meter.unsure.sample >= 12
    assert known.sample <= billed.sample <= at_most.sample
    assert known.prefill <= billed.prefill <= at_most.prefill


def test_the_table_has_prices_of_the_apis_own_models_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    own = Config(model=ModelSection(model="Qwen/Qwen3-8B"))
    assert price(own) == PRICES["Qwen/Qwen3-8B"]
    assert price(Config(model=ModelSection(model="Qwen/Qwen3-8B", base_url="http://127.0.0.1:1"))) is None
    assert price(Config(model=ModelSection(model="another/model"))) is None
    assert all(0 < one.cached < one.prefill < one.sample for one in PRICES.values())
