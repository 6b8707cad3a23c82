"""Inputs are relative to the file that names them, what is written to the working directory."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, start
from retrain.config.keys import Tables
from retrain.config.load import load_config
from retrain.config.resolve import as_tables
from retrain.config.schema import Config
from retrain.plan.build import plan_runs

ROWS = "".join(json.dumps({"prompt": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(10))
TASK = '[data]\ntask = "jsonl"\noptions = {path = "rows.jsonl", held_out = 0}\n'


@pytest.fixture
def project(here: Path) -> Path:
    """A directory below the working one, with rows."""
    (here / "project").mkdir()
    (here / "project" / "rows.jsonl").write_text(ROWS)
    return here / "project"


def file_of(project: Path, text: str) -> Path:
    (project / "c.toml").write_text(text)
    return project / "c.toml"


def options_of(config: Config) -> list[Tables]:
    return [run.config.data.options for run in plan_runs(config).runs]


def test_data_is_relative_to_the_file_that_names_it(project: Path) -> None:
    (options,) = options_of(load_config(file_of(project, TASK + "[training]\nseed = 0\n")))
    assert options["path"] == str(project / "rows.jsonl")


def test_so_is_what_a_condition_or_a_sweep_names(project: Path) -> None:
    (project / "others.jsonl").write_text(ROWS)
    text = TASK + "[campaign]\nseeds = [0]\n[[campaign.conditions]]\nname = 'a'\n"
    own = load_config(file_of(project, text + "data = {options = {path = 'others.jsonl'}}\n"))
    assert options_of(own)[0]["path"] == str(project / "others.jsonl")
    swept = "[campaign.sweep]\n'data.options.path' = ['rows.jsonl', 'others.jsonl']\n"
    found = load_config(file_of(project, text + swept))
    assert [Path(one["path"]).name for one in options_of(found)] == ["rows.jsonl", "others.jsonl"]
    assert [run.condition for run in plan_runs(found).runs] == ["a path=rows.jsonl", "a path=others.jsonl"]


EVERY_INPUT = """
model = { model = "given", adapter = "given" }
warmup = { path = "given", steps = 0 }
backend = { backend = "local", options = { chat_template = "given" } }
"""


def test_every_input_follows_the_rule(project: Path) -> None:
    (project / "given").write_text("x")
    tables = as_tables(load_config(file_of(project, EVERY_INPUT), try_plugins=False))
    found = (*itemgetter("model", "adapter")(tables["model"]), tables["warmup"]["path"])
    assert {*found, tables["backend"]["options"]["chat_template"]} == {str(project / "given")}


def test_a_tokenizer_of_a_directory_follows_the_rule_and_one_of_a_hub_stays(project: Path) -> None:
    (project / "words").mkdir()
    for given, found in (("words", str(project / "words")), ("org/words", "org/words")):
        text = f'backend = {{ backend = "tinker", options = {{ tokenizer = "{given}" }} }}\n'
        config = load_config(file_of(project, text), try_plugins=False)
        assert config.backend.options["tokenizer"] == found


def test_what_is_written_and_what_is_set_by_hand_is_relative_to_the_working_directory(
    project: Path, here: Path
) -> None:
    file = file_of(project, TASK + "[training]\nseed = 0\n")
    (here / "mine.jsonl").write_text(ROWS)
    config = load_config(file, ["data.options.path=mine.jsonl", "backend.throttle_dir=permits"])
    (run,) = plan_runs(config).runs
    assert run.config.data.options["path"] == str(here / "mine.jsonl")
    assert run.config.backend.throttle_dir == str(here / "permits")
    assert plan_runs(config).log_dir == Path("logs")


def test_a_namesake_in_the_working_directory_is_an_error_that_names_both(project: Path, here: Path) -> None:
    file = file_of(project, TASK)
    (here / "rows.jsonl").write_text(ROWS)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    (told,) = refused.value.problems
    assert told.startswith('c.toml [data.options].path: got "rows.jsonl", which is beside this file (')
    assert str(project / "rows.jsonl") in told
    assert f"({here / 'rows.jsonl'})" in told
    (here / "rows.jsonl").unlink()
    (here / "rows.jsonl").symlink_to(project / "rows.jsonl")  # the same file
    load_config(file)


def test_a_file_in_the_working_directory_only_is_an_error_that_says_what_to_write(here: Path) -> None:
    (here / "configs").mkdir()
    (here / "rows.jsonl").write_text(ROWS)
    with pytest.raises(ConfigError, match=r'\[data.options\].path: .* write "../rows.jsonl"'):
        load_config(file_of(here / "configs", TASK))
    load_config(file_of(here / "configs", TASK.replace("rows.jsonl", "../rows.jsonl")))


def test_a_plugin_in_both_places_is_an_error_that_names_both(project: Path, here: Path) -> None:
    for place in (project, here):
        (place / "named_twice.py").write_text("def score(completion, prompt): return 1.0\n")
    with pytest.raises(ConfigError, match=r"project/named_twice.py\) and in the working directory \("):
        load_config(file_of(project, "[reward]\nreward = 'named_twice.score'\n"))
    (here / "named_twice.py").unlink()
    load_config(project / "c.toml")
    assert registry.find_plugin("rewards", "named_twice.score")("", None) == 1


def test_a_run_s_own_file_is_whole_and_its_campaign_goes_on_from_any_directory(
    project: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = start(file_of(project, TASK + "[campaign]\nseeds = [0]\n")).directory.absolute()
    (run_toml,) = begun.glob("runs/*/run.toml")
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rows.jsonl").write_text("other rows")
    monkeypatch.chdir(elsewhere)
    assert load_config(run_toml).data.options["path"] == str(project / "rows.jsonl")
    (run,) = reopen(begun).plan.runs
    assert run.config.data.options["path"] == str(project / "rows.jsonl")


@pytest.mark.parametrize("teacher", ["self", "engine"])
def test_a_teacher_that_is_in_no_file_is_no_directory_of_its_name(project: Path, teacher: str) -> None:
    (project / teacher).mkdir()
    text = f"[teacher]\nteacher = '{teacher}'\n[training]\nseed = 0\n"
    (run,) = plan_runs(load_config(file_of(project, TASK + text))).runs
    assert run.config.teacher.teacher == teacher
