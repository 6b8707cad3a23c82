"""Runs that learn from a finished run: what they record, how they resume, and which teachers are refused."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, start
from retrain.cli.render.status import warnings
from retrain.control.rules import signs
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunEntry, read_run
from retrain.results.report.contents import contents
from retrain.results.report.gather import gather
from retrain.trainer import worker
from tests.stopping import StopAfterStep

SMALL = {"batch_size": 2, "group_size": 2, "max_tokens": 4, "lr": 0.02, "save_every": 2, "entropy_bonus": 0.1}


def planned(place: Path, name: str, teacher: dict | None = None, **tables: dict) -> tuple[Path, RunFiles]:
    """Start a campaign of one run that is not yet executed; return its directory and its run's files."""
    raw = {
        "training": SMALL,
        "data": {"task": "successor"},
        "campaign": {"name": name, "seeds": [0], "max_steps": 5, "launcher": "inline"},
        "logging": {"log_dir": str(place / "logs")},
        "teacher": teacher or {},
        **tables,
    }
    file = place / f"{name}.toml"
    file.write_text(tomli_w.dumps(raw))
    directory = start(file).directory
    (run,) = (directory / "runs").iterdir()
    return directory, RunFiles(run)


def finished(place: Path, name: str, teacher: dict | None = None, **tables: dict) -> tuple[Path, RunFiles]:
    directory, files = planned(place, name, teacher, **tables)
    assert worker.run(files.directory, threading.Event()) == 0
    return directory, files


@pytest.fixture
def source(here: Path) -> RunFiles:
    large = {"options": {"hidden": 40}}
    return finished(here, "first", backend=large, training={**SMALL, "lr": 0.05})[1]


def weights(files: RunFiles) -> np.ndarray:
    with np.load(files.checkpoints / "step-000005" / "policy.npz") as arrays:
        return arrays["weights"]


def test_a_run_without_a_reward_learns_from_the_newest_campaign_of_a_name(
    here: Path, source: RunFiles
) -> None:
    _, files = finished(
        here, "second", {"teacher": f"first/{source.directory.name}"}, reward={"reward": "none"}
    )
    rows = read_metrics(files.directory)
    assert [row["mean_reward"] for row in rows] == [None] * 5
    assert all(row["grad_norm"] > 0 and row["teacher_kl"] > 0 for row in rows)
    assert all(0 <= row["teacher_agreement"] <= 1 and row["teacher_tokens"] > 0 for row in rows)
    assert "unscored_fraction" not in rows[-1]
    assert f'teacher = "{source.directory}"' in files.run_toml.read_text()


@pytest.mark.parametrize("teacher", ["run", "self", "refresh"])
def test_a_run_that_is_stopped_goes_on_bit_for_bit(here: Path, source: RunFiles, teacher: str) -> None:
    table = {"teacher": str(source.directory) if teacher == "run" else "self", "mode": "jsd"}
    table |= {"refresh": True} if teacher == "refresh" else {}
    whole = finished(here, "whole", table)[1]
    directory, broken = planned(here, "broken", table)
    assert worker.run(broken.directory, StopAfterStep(broken, 3)) == 130
    assert reopen(directory).execute().exit_code == 0
    assert np.array_equal(weights(whole), weights(broken))
    kept = ("step", "loss", "grad_norm", "teacher_kl", "teacher_agreement")
    rows = [[{k: row[k] for k in kept} for row in read_metrics(f.directory)] for f in (whole, broken)]
    assert rows[0] == rows[1]


def test_a_campaign_keeps_its_teacher_when_a_newer_one_is_there(here: Path, source: RunFiles) -> None:
    named = {"teacher": f"first/{source.directory.name}"}
    directory, files = planned(here, "second", named)
    assert worker.run(files.directory, StopAfterStep(files, 2)) == 130
    finished(here, "first", training={**SMALL, "lr": 0.01})
    assert reopen(directory).execute().exit_code == 0
    assert len(read_metrics(files.directory)) == 5


def test_a_policy_that_is_its_own_teacher_begins_without_a_distance(here: Path) -> None:
    frozen, follows = (
        [row["teacher_kl"] for row in read_metrics(finished(here, name, table)[1].directory)]
        for name, table in (("a", {"teacher": "self"}), ("b", {"teacher": "self", "refresh": True}))
    )
    assert frozen[0] == pytest.approx(0, abs=1e-12)
    assert min(frozen[1:]) > 0
    assert follows[2] == pytest.approx(0, abs=1e-12)  # after the checkpoint of step 2
    assert follows[1] > 0


def unfinished(run: Path) -> str:
    (run / "done.json").unlink()
    return str(run)


def without_checkpoint(run: Path) -> str:
    shutil.rmtree(run / "checkpoints")
    return str(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda run: "firsd/maxrl_s0",
            r"no run in log_dir; finish that run first, as with `retrain firsd.toml`",
        ),
        (lambda run: "/no/run", r"'/no/run' is no directory, and no run in log_dir; name a finished run"),
        (lambda run: "engine", r"needs backend = \"local\""),
        (lambda run: "first/grpo_s0", r"first-\S+ has no such run, but maxrl_s0; name one of them"),
        (lambda run: str(run.parent.parent), r"is a campaign; name one of its runs"),
        (unfinished, "is not finished"),
        (without_checkpoint, "without a checkpoint"),
    ],
)
def test_a_teacher_that_is_none_is_refused(here: Path, source: RunFiles, change, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"\[teacher\]\.teacher: .*{words}"):
        planned(here, "second", {"teacher": change(source.directory)})


def test_an_evaluation_that_nothing_would_score_is_refused(here: Path) -> None:
    tables = {"reward": {"reward": "none"}, "eval": [{"name": "hard"}]}
    with pytest.raises(ConfigError, match=r"reward: is that of a condition, which is \"none\"; give it one"):
        planned(here, "second", {"teacher": "self"}, **tables)


