"""Editors complete and check campaign files: the schema in two TOML language servers, as editors run them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.config.reference import DIRECTIVE
from tests.extras.language_server import Editor

TEMPLATES = sorted((Path(__file__).parent.parent.parent / "templates").glob("*.toml"))
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory as `retrain init` leaves it."""
    here = tmp_path_factory.mktemp("here")
    subprocess.run([sys.executable, "-m", "retrain", "init", "-t", "quickstart"], cwd=here, check=True)
    (here / "tombi.toml").write_text("[schema.catalog]\npaths = []\n")  # ask no catalogue in the network
    return here


@pytest.fixture(scope="module")
def editor(folder):
    opened = Editor([str(BIN / "tombi"), "lsp"], folder / "quickstart.toml")
    assert opened.problems((folder / "quickstart.toml").read_text()) == []  # it has read everything by then
    yield opened
    opened.close()


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("[tr|", {"training"}),
        ("[training]\nba|", {"batch_size"}),
        ("[training]\nlr_schedule = |", {"constant", "linear", "cosine"}),
        ("[algorithm]\nadvantage_mode = |", {"grpo", "rloo", "maxrl", "reinforce_pp", "gdpo"}),
        ("[data]\ntask = |", {"sort", "jsonl"}),
        ("[data.options]\nle|", {"length"}),
        ("[backend.options]\nhid|", {"hidden"}),
        ("[backpressure]\nenabled = |", {"true", "false"}),
        ("[campaign]\nlauncher = |", {"local", "inline"}),
        ("[[campaign.conditions]]\nadv|", {"advantage_mode"}),
        ("[[campaign.conditions]]\n[campaign.conditions.training]\nbatch|", {"batch_size"}),
    ],
)
def test_an_editor_offers_sections_keys_values_and_plugins(editor, text, offered):
    assert offered <= editor.complete(f"{DIRECTIVE}\n{text}")


@pytest.mark.parametrize(
    "linter", [["taplo", "lint"], ["tombi", "lint", "--offline"]], ids=["taplo", "tombi"]
)
@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        *[pytest.param(path.read_text(), True, id=path.stem) for path in TEMPLATES],
        pytest.param('[reward]\nreward = "my_rewards.score"', True, id="dotted"),
        pytest.param('[[campaign.conditions]]\nname = "a"\ntraining.lr = 1e-3', True, id="condition"),
        pytest.param("[training]\nbatch_sise = 3", False, id="unknown key"),
        pytest.param('[training]\nbatch_size = "3"', False, id="wrong type"),
        pytest.param('[algorithm]\nadvantage_mode = "grpp"', False, id="unknown plugin"),
        pytest.param("[[campaign.conditions]]\ntraining.batch_sise = 3", False, id="condition's key"),
    ],
)
def test_an_editor_underlines_what_retrain_would_refuse(folder, tmp_path, linter, text, is_right):
    shutil.copy(folder / "retrain.schema.json", tmp_path)
    shutil.copy(folder / "tombi.toml", tmp_path)
    file = tmp_path / "campaign.toml"
    file.write_text(text if text.startswith(DIRECTIVE) else f"{DIRECTIVE}\n{text}\n")
    command = [str(BIN / linter[0]), *linter[1:], str(file)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode == 0) == is_right, result.stdout + result.stderr
