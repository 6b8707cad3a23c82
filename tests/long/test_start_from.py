"""Runs that start from another's weights: what they load, what identifies them, and what is refused."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, run_campaign, start
from retrain.config.load import parse
from retrain.plan.preflight import backend_problems
from retrain.plugins.tasks import Task
from retrain.records.layout import RunFiles
from retrain.records.manifest import read_manifest
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.stopping import StopAfterStep

SMALL = {"batch_size": 2, "group_size": 4, "max_tokens": 4, "lr": 0.02, "save_every": 2, "entropy_bonus": 0.1}


def planned(place: Path, adapter: Path | str = "", **tables: dict) -> tuple[Path, RunFiles]:
    """Start a campaign of one run that is not yet executed; return its directory and its run's files."""
    place.mkdir(exist_ok=True)
    raw = {
        "model": {"adapter": str(adapter)},
        "training": SMALL,
        "data": {"task": "successor"},
        "algorithm": {"kl_coef": 0.1},
        "campaign": {"seeds": [0], "max_steps": 4, "launcher": "inline"},
        "logging": {"log_dir": str(place / "logs")},
        **tables,
    }
    file = place / "campaign.toml"
    file.write_text(tomli_w.dumps(raw))
    directory = start(file).directory
    (run,) = (directory / "runs").iterdir()
    return directory, RunFiles(run)


def finished(place: Path, adapter: Path | str = "", **tables: dict) -> tuple[Path, RunFiles]:
    directory, files = planned(place, adapter, **tables)
    assert worker.run(files.directory, threading.Event()) == 0
    return directory, files


def weights(files: RunFiles, name: str = "weights", step: int = 4) -> np.ndarray:
    with np.load(files.checkpoints / f"step-{step:06d}" / "policy.npz") as arrays:
        return arrays[name]


@pytest.fixture
def source(here: Path) -> RunFiles:
    return finished(here / "source")[1]


def test_training_goes_on_from_a_runs_last_checkpoint_which_is_the_reference(here, source):
    _, files = finished(here / "second", source.directory)
    assert np.array_equal(weights(files, "start"), weights(source))
    assert not np.array_equal(weights(files), weights(source))
    first, *later = [row["reference_kl"] for row in read_metrics(files.directory)]
    assert first == pytest.approx(0, abs=1e-12)
    assert max(later) > 1e-6


def test_where_the_weights_are_does_not_count_but_what_they_are(here, source):
    shutil.copytree(source.directory, here / "moved")
    other = finished(here / "other", training={**SMALL, "lr": 0.01})
    starts = ["", source.directory, here / "moved", other[1].directory]
    hashes = []
    for number, adapter in enumerate(starts):
        directory, _ = planned(here / f"c{number}", adapter)
        hashes.append(reopen(directory).plan.runs[0].config_hash)
    assert hashes[1] == hashes[2]
    assert len(set(hashes)) == 3


def test_the_manifest_has_the_lineage(here, source):
    directory, _ = planned(here / "second", source.directory)
    reopen(directory).execute()
    ((condition, found),) = read_manifest(directory / "manifest.json").adapters.items()
    assert condition == "maxrl"
    assert found["adapter"] == str(source.directory)
    assert len(found["digest"]) == 16


def test_a_run_with_a_checkpoint_needs_its_start_no_more(here, source):
    _, whole = finished(here / "whole", source.directory)
    directory, broken = planned(here / "broken", source.directory)
    assert worker.run(broken.directory, StopAfterStep(broken, 2)) == 130
    shutil.rmtree(source.directory)
    assert reopen(directory).execute().exit_code == 0
    kept = ("step", "loss", "mean_reward", "grad_norm", "reference_kl")
    rows = [[{k: row[k] for k in kept} for row in read_metrics(f.directory)] for f in (whole, broken)]
    assert rows[0] == rows[1]


def test_a_run_without_a_checkpoint_does(here, source, capfd):
    directory, files = planned(here / "second", source.directory)
    shutil.rmtree(source.directory)
    with pytest.raises(ConfigError, match=r"model\.adapter: the file is missing"):
        reopen(directory)
    assert worker.run(files.directory, threading.Event()) == 2
    assert "[model].adapter: the file is missing" in capfd.readouterr().err


def gone(run: Path) -> Path:
    return run / "nowhere"


def unfinished(run: Path) -> Path:
    (run / "done.json").unlink()
    return run


