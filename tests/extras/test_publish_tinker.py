"""A run's policy at the Tinker API is exported there, downloaded, and left nowhere but in the directory."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from retrain.backends.squeeze import CONFIG, WEIGHTS
from retrain.backends.tinker import saved_states
from retrain.base.errors import ConfigError, LaunchError, RecordsError
from retrain.campaign.run import start
from retrain.config.files import TINKER, state_of
from retrain.config.schema import ModelSection
from retrain.results.publish import Wishes, publish
from retrain.results.publish.choice import Choice, choose
from tests.extras.test_tinker_states import ALPHABET, CAMPAIGN
from tests.extras.tiny_models import save_tiny_model
from tests.full_disk import files_of_at_most
from tests.tinker_api.exports import write_adapter
from tests.tinker_api.policies import Policy
from tests.tinker_api.running import MODEL, RunningServer, serve, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK
from tests.tinker_api.states import EXTERNAL, States

pytestmark = [
    *CALLS_SDK,
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # transformers' own
]
IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of the server and of the run, which is the current one."""
    with pytest.MonkeyPatch.context() as patch:
        made = tmp_path_factory.mktemp("tinker")
        patch.chdir(made)
        yield made


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        yield from serve(place, patch, ALPHABET)


@pytest.fixture(scope="module")
def choice(place: Path, server: RunningServer) -> Choice:
    """A finished run whose policy is at the server."""
    tokenizer = write_tokenizer(place / "tokenizer", ALPHABET)
    text = CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer).replace("[0, 1]", "[0]")
    (place / "c.toml").write_text(text)
    campaign = start(place / "c.toml")
    assert campaign.execute().exit_code == 0
    return choose(campaign.directory, "")


def exports(place: Path) -> list[str]:
    return [path.name for path in (place / "states").iterdir() if EXTERNAL in path.name]


def logits(base: str, adapter: Path) -> torch.Tensor:
    with torch.no_grad():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(IDS).logits


def test_the_policy_is_that_of_the_state_and_nothing_is_left_at_the_api(choice, server, place, tmp_path):
    base = save_tiny_model(tmp_path / "base", hidden=32, context=64)
    publish(choice, Wishes(tmp_path / "out", base_model=base), lambda _: None)
    policy, theirs = Policy(ALPHABET, 0), tmp_path / "theirs"
    policy.load(States(place / "states").directory(state_of(str(choice.checkpoint.directory))))
    theirs.mkdir()
    write_adapter(theirs, policy)
    assert torch.equal(logits(base, tmp_path / "out"), logits(base, theirs))
    assert not torch.allclose(logits(base, theirs), AutoModelForCausalLM.from_pretrained(base)(IDS).logits)
    stats = server.stats()
    assert (exports(place), stats["sessions"], stats["models"]) == ([], 0, 0)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "retrain.json", CONFIG, WEIGHTS}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "signature" not in card
    assert "127.0.0.1" not in card
    assert f'AutoTokenizer.from_pretrained("{place}/tokenizer")' in card


def test_a_state_that_is_gone_is_told_with_why(choice, tmp_path):
    gone = tmp_path / "step-000004"
    shutil.copytree(choice.checkpoint.directory, gone)
    (gone / TINKER).write_text(json.dumps({"path": "tinker://session-0-9:train:0/weights/gone"}))
    older = replace(choice, checkpoint=replace(choice.checkpoint, directory=gone))
    with pytest.raises(RecordsError, match=r"the Tinker API has no tinker://.*retrain states --delete"):
        publish(older, Wishes(tmp_path / "out"), lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_wrong_key_is_told(choice, monkeypatch, tmp_path):
    monkeypatch.setenv("TINKER_API_KEY", "tml-another")
    with pytest.raises(ConfigError, match=r"refuses the key .*; check TINKER_API_KEY"):
        publish(choice, Wishes(tmp_path / "out"), lambda _: None)


def test_a_server_without_exports_is_told_and_keeps_no_model(choice, server, place, tmp_path):
    server.fail("save_weights_external", times=1, status=422)
    with pytest.raises(ConfigError, match=r"\[model\]\.base_url: the server cannot export"):
        publish(choice, Wishes(tmp_path / "out"), lambda _: None)
    assert server.stats()["models"] == 0


def test_an_export_without_adapters_is_told_and_deleted(choice, place, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_states, "WEIGHTS", "adapter_model.safetensors.age")
    with pytest.raises(RecordsError, match=r"exported adapter_config\.json, .*, and not adapter_model"):
        publish(choice, Wishes(tmp_path / "out"), lambda _: None)
    assert exports(place) == []


def test_a_download_that_is_refused_names_no_signed_address(server, tmp_path):
    expired = f"{server.url}/signed/state/{CONFIG}?expires=1&signature=secret"
    with pytest.raises(LaunchError, match=r"the download of adapter_config\.json is refused .* 403") as told:
        saved_states.download(CONFIG, {CONFIG: expired}, tmp_path)
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("status", "said"), [(410, "session session-0-1 has expired"), (404, "no model session-0-1:train:0")]
)
def test_a_lost_session_or_model_is_not_reported_as_an_expired_state(choice, server, tmp_path, status, said):
    server.fail("save_weights_external", times=1, status=status, content={"error": said})
    with pytest.raises(LaunchError, match=rf"cannot export tinker://.*{said}.*; try again later"):
        publish(choice, Wishes(tmp_path / "out"), lambda _: None)


def test_a_full_disk_is_not_blamed_on_the_api(choice, place, tmp_path):
    told = rf"{WEIGHTS}: cannot write it \(File too large\); .*, then publish again"
    with files_of_at_most(1000), pytest.raises(RecordsError, match=told):
        publish(choice, Wishes(tmp_path / "out"), lambda _: None)
    assert [*tmp_path.iterdir()] == []
    assert exports(place) == []


def test_an_api_that_does_not_answer_is_no_fault_of_the_user(choice, place, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_states, "ANSWER_S", 1.0)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        away = ModelSection(model=MODEL, base_url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(LaunchError, match=r"does not answer about tinker://.*; try again later"):
            publish(
                replace(choice, config=replace(choice.config, model=away)),
                Wishes(tmp_path / "out"),
                lambda _: None,
            )
