"""Code of a user's own, named by dotted path: what is wrong with it is a problem of its key."""

from __future__ import annotations

import json
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.config.load import load_config, parse

Retrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def score(:", "({shown}:1: SyntaxError: invalid syntax"),
        ("\nscore = 1 / 0", "({shown}:2: ZeroDivisionError: division by zero); fix that code"),
        ("from .other import score", "({shown}:1: ImportError: attempted relative import with no known"),
        ("\nimport not_there", "({shown}:2: ModuleNotFoundError: No module named 'not_there'); fix that"),
        ("import os\nos.not_there", "({shown}:2: AttributeError: module 'os' has no attribute 'not_there')"),
        ("raise SystemExit('no licence')", "({shown}:1: SystemExit: no licence)"),
        ("pass", "has no attribute 'score'); check the path"),
        ("score = 3", "is of type int, not a function"),
    ],
)
def test_what_cannot_be_imported_is_told_with_its_place(
    code: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{zlib.crc32(code.encode())}"
    (here / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(here))
    with pytest.raises(ConfigError) as caught:
        parse({"reward": {"reward": f"{name}.score"}}, "c.toml")
    (found,) = caught.value.problems
    assert found.startswith("c.toml [reward].reward: ")
    assert says.format(shown=f"{name}.py") in found


def test_a_function_without_a_module_is_no_path() -> None:
    with pytest.raises(ConfigError, match="is not a dotted path"):
        registry.find_function("throttle.load_fn", "load")


@pytest.mark.parametrize(
    ("file", "code", "chosen", "says"),
    [
        (
            "my_tasks",
            "def build(*, seed):\n    n = 3\n    return len(n)\n",
            "data.task=my_tasks.build",
            "my_tasks.py:3: TypeError: object of type 'int' has no len(); raised by the task 'my_tasks.build",
        ),
        (
            "my_backend",
            "def connect(spec): ...\ndef advise(config):\n    return config.backend.options['kind']\n",
            "backend.backend=my_backend.connect",
            "my_backend.py:3: KeyError: 'kind'; raised by the backend 'my_backend.connect'",
        ),
        (
            "my_launcher",
            "def open_launcher(assignment): ...\ndef check_campaign(assignment):\n    exit('no')\n",
            "campaign.launcher=my_launcher.open_launcher",
            "my_launcher.py:3: SystemExit: no; raised by the launcher 'my_launcher.open_launcher'",
        ),
        (
            "my_files",
            "def build(*, seed):\n    open('/no/such/file')\n",
            "data.task=my_files.build",
            "my_files.py:2: FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'; "
            "raised by the task",
        ),
        (
            "my_words",
            "def build(*, seed):\n    raise ValueError('one\\n\\n  two')\n",
            "data.task=my_words.build",
            "my_words.py:2: ValueError: one two; raised by the task 'my_words.build'",
        ),
    ],
)
def test_what_own_code_raises_in_explain_names_its_line(
    file: str, code: str, chosen: str, says: str, retrain: Retrain, campaign_file: Path
) -> None:
    (campaign_file.parent / f"{file}.py").write_text(code)
    told = retrain("explain", campaign_file, "--set", chosen)
    assert told.returncode == 2
    assert told.stderr.startswith(says), told.stderr
    assert "Traceback" not in told.stderr
    debugged = retrain("--debug", "explain", campaign_file, "--set", chosen).stderr
    assert ("Traceback" in debugged) == ("SystemExit" not in says)


HERE = ["campaign.seeds=[0]", "campaign.launcher=inline"]
REWARD = """
from my_parts import letters


def score(completion, prompt):
    return letters({"a": 1}, completion)
"""
PARTS = """
def letters(known, completion):
    return sum(known[letter] for letter in "ab")
"""


@pytest.mark.parametrize("reward", ["my_reward.score", "custom"])
def test_a_raising_reward_is_named_once_for_all_runs(
    reward: str, retrain: Retrain, campaign_file: Path
) -> None:
    (campaign_file.parent / "my_reward.py").write_text(REWARD)
    (campaign_file.parent / "my_parts.py").write_text(PARTS)
    own = f'[reward]\nreward = "{reward}"\n'
    own += '[reward.params]\npath = "my_reward.score"\nworkers = 1\n' if reward == "custom" else ""
    campaign_file.write_text(campaign_file.read_text() + own)
    where = HERE if reward == "custom" else HERE[:1]
    done = retrain("run", campaign_file, *(part for one in where for part in ("--set", one)))
    assert done.returncode == 4
    told = [line for line in done.stderr.splitlines() if "KeyError" in line]
    assert len(told) == 2, done.stderr  # the event of each run
    assert all("my_parts.py:3: KeyError: 'b'; raised by the " in line for line in told)
    assert "my_reward.score" in told[0]
    assert "Traceback" not in done.stderr + done.stdout
    assert done.stdout.count("KeyError") == len({line.partition("raised by")[2] for line in told})


def test_a_reward_written_for_trl_works_as_it_is(retrain: Retrain, campaign_file: Path) -> None:
    rows = [{"question": f"{n}=", "answer": str(n), "weight": n} for n in range(10)]
    (campaign_file.parent / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (campaign_file.parent / "trl_reward.py").write_text(
        "def weighed(prompts, completions, weight, **columns):\n"
        "    assert [f'{one}=' for one in weight] == list(prompts)\n"
        "    return [one / 10 for one in weight]\n"
    )
    options = (
        "data.options={path = 'rows.jsonl', prompt_field = 'question', columns = ['weight'], held_out = 0}"
    )
    chosen = ["reward.reward=trl_reward.weighed", "data.task=jsonl", options, *HERE]
    done = retrain("run", campaign_file, *(part for one in chosen for part in ("--set", one)))
    assert done.returncode == 0, done.stderr
    (metrics, *_) = (campaign_file.parent / "logs").glob("*/runs/*/metrics.jsonl")
    rewards = [json.loads(line)["mean_reward"] for line in metrics.read_text().splitlines()]
    assert all(0 < reward < 1 for reward in rewards)


def test_a_dotted_path_is_looked_up_beside_the_file_wherever_one_is(
    retrain: Retrain, campaign_file: Path
) -> None:
    project = campaign_file.parent / "project"
    project.mkdir()
    (project / "beside_reward.py").write_text("def score(completion, prompt):\n    return 0.5\n")
    file = campaign_file.rename(project / campaign_file.name)
    file.write_text(file.read_text() + '[reward]\nreward = "beside_reward.score"\n')
    assert retrain("explain", file).returncode == 0
    done = retrain("run", file, "--set", "campaign.seeds=[0]")
    assert done.returncode == 0, done.stderr
    (campaign,) = (campaign_file.parent / "logs").glob("tiny-*")
    for run in (campaign / "runs").iterdir():
        (run / "done.json").unlink()
    resumed = retrain("resume", campaign.absolute(), cwd=project)
    assert resumed.returncode == 0, resumed.stderr
    repeated = retrain("explain", campaign / "runs" / "grpo_s0" / "run.toml")
    assert repeated.returncode == 0, repeated.stderr
    (campaign_file.parent / "beside_reward.py").write_text("raise ImportError('the wrong one')\n")
    told = retrain("explain", file).stderr
    assert "project/beside_reward.py) and in the working directory" in told


def test_two_campaigns_in_one_process_each_have_the_file_beside_theirs(here: Path) -> None:
    for number in (1, 2):
        directory = here / f"project{number}"
        directory.mkdir()
        (directory / "twice_written.py").write_text(f"def score(c, p): return {number}.0")
        (directory / "c.toml").write_text('[reward]\nreward = "twice_written.score"\n')
    for number in (1, 2, 1):
        config = load_config(here / f"project{number}" / "c.toml")
        assert registry.find_plugin("rewards", config.reward.reward)("", None) == number