def without_checkpoint(run: Path) -> Path:
    shutil.rmtree(run / "checkpoints")
    return run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (gone, "does not exist"),
        (unfinished, "is a run that is not finished"),
        (without_checkpoint, "is a run without a checkpoint"),
        (lambda run: run.parents[1], r"is a campaign; name one of its runs, such as .*maxrl_s0"),
        (lambda _: "tinker://run/weights/1", "is no run of the numpy backend"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_anything_is_created(here, source, change, said):
    with pytest.raises(ConfigError, match=rf"\[model\]\.adapter: .*{said}"):
        planned(here / "second", change(source.directory))
    assert not (here / "second" / "logs").exists()


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"backend": {"options": {"hidden": 8}}}, r"this checkpoint's shapes\.input"),
        ({"data": {"task": "addition"}}, "this checkpoint's alphabet"),
        ({"algorithm": {"kl_coef": 0.1, "kl_reference": "base"}}, "has no base model"),
    ],
)
def test_another_policy_is_refused(here, source, tables, said):
    with pytest.raises(ConfigError, match=rf"\[model\]\.adapter: .*{said}"):
        planned(here / "second", source.directory, **tables)


def test_a_backend_that_starts_from_no_adapter_is_named_with_those_that_do() -> None:
    raw = {"backend": {"backend": "tests.small_memory.connect"}, "model": {"adapter": "a/run"}}
    (problem,) = backend_problems(parse(raw, "c.toml"), Task((), (), "", 0))
    assert str(problem) == (
        "[model].adapter: backend 'tests.small_memory.connect' cannot start from an adapter; "
        "remove it, or use a backend that can: local, numpy, tinker"
    )


def test_without_a_kl_term_no_reference_is_kept_and_none_is_asked_for_later(here, source) -> None:
    directory, files = planned(here / "second", source.directory, algorithm={"kl_coef": 0.0})
    assert worker.run(files.directory, StopAfterStep(files, 2)) == 130
    with np.load(files.checkpoints / "step-000002" / "policy.npz") as arrays:
        assert "start" not in arrays
    toml = directory / "campaign.toml"
    toml.write_text(toml.read_text().replace("kl_coef = 0.0", "kl_coef = 0.1"))
    assert reopen(directory, accept_config_change=True).execute().exit_code == 4
    assert "the checkpoint lacks the reference that the run now needs" in files.output_log.read_text()


def test_a_name_too_long_for_a_file_does_not_exist() -> None:
    (problem,) = backend_problems(parse({"model": {"adapter": "a" * 300}}, "c.toml"), Task((), (), "", 0))
    assert "does not exist; name a finished run" in problem.what


def test_each_condition_has_a_start_of_its_own(here, source, retrain) -> None:
    _, longer = finished(here / "longer", campaign={"seeds": [0], "max_steps": 6, "launcher": "inline"})
    starts = {"one": str(source.directory), "two": str(longer.directory), "none": ""}
    conditions = [{"name": name, "model": {"adapter": adapter}} for name, adapter in starts.items()]
    file = here / "c.toml"
    tables = {"training": SMALL, "data": {"task": "successor"}, "algorithm": {"kl_coef": 0.1}}
    campaign = {"seeds": [0], "max_steps": 4, "launcher": "inline", "conditions": conditions}
    file.write_text(tomli_w.dumps({**tables, "campaign": campaign}))
    shown = retrain("explain", str(file)).stdout
    wanted = r"\n +".join([*map(re.escape, filter(None, starts.values())), "no adapter"])
    assert re.search(f"starts from +{wanted}", shown)
    outcome = run_campaign(file)
    assert outcome.exit_code == 0
    saved = {name: RunFiles(outcome.directory / "runs" / f"{name}_s0") for name in starts}
    assert np.array_equal(weights(saved["one"], "start"), weights(source))
    assert np.array_equal(weights(saved["two"], "start"), weights(longer, step=6))
    with np.load(saved["none"].checkpoints / "step-000004" / "policy.npz") as arrays:
        assert "start" not in arrays
    found = read_manifest(outcome.directory / "manifest.json").adapters
    assert {name: start["adapter"] for name, start in found.items()} == {
        name: start for name, start in starts.items() if start
    }


def test_a_start_that_changed_since_the_run_was_planned_is_refused(here, source, capfd) -> None:
    directory, files = planned(here / "second", source.directory)
    _, other = finished(here / "other", training={**SMALL, "lr": 0.01})
    shutil.rmtree(source.checkpoints)
    shutil.copytree(other.checkpoints, source.checkpoints)
    assert worker.run(files.directory, threading.Event()) == 2
    assert "has changed since the run was planned; restore it" in capfd.readouterr().err
    with pytest.raises(ConfigError, match=r"model\.adapter"):
        reopen(directory)