@pytest.mark.parametrize("metric", ["mean_reward", "eval_reward"])
def test_a_reward_that_a_condition_lacks_decides_nothing(here: Path, source: RunFiles, metric: str) -> None:
    conditions = [{"name": "alone", "reward": {"reward": "none"}}, {"name": "both"}]
    with pytest.raises(ConfigError, match=rf'metric: no row of alone will have "{metric}"'):
        planned(
            here,
            "second",
            {"teacher": "self"},
            decision={"metric": metric},
            campaign={"conditions": conditions},
        )


def test_other_tokens_are_refused_with_the_first_that_differs(here: Path, source: RunFiles) -> None:
    with pytest.raises(ConfigError, match=r"\[teacher\]\.teacher: token \d+ of .* is .* in this run"):
        planned(here, "second", {"teacher": str(source.directory)}, data={"task": "addition"})


def test_a_hint_of_other_characters_is_refused_before_anything_starts(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[teacher\]\.prompt: for prompt \d+ it holds ' '"):
        planned(here, "second", {"teacher": "self", "prompt": "{prompt} {answer}"})


def test_what_the_teacher_reads_is_billed_where_tokens_have_a_price(here: Path, source: RunFiles) -> None:
    prices = {"prices": {"numpy": {"prefill": 1.0, "sample": 1.0, "train": 1.0}}}
    tables = {"teacher": str(source.directory)}, {}
    billed = [
        read_metrics(finished(here, f"c{number}", table, budget=prices)[1].directory)[0]
        for number, table in enumerate(tables)
    ]
    more = billed[0]["prefill_tokens"] - billed[1]["prefill_tokens"]
    assert more == billed[0]["teacher_tokens"]


TWO = [{"name": "easy", "task": "successor"}, {"name": "hard", "task": "sort", "options": {"length": 3}}]


def test_a_source_may_have_a_teacher_of_its_own(here: Path, source: RunFiles) -> None:
    """Known by its name, at first; the other source learns from the reward alone."""
    easy, hard = TWO
    hard = {**hard, "teacher": f"first/{source.directory.name}"}
    _, files = finished(here, "second", {"mode": "jsd"}, data={"source": [easy, hard]})
    rows = read_metrics(files.directory)
    assert all(row["source_hard_teacher_kl"] == row["teacher_kl"] > 0 for row in rows)
    assert not any("source_easy_teacher_kl" in row for row in rows)
    assert f'teacher = "{source.directory}"' in files.run_toml.read_text()


def test_two_sources_learn_from_two_teachers(here: Path, source: RunFiles) -> None:
    easy, hard = TWO
    hard = {**hard, "teacher": str(source.directory)}
    tables = {"data": {"source": [easy, hard]}, "reward": {"reward": "none"}}
    _, files = finished(here, "second", {"teacher": "self"}, **tables)
    first = read_metrics(files.directory)[0]
    assert first["source_easy_teacher_kl"] == pytest.approx(0, abs=1e-12)
    assert first["source_hard_teacher_kl"] > 0


def test_a_single_source_with_a_teacher_is_a_run_with_it(here: Path, source: RunFiles) -> None:
    only = [{**TWO[0], "teacher": str(source.directory)}]
    row = read_metrics(finished(here, "second", data={"source": only})[1].directory)[0]
    assert row["teacher_kl"] > 0


def test_a_source_without_reward_and_teacher_is_refused(here: Path) -> None:
    sources = [TWO[0], {**TWO[1], "teacher": "self"}]
    with pytest.raises(ConfigError, match=r"\[\[data\.source\]\].*teacher.*nothing to learn from"):
        planned(here, "second", data={"source": sources}, reward={"reward": "none"})


def test_a_directory_that_is_no_teacher_is_refused_unread(here: Path) -> None:
    (here / "big").mkdir()
    (here / "big" / "gone").symlink_to("nowhere")
    (here / "big" / "secret").mkdir(mode=0)
    os.mkfifo(here / "big" / "pipe")  # reading it would never end
    with pytest.raises(ConfigError, match="has neither"):
        planned(here, "second", {"teacher": str(here / "big")})


def test_a_campaign_keeps_its_sources_teachers(here: Path, source: RunFiles) -> None:
    data = {"source": [TWO[0], {**TWO[1], "teacher": f"first/{source.directory.name}"}]}
    directory, files = planned(here, "second", data=data)
    assert worker.run(files.directory, StopAfterStep(files, 2)) == 130
    finished(here, "first", training={**SMALL, "lr": 0.01})
    assert reopen(directory).execute().exit_code == 0
    assert len(read_metrics(files.directory)) == 5


def test_the_report_draws_how_far_a_policy_is_from_its_teacher(here: Path, source: RunFiles) -> None:
    directory, _ = finished(here, "second", {"teacher": str(source.directory)}, reward={"reward": "none"})
    assert "teacher-kl" in [chart.name for chart in contents(gather(directory)).sections["learning"]]


def test_status_and_report_name_a_run_that_writes_what_its_teacher_never_would(
    here: Path, source: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"NOTABLE_STEPS": 2, "STRANGE": 0.0, "FALLS": 0.0}.items():
        monkeypatch.setattr(signs, name, value)  # whatever there is counts
    directory, files = finished(here, "second", {"teacher": str(source.directory)}, reward={"reward": "none"})
    row = read_run(RunEntry("r", "a", 0, 5), files).row
    assert "of the policy's tokens in steps 4 to 5" in row.outside_teacher
    assert f"r: {row.outside_teacher}" in [str(line) for line in warnings([row])]
    assert any(row.outside_teacher in problem for problem in gather(directory).problems)
