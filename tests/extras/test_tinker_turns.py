"""Turns at the Tinker API: tokens are appended as sampled, within the model's context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import BackendSpec, Sampling
from retrain.base.errors import ConfigError, FullContextError, PromptError
from retrain.base.rollouts import CallForm, NextTurn, Prompt, TrainingSample
from tests.extras.test_local_turns import NUMBERED, SMOLLM2
from tests.extras.test_local_turns import tokenizer as chat_tokenizer
from tests.extras.test_tinker_backend import STEP, Awaited, during, loss_of, with_options
from tests.extras.test_tool_templates import QWEN, schema
from tests.tinker_api.running import KEY, MODEL, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ALPHABET, CONTEXT = "01234=", 16
TURN = Sampling(group_size=1, max_tokens=2, temperature=1.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("tinker"), ALPHABET, "--context", str(CONTEXT))
    yield running
    running.end()


@pytest.fixture
def spec(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackendSpec:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    options = {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer", ALPHABET)), "first_retry_s": 0.01}
    return BackendSpec(seed=1, model=MODEL, base_url=server.url, options=options, run_name="run")


def test_turns_are_appended_and_trained_on_as_sampled(spec: BackendSpec) -> None:
    async def story(backend: Awaited) -> None:
        await backend.check_turns()
        groups = await backend.sample([Prompt(n, f"{n}=", "") for n in range(4)], TURN)
        first = [group.rollouts[0] for group in groups]
        asked = [NextTurn(one, (("user", "=3"),), 2) for one in first]
        second = [one for one in await backend.extend(asked, TURN) if one is not None]
        assert len(second) == 4
        for before, after in zip(first, second, strict=True):
            new = after.tokens[len(before.tokens) :]
            assert after.tokens[: len(before.tokens)] == before.tokens
            assert 1 <= len(new) <= 2
            assert backend.read(after) == (*backend.read(before), 5, 3, *new)
        count = sum(len(one.tokens) for one in second)
        samples = [TrainingSample(one, np.ones(len(one.tokens)), 1.0 / count) for one in second]
        stats = await backend.update(samples, loss_of("importance_sampling"), STEP)
        assert stats.loss == pytest.approx(-1.0, rel=1e-3)  # every ratio is 1
        assert stats.mismatch
        assert stats.mismatch.max < 1e-3

    during(spec, story)


def test_token_ids_of_a_program_are_sampled_from_as_they_are(spec: BackendSpec) -> None:
    async def story(backend: Awaited) -> None:
        assert await backend.shown((1, 5)) == "1="
        (group,) = await backend.sample([Prompt(0, "1= (token ids 1 5)", "", ids=(1, 5))], TURN)
        (first,) = group.rollouts
        (second,) = await backend.extend([NextTurn(first, (("user", "=3"),), 2, (5, 3))], TURN)
        assert second
        assert backend.read(second) == (*backend.read(first), 5, 3, *second.tokens[len(first.tokens) :])
        assert backend.read(first) == (1, 5, *first.tokens)
        samples = [TrainingSample(second, np.ones(len(second.tokens)), 1.0 / len(second.tokens))]
        stats = await backend.update(samples, loss_of("importance_sampling"), STEP)
        assert stats.loss == pytest.approx(-1.0, rel=1e-3)  # every ratio is 1

    during(spec, story)


def test_a_context_without_room_ends_an_episode(spec: BackendSpec) -> None:
    async def story(backend: Awaited) -> None:
        await backend.check_turns()
        (group,) = await backend.sample([Prompt(0, "0" * 10, "")], replace(TURN, max_tokens=1))
        turn = NextTurn(group.rollouts[0], (("user", "1" * 4),), 9)
        (last,) = await backend.extend([turn], TURN)
        assert last
        assert len(backend.read(last)) <= CONTEXT
        assert await backend.extend([replace(turn, messages=(("user", "1" * 5),))], TURN) == [None]
        with pytest.raises(PromptError, match="an observation has 16 tokens, which leaves no room"):
            await backend.extend([replace(turn, messages=(("user", "1" * 16),))], TURN)
        with pytest.raises(FullContextError, match=r"^prompt 7 has 20 tokens, which leaves no room"):
            await backend.sample([Prompt(7, "0" * 20, "")], TURN)

    during(spec, story)


def test_what_is_too_long_is_refused_before_anything_is_billed(
    spec: BackendSpec, server: RunningServer
) -> None:
    async def story(backend: Awaited) -> None:
        await backend.check_turns()
        groups = await backend.sample([Prompt(n, "0=", "") for n in range(3)], TURN)
        turns = [NextTurn(group.rollouts[0], (("user", "1"),), 2) for group in groups]
        billed = server.stats()["billed"]
        with pytest.raises(FullContextError):
            await backend.sample([Prompt(n, "0" * 10 * (n + 1), "") for n in range(3)], TURN)
        with pytest.raises(PromptError):
            await backend.extend([*turns, replace(turns[0], messages=(("user", "1" * 16),))], TURN)
        assert server.stats()["billed"] == billed

    during(spec, story)


def test_a_context_that_the_server_does_not_tell_ends_an_episode_too(
    spec: BackendSpec, tmp_path: Path
) -> None:
    running = RunningServer(tmp_path, ALPHABET, "--context", str(CONTEXT), "--dialect", "silent")

    async def story(backend: Awaited) -> None:
        await backend.check_turns()
        (group,) = await backend.sample([Prompt(0, "0" * 10, "")], replace(TURN, max_tokens=1))
        turn = NextTurn(group.rollouts[0], (("user", "1"),), 9)
        fits, too_long = await backend.extend([replace(turn, max_tokens=1), turn], TURN)
        assert fits
        assert too_long is None
        with pytest.raises(
            FullContextError, match=r"^prompt 7 has 20 tokens, which leave no room for 2 more"
        ):
            await backend.sample([Prompt(7, "0" * 20, "")], TURN)

    try:
        during(replace(spec, base_url=running.url), story)
    finally:
        running.end()


def with_template(spec: BackendSpec, directory: Path, template: str) -> BackendSpec:
    chat_tokenizer(template).save_pretrained(directory)
    return with_options(spec, tokenizer=str(directory), chat_template=True)


def test_templates_are_checked_before_anything_is_sampled(spec: BackendSpec, tmp_path: Path) -> None:
    async def turns(backend: Awaited) -> None:
        with pytest.raises(ConfigError, match="renders earlier turns of a conversation in another way"):
            await backend.check_turns()

    async def tools(backend: Awaited) -> None:
        with pytest.raises(ConfigError, match="chat template does not show functions to the policy"):
            await backend.offer_tools([schema()])

    during(with_template(spec, tmp_path / "numbered", NUMBERED), turns)
    during(with_template(spec, tmp_path / "plain", SMOLLM2), tools)


def test_functions_are_shown_by_the_template(spec: BackendSpec, tmp_path: Path) -> None:
    async def story(backend: Awaited) -> None:
        assert await backend.offer_tools([schema()]) == CallForm("<tool_call>", "name", "arguments")
        assert await backend.call_form([schema("sub")]) == CallForm("<tool_call>", "name", "arguments")

    during(with_template(spec, tmp_path / "chat", QWEN), story)
