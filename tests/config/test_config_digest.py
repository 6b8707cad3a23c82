"""What makes two runs the same experiment: what was set and decides, not where it lies or who wrote it."""

from __future__ import annotations

import dataclasses
import json
import resource
import socket
import tomllib
from pathlib import Path

import pytest
import tomli_w

from retrain.base.errors import EXIT_INFRASTRUCTURE, ConfigError, exit_code_of
from retrain.config.digest import digest, is_as_written
from retrain.config.files import LARGEST_WHOLE, changed_files, fingerprint
from retrain.config.keys import keys_of
from retrain.config.load import parse
from retrain.config.resolve import RUN_SECTIONS, SECTIONS, as_tables
from retrain.plan.build import plan_runs

OLD = Path(__file__).parents[1] / "data" / "logs-0.2.0"
FIRST = json.loads((Path(__file__).parents[1] / "data" / "first_defaults.json").read_text())
EFFECTS = {"result", "time", "schedule", "display"}


def of(**tables: object) -> str:
    return digest(parse(tables, "c", try_plugins=False))


@pytest.mark.parametrize(
    "tables",
    [
        {"training": {"lr": 4e-5}},
        {"training": {"save_every": 3, "keep_checkpoints": 9}},
        {"backend": {"max_concurrent": 9, "throttle_dir": "shared"}},
        {"logging": {"log_dir": "x", "samples_per_step": 0}},
        {"data": {"task": "sort", "options": {}}},
    ],
)
def test_what_goes_without_saying_or_does_not_decide_is_left_out(tables):
    assert of(**tables) == of()


@pytest.mark.parametrize(
    "tables",
    [{"training": {"lr": 0.1}}, {"data": {"options": {"length": 2}}}, {"reward": {"reward": "partial"}}],
)
def test_what_decides_shows(tables):
    assert of(**tables) != of()


def test_a_number_is_the_same_however_it_is_written():
    assert of(training={"temperature": 1}) == of(training={"temperature": 1.0})
    assert of(data={"options": {"held_out": 0}}) == of(data={"options": {"held_out": 0.0}})


def test_it_names_its_version():
    assert of().startswith("v2:")


@pytest.mark.parametrize("key", FIRST)
def test_a_default_that_changes_keeps_the_meaning_of_old_digests(key):
    """Declare `was=<the first default>` on a field whose default changes."""
    section, name = key.split(".")
    assert keys_of(SECTIONS[section])[name].first_default == FIRST[key]


def test_every_key_declares_what_it_affects():
    found = {key.affects for kind in SECTIONS.values() for key in keys_of(kind).values()}
    assert found == EFFECTS


@pytest.mark.parametrize("section", RUN_SECTIONS)
def test_a_key_is_part_of_the_identity_if_the_reference_says_that_it_affects_the_result(section):
    config = parse({}, "c", try_plugins=False)
    for key in keys_of(SECTIONS[section]).values():
        other = dataclasses.replace(getattr(config, section), **{key.name: "something else"})
        changed = digest(dataclasses.replace(config, **{section: other}), {})
        assert (changed != digest(config, {})) == (key.affects == "result"), key.name


def rows(path: Path, first: str = "a") -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f'{{"prompt": "{first}{n}", "answer": "b"}}\n' for n in range(20)))
    return str(path)


def test_a_file_counts_by_what_it_holds(tmp_path):
    one, same = rows(tmp_path / "one" / "a.jsonl"), rows(tmp_path / "two" / "b.jsonl")
    other = rows(tmp_path / "other" / "a.jsonl", first="z")
    found = [of(data={"task": "jsonl", "options": {"path": path}}) for path in (one, same, other)]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("key", ["path", "held_out_path"])
def test_files_are_found_from_any_directory(here, key):
    rows(here / "a.jsonl")
    raw = {"data": {"task": "jsonl", "options": {"path": "a.jsonl", "held_out_path": "a.jsonl"}}}
    (run,) = plan_runs(parse(raw, "c", try_plugins=False)).runs
    assert run.config.data.options[key] == str(here / "a.jsonl")


def test_the_name_of_a_data_set_on_a_hub_stays_a_name(here):
    raw = {"data": {"task": "datasets", "options": {"path": "openai/gsm8k"}}}
    (run,) = plan_runs(parse(raw, "c", try_plugins=False)).runs
    assert run.config.data.options["path"] == "openai/gsm8k"


def test_a_folder_counts_by_its_files(tmp_path):
    for folder in ("one", "two"):
        rows(tmp_path / folder / "a.jsonl")
    before = fingerprint(str(tmp_path / "one"))
    assert before == fingerprint(str(tmp_path / "two"))
    rows(tmp_path / "two" / "b.jsonl")
    assert before != fingerprint(str(tmp_path / "two"))


def test_a_file_that_decides_and_cannot_be_read_is_named(here):
    with socket.socket(socket.AF_UNIX) as made:  # which nobody can open as a file
        made.bind("weights")
    with pytest.raises(ConfigError, match=r"decides the result, and .*weights cannot be read \("):
        plan_runs(parse({"model": {"model": "weights"}}, "c.toml"))


def test_a_file_that_cannot_be_read_for_now_has_not_changed_so_a_worker_tries_again(here):
    (here / "weights").write_text("w")
    config, limits = (
        parse({"model": {"model": "weights"}}, "c.toml"),
        resource.getrlimit(resource.RLIMIT_NOFILE),
    )
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files") as caught:
            changed_files(config, {"model.model": "0123456789abcdef"})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert exit_code_of(caught.value) == EXIT_INFRASTRUCTURE


def test_a_very_large_file_is_sampled(tmp_path):
    path = tmp_path / "weights"
    with path.open("wb") as file:
        file.truncate(LARGEST_WHOLE + 1)
    before = fingerprint(str(path))
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert fingerprint(str(path)) != before


def planned() -> dict:
    return as_tables(plan_runs(parse({"training": {"seed": 1}}, "c")).runs[0].config)


def test_a_run_as_it_was_planned_is_recognized_from_its_file():
    assert is_as_written(tomllib.loads(tomli_w.dumps(planned())))


@pytest.mark.parametrize(
    "change",
    [
        lambda tables: tables["training"].update(lr=0.09),
        lambda tables: tables["data"]["options"].update(length=2),
        lambda tables: tables["run"].update(config_hash=""),
        lambda tables: tables["run"].update(files={"warmup.path": "0"}, config_hash="v2:0"),
        lambda tables: tables.pop("run"),
    ],
)
def test_a_run_that_was_changed_by_hand_is_recognized(change):
    tables = planned()
    change(tables)
    assert not is_as_written(tables)


def test_a_run_of_a_later_version_is_not_guessed_at():
    tables = planned()
    tables["run"]["config_hash"] = "v3:0123456789abcdef"
    with pytest.raises(ConfigError, match="upgrade retrain"):
        is_as_written(tables)


@pytest.mark.parametrize("path", sorted(OLD.rglob("run.toml")), ids=lambda path: path.parent.name)
def test_runs_of_0_2_0_are_recognized(path):
    tables = tomllib.loads(path.read_text())
    assert is_as_written(tables)
    tables["training"]["lr"] *= 2
    assert not is_as_written(tables)
