"""What was published is pushed to a hub, or the hub's reason is told and how to try again."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.backends.squeeze import WEIGHTS
from retrain.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError, LaunchError, RecordsError, RetrainError
from retrain.results.publish import CARD, FACTS, Published, Wishes, publish, push_published, read_published
from retrain.results.publish.choice import choose
from retrain.results.publish.hub import check_name
from tests.extras.hub import TOKEN, USER, Answer, Hub, serving
from tests.extras.test_publish_records import campaign
from tests.simulated import flat

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own

NAME = f"{USER}/sorter"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, its address and the token as a user would set them."""
    with serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running


@pytest.fixture
def found(tmp_path: Path) -> Published:
    """A run, published in a directory."""
    choice = choose(campaign(tmp_path / "logs", {("grpo", 0): flat(0.5)}), "")
    return publish(choice, Wishes(tmp_path / "out"), lambda _: None)


def test_a_directory_is_pushed_as_one_commit(hub, found):
    pushed = push_published(found, NAME, private=False)
    repository = hub.repositories[NAME]
    assert pushed.url == f"{hub.url}/{NAME}"
    assert set(repository.files) == {CARD, FACTS, WEIGHTS, "adapter_config.json"}
    assert repository.files[WEIGHTS] == b"grpo_s0 20"
    assert not repository.private
    assert [said.partition(", by retrain ")[0] for said in repository.messages] == ["grpo_s0 at step 20"]
    assert f'name = "{NAME}"' in repository.files[CARD].decode()
    assert json.loads(repository.files[FACTS])["name"] == NAME
    assert found == read_published(Path(found.directory))
    assert 'name = "out"' in (Path(found.directory) / CARD).read_text()


def test_a_merged_model_takes_the_place_of_adapters_and_of_nothing_else(hub, found):
    push_published(found, NAME, private=False)
    repository = hub.repositories[NAME]
    repository.files["notes.txt"] = b"of somebody"
    directory = Path(found.directory)
    (directory / WEIGHTS).rename(directory / "model.safetensors")
    (directory / "adapter_config.json").rename(directory / "config.json")
    push_published(found, NAME, private=False)
    assert set(repository.files) == {CARD, FACTS, "model.safetensors", "config.json", "notes.txt"}
    assert len(repository.messages) == 2


def test_a_private_repository_is_one_and_a_public_one_is_not_used(hub, found):
    push_published(found, NAME, private=True)
    assert hub.repositories[NAME].private
    push_published(found, f"{USER}/shown", private=False)
    with pytest.raises(ConfigError, match="it exists and is public"):
        push_published(found, f"{USER}/shown", private=True)
    assert len(hub.repositories[f"{USER}/shown"].messages) == 1


def test_a_run_whose_id_cannot_spell_its_condition_is_pushed_by_its_name(hub, tmp_path):
    choice = choose(campaign(tmp_path / "logs", {("größe", 0): flat(0.5)}), "")
    choice = replace(choice, run=replace(choice.run, run_id="gr-e_s0"))
    push_published(publish(choice, Wishes(tmp_path / "out"), lambda _: None), NAME, private=False)
    assert hub.repositories[NAME].messages[0].startswith("größe_s0 at step 20, by retrain ")


