"""The tinker backend and servers as they are: lost models, full or old ones, sessions that nobody ended."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.backends import BackendSpec, UpdateStats
from retrain.backends.progress import StartProgress
from retrain.backends.tinker import check
from retrain.base.errors import ConfigError, InfrastructureError, RecordsError
from retrain.base.locks import hold
from retrain.base.rollouts import Group
from retrain.config.schema import Config, ModelSection
from retrain.plugins.tasks import Task
from retrain.records.layout import CampaignFiles
from tests.extras.test_tinker_backend import (
    ALPHABET,
    HOW,
    PROMPTS,
    STEP,
    Awaited,
    during,
    fixed_steps,
    loss_of,
    opened,
    place,
    samples_of,
    server,
    spec,
    tokenizer,
    train,
    with_options,
)
from tests.extras.test_tinker_backend import pytestmark as pytestmark
from tests.tinker_api.running import KEY, MODEL, RunningServer

__all__ = ["place", "server", "spec", "tokenizer"]


@contextmanager
def another(directory: Path, spec: BackendSpec, *options: str) -> Iterator[tuple[BackendSpec, RunningServer]]:
    """Run a server that differs."""
    running = RunningServer(directory, ALPHABET, *options)
    try:
        yield replace(spec, base_url=running.url), running
    finally:
        running.end()


async def one_group(backend: Awaited) -> list[Group]:
    return await backend.sample(PROMPTS[:1], HOW)


@pytest.mark.parametrize(
    ("status", "said"), [(400, "Model {} not loaded"), (422, "unknown model {}"), (410, "gone")]
)
def test_a_model_that_the_server_lost_is_rebuilt_whatever_the_status(
    spec: BackendSpec, server: RunningServer, status: int, said: str
) -> None:
    async def undisturbed(backend: Awaited) -> tuple[Any, list[UpdateStats]]:
        steps = await fixed_steps(backend)
        return steps, await train(backend, steps[:2])

    steps, expected = during(spec, undisturbed)

    async def disturbed(backend: Awaited) -> list[UpdateStats]:
        found = await train(backend, steps[:1])
        server.forget(status=status, said=said)
        return found + await train(backend, steps[1:2])

    assert during(spec, disturbed) == expected


def test_a_model_that_is_lost_again_and_again_is_a_failure_of_infrastructure(
    spec: BackendSpec, server: RunningServer
) -> None:
    async def story(backend: Awaited) -> None:
        groups = await one_group(backend)
        lost = {"error": "Model session-7:train:0 not loaded"}
        server.fail("forward_backward", times=4, status=400, content=lost)
        with pytest.raises(InfrastructureError, match=r"update 1: failed 4 times.*not loaded"):
            await backend.update(samples_of(groups), loss_of("ppo"), STEP)

    during(spec, story)


def test_states_of_a_condition_with_a_dot_are_saved(spec: BackendSpec, tmp_path: Path) -> None:
    async def story(backend: Awaited) -> str:
        await backend.save(tmp_path)
        return str(json.loads((tmp_path / "tinker.json").read_text())["path"])

    assert "/weights/lr0-05_s1-000000-" in during(replace(spec, run_name="lr0.05_s1"), story)


def test_a_full_server_is_waited_for(spec: BackendSpec, tmp_path: Path) -> None:
    told: list[str] = []

    def observe(progress: object) -> None:
        assert isinstance(progress, StartProgress)
        told.append(progress.phase)

    async def story(backend: Awaited) -> list[Group]:
        return await one_group(backend)

    async def both(first: BackendSpec) -> None:
        holder, waiter = await opened(first), await opened(replace(first, observe=observe))
        await one_group(holder)
        waiting = asyncio.ensure_future(story(waiter))
        while not told:
            await asyncio.sleep(0.01)
        await holder.close()
        assert len(await waiting) == 1
        await waiter.close()

    with another(tmp_path, spec, "--most-models", "1") as (own, _):
        asyncio.run(both(own))
    assert set(told[:-1]) == {"waiting for room at the API"}
    assert told[-1] == "got room at the API after"


def test_the_model_of_a_killed_attempt_makes_room_for_the_next(spec: BackendSpec, tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    note = run / "tinker-session.json"
    with another(tmp_path, replace(spec, notes=run), "--most-models", "1") as (own, running):

        async def killed(backend: Awaited) -> str:
            await one_group(backend)
            return note.read_text()

        left = during(own, killed)
        assert not note.exists()
        session = running.abandon()
        note.write_text(json.dumps({**json.loads(left), "session": session}))
        assert running.stats()["models"] == 1
        assert len(during(own, one_group)) == 1
        assert running.stats()["models"] == 0


@pytest.mark.parametrize("is_alive", [False, True])
def test_a_run_without_room_ends_what_a_killed_worker_of_another_run_left(
    spec: BackendSpec, tmp_path: Path, is_alive: bool
) -> None:
    campaign = CampaignFiles(tmp_path / "c")
    here, other = (campaign.run(name) for name in ("a_s0", "b_s0"))
    for run in (here, other):
        run.directory.mkdir(parents=True)
    campaign.campaign_toml.touch()
    options = with_options(spec, first_retry_s=0.01, retry_budget_s=0.2)
    options = replace(options, notes=here.directory, campaign=campaign.directory)
    with another(tmp_path, options, "--most-models", "1") as (own, running):
        note = {"session": running.abandon(), "directory": str(other.directory), "base_url": own.base_url}
        (other.directory / "tinker-session.json").write_text(json.dumps(note))
        if is_alive:
            lock = hold(other.lock)
            assert lock is not None
            with lock, pytest.raises(InfrastructureError, match="Maximum number of LoRA adapters"):
                during(own, one_group)
        else:
            assert len(during(own, one_group)) == 1
        assert running.stats()["models"] == is_alive


def test_a_note_of_the_session_that_cannot_be_written_is_named(spec: BackendSpec, tmp_path: Path) -> None:
    (tmp_path / "tinker-session.json").mkdir()
    with pytest.raises(RecordsError, match=r"tinker-session.json: is not a regular file"):
        during(replace(spec, notes=tmp_path), one_group)


def test_a_copy_of_a_run_leaves_the_session_of_the_original_alone(spec: BackendSpec, tmp_path: Path) -> None:
    (run := tmp_path / "copy").mkdir()
    with another(tmp_path, replace(spec, notes=run)) as (own, running):
        session = running.abandon()
        note = {"session": session, "directory": str(tmp_path / "original"), "base_url": own.base_url}
        (run / "tinker-session.json").write_text(json.dumps(note))
        during(own, one_group)
        assert running.stats()["models"] == 1


@pytest.mark.parametrize(("dialect", "lacks"), [("json", "predates proto"), ("unnumbered", "sequence_ids")])
def test_a_server_that_is_too_old_is_named_at_once_and_no_model_is_left(
    spec: BackendSpec, tmp_path: Path, dialect: str, lacks: str
) -> None:
    with another(tmp_path, spec, "--dialect", dialect, "--most-models", "1") as (own, running):
        with pytest.raises(ConfigError, match=rf"\[model\]\.base_url: the server is too old.*{lacks}"):
            during(own, one_group)
        assert running.stats()["requests"]["create_model"] == 1
        assert running.stats()["models"] == 0


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (404, {"detail": "Not Found"}),
        (422, {"detail": [{"msg": "Field required", "loc": ["body", "model_id"]}]}),
    ],
)
def test_a_server_that_cannot_load_states_is_not_taken_for_a_lost_state(
    spec: BackendSpec, server: RunningServer, tmp_path: Path, status: int, content: dict[str, Any]
) -> None:
    async def story(backend: Awaited) -> None:
        await backend.save(tmp_path)
        server.fail("load_weights", times=1, status=status, content=content)
        with pytest.raises(ConfigError, match=r"cannot make a model from a saved state.*is not to blame"):
            await backend.load(tmp_path)

    during(spec, story)


def test_results_are_polled_ever_more_rarely_while_the_server_fails(
    spec: BackendSpec, tmp_path: Path
) -> None:
    def polls(running: RunningServer) -> int:
        return int(running.stats()["requests"]["retrieve_future"])

    with another(tmp_path, with_options(spec, call_timeout_s=10.0, retry_budget_s=0.0)) as (own, running):

        async def story(backend: Awaited) -> int:
            groups = await one_group(backend)
            before = polls(running)
            running.fail("retrieve_future", times=10**6, status=503)
            with pytest.raises(InfrastructureError):
                await backend.update(samples_of(groups), loss_of("ppo"), STEP)
            return polls(running) - before

        assert during(own, story) < 40


def test_a_key_that_the_sdk_has_stored_will_do(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("HOME", str(here))
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD"):
        monkeypatch.delenv(name, raising=False)
    config = Config(model=ModelSection(model=MODEL))
    assert any("tinker auth login" in problem.what for problem in check(config, Task((), (), "", 0)))
    (here / ".tinker").mkdir()
    stored = {"version": 1, "default": "k", "keys": {"k": {"type": "manual", "key": KEY, "name": "k"}}}
    (here / ".tinker" / "credentials.json").write_text(json.dumps(stored))
    assert check(config, Task((), (), "", 0)) == []


def test_a_server_without_figures_is_said_not_to_clip(
    spec: BackendSpec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(backend: Awaited) -> list[UpdateStats]:
        return await train(backend, await fixed_steps(backend))

    with another(tmp_path, spec, "--dialect", "silent") as (own, _), caplog.at_level(logging.WARNING):
        stats = during(own, story)
    assert [one.grad_norm for one in stats] == [0.0] * 4
    (warning,) = [record.message for record in caplog.records if "gradient norm" in record.message]
    assert "[training].max_grad_norm has no effect" in warning


def test_a_resumed_run_opens_one_session(spec: BackendSpec, server: RunningServer, tmp_path: Path) -> None:
    during(spec, lambda backend: backend.save(tmp_path))
    before = server.stats()["requests"]["create_session"]

    async def resumed(backend: Awaited) -> int:
        await backend.load(tmp_path)
        await one_group(backend)
        return int(server.stats()["requests"]["create_session"])

    assert during(spec, resumed) == before + 1


def test_a_session_with_calls_in_flight_is_not_ended_by_the_next_one(
    spec: BackendSpec, server: RunningServer, tmp_path: Path
) -> None:
    before = server.stats()["sessions"]

    async def story(backend: Awaited) -> None:
        await one_group(backend)
        is_over = asyncio.Event()
        call = asyncio.ensure_future(backend.session.connection.calls.once("slow", is_over.wait))
        await asyncio.sleep(0)
        await backend.session.renew(backend.session.generation)
        await one_group(backend)
        open_now = server.stats()["sessions"]
        is_over.set()
        await call
        assert open_now == before + 2
        while server.stats()["sessions"] > before + 1:
            await asyncio.sleep(0.01)

    during(replace(spec, notes=tmp_path), story)
