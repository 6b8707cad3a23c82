"""Runs on the Tinker API that start from a state there: weights, reference, lineage, what is refused."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from retrain.backends import BackendSpec, UpdateStats
from retrain.backends.tinker import saved_states
from retrain.base.errors import ConfigError, RecordsError
from retrain.base.rollouts import TrainingSample
from retrain.campaign.run import reopen, start
from retrain.campaign.states import delete_states, states_of
from retrain.config.schema import Config, ModelSection
from retrain.records.layout import RunFiles
from retrain.records.manifest import read_manifest
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.extras.test_tinker_backend import (
    ALPHABET,
    STEP,
    Awaited,
    during,
    fixed_steps,
    loss_of,
    train,
    with_options,
)
from tests.extras.test_tinker_backend import place as place
from tests.extras.test_tinker_backend import server as server
from tests.extras.test_tinker_backend import spec as spec
from tests.extras.test_tinker_backend import tokenizer as tokenizer
from tests.stopping import StopAfterStep
from tests.tinker_api.running import KEY, MODEL, RunningServer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
NEAR = replace(STEP, lr=0.05, kl_coef=0.2)
Steps = list[list[TrainingSample]]


@pytest.fixture
def trained(spec: BackendSpec, tmp_path: Path) -> tuple[Steps, Path]:
    """Steps of data, and the checkpoint of a policy that has taken two of them."""
    (checkpoint := tmp_path / "trained").mkdir()

    async def story(backend: Awaited) -> Steps:
        steps = await fixed_steps(backend)
        await train(backend, steps[:2])
        await backend.save(checkpoint)
        return steps

    return during(spec, story), checkpoint


async def near(backend: Awaited, steps: Steps) -> list[UpdateStats]:
    return [await backend.update(samples, loss_of("ppo"), NEAR) for samples in steps]


def path_of(checkpoint: Path, key: str = "path") -> str:
    return json.loads((checkpoint / "tinker.json").read_text())[key]


def saved(server_place: Path, path: str) -> Path:
    return server_place / "states" / path.removeprefix("tinker://").replace("/", "--").replace(":", "-")


def test_weights_are_loaded_and_the_optimizer_starts_anew(spec, trained) -> None:
    steps, checkpoint = trained

    async def anew(backend: Awaited) -> list[UpdateStats]:
        await backend.start_from(str(checkpoint), is_reference=False)
        assert backend.session.version == 0
        return await train(backend, steps[2:])

    async def reset(backend: Awaited) -> list[UpdateStats]:
        await backend.load(checkpoint)
        await backend.reset_optimizer()
        return await train(backend, steps[2:])

    async def resumed(backend: Awaited) -> list[UpdateStats]:
        await backend.load(checkpoint)
        return await train(backend, steps[2:])

    found = during(replace(spec, seed=9), anew)
    assert found == during(spec, reset)
    assert found[1] != during(spec, resumed)[1]


def test_the_reference_is_the_start_or_the_base_model(spec, trained) -> None:
    steps, checkpoint = trained

    def kls(**how: bool) -> list[float | None]:
        async def story(backend: Awaited) -> list[UpdateStats]:
            await backend.start_from(str(checkpoint), **how)
            return await near(backend, steps[2:])

        return [stats.reference_kl for stats in during(spec, story)]

    first, later = kls(is_reference=True)
    assert first == pytest.approx(0, abs=1e-6)
    assert later > 1e-4
    assert kls(is_reference=False)[0] > 1e-3


def test_a_checkpoint_holds_weights_and_reference_when_the_start_is_gone(
    spec, trained, place: Path, tmp_path: Path
) -> None:
    steps, source = trained
    (checkpoint := tmp_path / "later").mkdir()

    async def first(backend: Awaited) -> list[UpdateStats]:
        await backend.start_from(str(source), is_reference=True)
        found = await near(backend, steps[:2])
        await backend.save(checkpoint)
        return found + await near(backend, steps[2:])

    async def second(backend: Awaited) -> list[UpdateStats]:
        await backend.load(checkpoint)
        return await near(backend, steps[2:])

    whole = during(spec, first)
    shutil.rmtree(saved(place, path_of(source)))
    assert during(replace(spec, seed=9), second) == whole[2:]
    kept = json.loads((saved(place, path_of(checkpoint, "reference")) / "facts.json").read_text())
    assert kept["was_extended"]  # it expires no earlier than the checkpoint
    shutil.rmtree(saved(place, path_of(checkpoint, "reference")))
    with pytest.raises(RecordsError, match="no longer has this reference"):
        during(spec, second)


def test_a_lost_session_is_rebuilt_from_the_start(spec, trained, server: RunningServer, place: Path) -> None:
    steps, source = trained

    def story(lose: Callable[[], None]) -> Callable[[Awaited], Coroutine[Any, Any, list[UpdateStats]]]:
        async def train_on(backend: Awaited) -> list[UpdateStats]:
            await backend.start_from(str(source), is_reference=True)
            found = await near(backend, steps[:2])
            lose()
            return found + await near(backend, steps[2:])

        return train_on

    def lose() -> None:
        shutil.rmtree(saved(place, path_of(source)))
        server.forget()

    expected = during(spec, story(lambda: None))
    assert during(spec, story(lose)) == expected


def test_what_the_server_loads_must_fit_the_run(spec, trained) -> None:
    _, source = trained

    async def story(backend: Awaited) -> None:
        await backend.start_from(str(source), is_reference=False)

    with pytest.raises(ConfigError, match=r"has rank 32, the run \[model\]\.lora_rank = 8"):
        during(replace(spec, lora_rank=8), story)
    (source / "tinker.json").write_text('{"path": "tinker://nobody/weights/none"}')
    with pytest.raises(
        ConfigError, match=r"\[model\]\.adapter: the Tinker API does not load tinker://nobody"
    ):
        during(spec, story)


@pytest.fixture
def campaign(spec: BackendSpec, here: Path) -> Callable[..., tuple[Path, RunFiles]]:
    """Plan a campaign of one run."""

    def planned(name: str, adapter: object = "", **tables: dict[str, Any]) -> tuple[Path, RunFiles]:
        (here / name).mkdir()
        raw: dict[str, Any] = {
            "model": {"model": MODEL, "base_url": spec.base_url, "adapter": str(adapter)},
            "training": {"batch_size": 2, "group_size": 16, "max_tokens": 3, "temperature": 1.0, "lr": 0.02},
            "data": {"task": "successor", "options": {"digits": 1, "base": 5, "held_out": 0.0}},
            "reward": {"reward": "partial"},  # no step has ties alone
            "algorithm": {"kl_coef": 0.1},
            "backend": {"backend": "tinker", "options": dict(spec.options)},
            "campaign": {"seeds": [0], "max_steps": 4, "launcher": "inline"},
            "logging": {"log_dir": str(here / name / "logs")},
        }
        for table, keys in tables.items():
            raw[table] = {**raw[table], **keys}
        raw["training"]["save_every"] = 2
        (here / name / "c.toml").write_text(tomli_w.dumps(raw))
        directory = start(here / name / "c.toml").directory
        (run,) = (directory / "runs").iterdir()
        return directory, RunFiles(run)

    return planned


def test_a_run_starts_from_another_and_needs_it_no_more_once_it_has_a_checkpoint(campaign, place) -> None:
    first, source = campaign("first")
    assert worker.run(source.directory, threading.Event()) == 0
    state = path_of(source.checkpoints / "step-000004")
    directory, files = campaign("second", source.directory)
    assert worker.run(files.directory, StopAfterStep(files, 2)) == 130
    (needed,) = (one.needed for one in states_of(directory))
    assert path_of(files.checkpoints / "step-000002", "reference") in needed
    assert set(delete_states(first, all_of_them=True).values()) == {""}
    assert set(delete_states(directory).values()) == {""}
    assert reopen(directory).execute().exit_code == 0
    kls = [row["reference_kl"] for row in read_metrics(files.directory)]
    assert kls[0] == pytest.approx(0, abs=1e-6)
    assert min(kls[1:]) > 1e-6
    ((_, lineage),) = read_manifest(directory / "manifest.json").adapters.items()
    assert lineage["adapter"] == str(source.directory)
    assert lineage["state"] == state
    assert len(lineage["digest"]) == 16


def test_a_state_that_cannot_be_started_from_is_refused_before_anything_is_created(
    campaign, trained, here: Path
) -> None:
    path = path_of(trained[1])
    (here / "peft").mkdir()
    (here / "peft" / "adapter_model.safetensors").touch()
    refused = {
        "tinker://nobody/weights/none": "refuses tinker://nobody/weights/none",
        path.replace("/weights/", "/sampler_weights/"): "cannot be trained further",
        here / "peft": "uploads no weights",
        here / "nowhere": "does not exist",
    }
    for number, (adapter, said) in enumerate(refused.items()):
        with pytest.raises(ConfigError, match=rf"\[model\]\.adapter: .*{said}"):
            campaign(f"c{number}", adapter)
    with pytest.raises(ConfigError, match=r"has rank 32, the run \[model\]\.lora_rank = 16"):
        campaign("rank", path, model={"lora_rank": 16})
    assert not list(here.glob("*/logs"))


def test_an_api_that_does_not_answer_leaves_the_check_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        model = ModelSection(model=MODEL, base_url=url, adapter="tinker://run/weights/a")
        assert list(saved_states.start_problems(Config(model=model), answer_s=0.5)) == []


def test_a_server_with_room_for_one_model_is_enough(spec, tmp_path: Path) -> None:
    small = RunningServer(tmp_path, ALPHABET, "--most-models", "1")
    (checkpoint := tmp_path / "step").mkdir()

    async def story(backend: Awaited) -> int:
        steps = await fixed_steps(backend)
        await backend.save(checkpoint)
        await backend.reset_optimizer()
        await train(backend, steps[:1])
        await backend.start_from(str(checkpoint), is_reference=True)
        await near(backend, steps[:1])
        return small.stats()["models"]

    try:
        assert during(with_options(replace(spec, base_url=small.url), retry_budget_s=10.0), story) == 1
    finally:
        small.end()