def test_a_wrong_token_is_told_and_is_in_no_message(hub, found, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError) as told:
        push_published(found, NAME, private=True)
    first, second = str(told.value).splitlines()
    assert first.startswith(f"--push {NAME}: the hub refuses the token, or found none")
    assert second.endswith(f"try again with: retrain publish {found.directory} --push {NAME} --private")
    assert "hf_wrong" not in str(told.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert push_published(read_published(Path(found.directory)), NAME, private=True).url


def test_a_name_of_others_is_told(hub, found):
    with pytest.raises(ConfigError, match=r"the token may not write to others/sorter .*have the rights"):
        push_published(found, "others/sorter", private=False)


def test_a_hub_that_fails_or_is_not_there_is_no_fault_of_the_user(hub, found, monkeypatch):
    hub.failing["/api/repos/create"] = Answer(503, {"error": "an injected fault"})
    with pytest.raises(LaunchError, match=r"the hub fails \(503: an injected fault\); try again later"):
        push_published(found, NAME, private=False)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(LaunchError, match=r"cannot be reached .* check the network and HF_ENDPOINT"):
            push_published(found, NAME, private=False)


def test_a_card_that_the_hub_refuses_is_told(hub, found):
    card = Path(found.directory) / CARD
    card.write_text(card.read_text().replace('"org/base"', '"/a/path"', 1))
    with pytest.raises(ConfigError, match=r"Invalid metadata in README\.md"):
        push_published(found, NAME, private=False)


@pytest.mark.parametrize(
    ("path", "status", "content", "told"),
    [
        ("/api/repos/create", 409, {"error": "it exists"}, r"is no hub \(KeyError: 'url'\); check HF_"),
        ("/api/repos/create", 200, "<html>Welcome</html>", r"is no hub \(JSONDecodeError: .*; check HF_"),
        ("/api/repos/create", 200, ["a", "list"], r"is no hub \(TypeError: .*; check HF_ENDPOINT"),
        ("/api/repos/create", 400, ["a", "list"], r"is no hub \(AttributeError: .*; check HF_ENDPOINT"),
        ("/api/repos/create", 502, "<html>Bad Gateway</html>", r"the hub fails \(502: .*; try again later"),
        ("/api/repos/create", 401, "<html>Log in</html>", r"refuses the token, or found none"),
        ("/api/repos/create", 403, "<html>Forbidden</html>", r"the token may not write to"),
        ("/api/models/", 409, {"error": "a conflict"}, r"the hub refuses it \(409: a conflict\)"),
        (f"/api/models/{NAME}/preupload", 200, {"files": None}, r"preupload_info is improperly formatted"),
        (f"/{NAME}.git", 413, "<html>Too Large</html>", r"the hub refuses it \(413: "),
        (f"/{NAME}.git", 200, {"objects": "none"}, r"Malformed response from server"),
        ("/lfs/", 413, "<html>Too Large</html>", r"the hub refuses it \(413: "),
    ],
)
def test_an_unexpected_answer_is_one_clear_line(hub, found, path, status, content, told):
    hub.failing[path] = Answer(status, content)
    with pytest.raises(RetrainError, match=told) as error:
        push_published(found, NAME, private=False)
    first, second = str(error.value).splitlines()
    assert first.startswith(f"--push {NAME}: ")
    assert second == f"{found.directory} is complete; try again with: {again(found)}"


def again(found: Published) -> str:
    return f"retrain publish {found.directory} --push {NAME}"


def test_a_redirect_in_a_circle_is_told(hub, found):
    hub.failing["/api/repos"] = Answer(307, "", {"location": f"{hub.url}/api/repos/create"})
    with pytest.raises(LaunchError, match=r"cannot be reached \(Exceeded maximum allowed redirects"):
        push_published(found, NAME, private=False)


def test_a_redirect_to_a_page_is_told(hub, found):
    hub.failing["/api/repos"] = Answer(302, "", {"location": f"{hub.url}/login"})
    hub.failing["/login"] = Answer(200, "<html>Log in</html>")
    with pytest.raises(ConfigError, match=r"is no hub \(JSONDecodeError"):
        push_published(found, NAME, private=False)


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_hub(hub, found):
    (Path(found.directory) / CARD).unlink()
    with pytest.raises(RecordsError, match=r"out: cannot push it \(No such file or directory\)"):
        push_published(found, NAME, private=False)


@pytest.mark.parametrize("address", ["http://me:s%40cret@127.0.0.1:9", "http://me:s%40cret@[::1", "hub"])
def test_a_password_in_the_address_is_refused_and_not_shown(hub, found, monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError) as refused:
        push_published(found, NAME, private=True)
    told = "HF_ENDPOINT: needs https://HOST without a user; a token goes into HF_TOKEN"
    assert str(refused.value) == told
    assert not hub.asked


def test_a_hub_of_others_is_not_asked_for_xet_storage(hub, found, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    push_published(found, NAME, private=False)
    assert hub.repositories[NAME].files[WEIGHTS] == b"grpo_s0 20"
    assert not any("xet" in asked for asked in hub.asked)


def test_a_pushed_model_names_no_directory_of_this_machine(hub, tmp_path):
    choice = choose(campaign(tmp_path / "logs", {("grpo", 0): flat(0.5)}), "")
    found = publish(choice, Wishes(tmp_path / "out", base_model="/models/mine"), lambda _: None)
    pushed = push_published(replace(found, kind="merged"), NAME, private=False)
    assert pushed.base_model == "mine"
    assert "/models" not in hub.repositories[NAME].files[FACTS].decode()
    assert read_published(tmp_path / "out").base_model == "/models/mine"


@pytest.mark.parametrize("name", ["sorter", "a/b/c", "some body/sorter", "somebody/"])
def test_a_name_that_cannot_be_is_told_before_anything_is_written(name):
    with pytest.raises(ConfigError, match="--push "):
        check_name(name)


def test_adapters_of_a_model_without_a_name_are_not_pushed(hub, tmp_path, monkeypatch):
    choice = choose(campaign(tmp_path / "logs", {("grpo", 0): flat(0.5)}), "")
    wishes = Wishes(tmp_path / "out", base_model="/models/mine", repository=NAME)
    with pytest.raises(ConfigError, match="publish them with --base-model ORG/NAME"):
        publish(choice, wishes, lambda _: None)
    assert not (tmp_path / "out").exists()


def test_the_command_pushes_and_pushes_again(hub, tmp_path, here):
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    env = {**os.environ, "HF_HUB_DISABLE_XET": "1"}
    hub.failing["/api/models"] = Answer(403, {"error": "an injected fault"})

    def call(*words: object) -> CompletedProcess[str]:
        command = [sys.executable, "-m", "retrain", "publish", *map(str, words)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    refused = call(directory, "--push", NAME, "--private")
    assert (refused.returncode, refused.stdout) == (EXIT_CONFIG, "")
    again = re.search("try again with: retrain publish (.*)", refused.stderr)[1]
    hub.failing.clear()
    done = call(*again.split(), "--json")
    assert done.returncode == EXIT_DONE, done.stderr
    assert (done.returncode, json.loads(done.stdout)["url"]) == (EXIT_DONE, f"{hub.url}/{NAME}")
    assert f'name = "{NAME}"' in hub.repositories[NAME].files[CARD].decode()
    assert TOKEN not in refused.stderr + done.stderr
