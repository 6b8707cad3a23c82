"""States at the API: noted as they are saved, needed while a run may go on from them, deleted on request."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.backends.tinker import saved_states
from retrain.backends.tinker.saved_states import State, read_state, write_state
from retrain.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_LAUNCH, RecordsError
from retrain.base.locks import hold, is_held
from retrain.campaign.run import reopen, run_campaign, start
from retrain.campaign.states import delete_states, states_of
from retrain.config.schema import Config, ModelSection
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import RunState
from retrain.trainer import worker
from tests.stopping import StopAfterStep
from tests.tinker_api.running import KEY, MODEL, RunningServer, serve, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ALPHABET = "01234="
CAMPAIGN = """
[model]
model = "{model}"
base_url = "{url}"

[training]
batch_size = 2
group_size = 8
max_tokens = 3
temperature = 1.0
save_every = 1

[data]
task = "successor"
options = {{ digits = 1, base = 5, held_out = 0.0 }}

[reward]
reward = "partial"

[backend]
backend = "tinker"
options = {{ tokenizer = "{tokenizer}" }}

[campaign]
seeds = [0, 1]
max_steps = 4
launcher = "inline"
"""


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, ALPHABET)


def at_the_api(here: Path) -> int:
    return sum(path.is_dir() for path in (here / "states").iterdir())


def test_states_are_deleted_that_no_run_needs(
    here: Path,
    server: RunningServer,
    retrain: Callable[..., CompletedProcess[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = here / "c.toml"
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer))
    campaign = start(file)
    directory, run = campaign.directory, campaign.files_of("maxrl_s0")
    assert worker.run(run.directory, StopAfterStep(run, step=3)) == EXIT_INTERRUPTED
    [stopped, untouched] = states_of(directory)
    assert stopped.state == RunState.INTERRUPTED
    assert set(stopped.needed) < set(stopped.paths)  # two checkpoints of three are kept
    assert (untouched.state, untouched.paths) == (RunState.PENDING, ())
    with hold(CampaignFiles(directory).lock) or pytest.fail("somebody holds it"):
        assert retrain("states", directory, "--delete").returncode == EXIT_LAUNCH
    assert set(delete_states(directory).values()) == {""}
    assert at_the_api(here) == len(stopped.needed)
    shown = json.loads(retrain("states", directory, "--json").stdout)["states"]
    assert shown[0]["paths"] == shown[0]["needed"] == list(stopped.needed)
    assert reopen(directory).execute().exit_code == EXIT_DONE  # from a state that was kept
    finished = states_of(directory)
    assert [one.needed for one in finished] == [(), ()]
    with monkeypatch.context() as patch:
        patch.delenv("TINKER_API_KEY")
        keyless = retrain("states", directory, "--delete")
    assert (keyless.returncode, keyless.stderr.count("'tinker' needs a key")) == (EXIT_CONFIG, 1)
    command = [sys.executable, "-m", "retrain", "states", str(directory), "--delete"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, at_the_api(here)) == (EXIT_DONE, 0)
    assert f"{sum(len(one.paths) for one in finished)} states deleted" in done.stderr


def test_what_a_server_that_dies_leaves_is_told_and_deleted_later(
    here: Path, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = here / "c.toml"
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer))
    done = run_campaign(file)
    assert done.exit_code == EXIT_DONE
    saved = at_the_api(here)

    def kill_in_the_middle() -> None:
        while at_the_api(here) > saved - 2:  # when the second is gone, the first was answered
            time.sleep(0.001)
        server.kill()
        held.append(is_held(CampaignFiles(done.directory).lock))

    held: list[bool] = []  # else a resume could begin meanwhile, and need what is deleted
    killer = threading.Thread(target=kill_in_the_middle)
    killer.start()
    with monkeypatch.context() as patch:
        patch.setattr(saved_states, "DELETE_S", 10.0)
        told = delete_states(done.directory)
    killer.join()
    left = [path for path, problem in told.items() if problem]
    assert held == [True]
    assert len(told) == saved
    assert 0 < len(left) < saved
    assert all("not deleted: the API did not answer within 10 s" in told[path] for path in left)
    assert [path for run in states_of(done.directory) for path in run.paths] == left
    server.start()
    assert set(delete_states(done.directory).values()) == {""}
    assert (at_the_api(here), [run.paths for run in states_of(done.directory)]) == (0, [(), ()])


def test_an_api_that_does_not_answer_is_told_instead_of_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_states, "DELETE_S", 1.0)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        config = Config(
            model=ModelSection(model=MODEL, base_url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
        )
        found = saved_states.deleted(config, ["tinker://run-1/weights/a", "tinker://run-1/weights/b"])
    assert len(found) == 2
    assert all("the API did not answer within 1 s" in problem for problem in found.values())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, State("tinker://m/weights/a", 5), "some/model", 32)
    assert read_state(tmp_path, "some/model", 32) == State("tinker://m/weights/a", 5)
    with pytest.raises(RecordsError, match="lora_rank is 32, the run's is 16"):
        read_state(tmp_path, "some/model", 16)
    (tmp_path / "tinker.json").write_text("{}")
    with pytest.raises(RecordsError, match="not a readable checkpoint"):
        read_state(tmp_path, "some/model", 32)
