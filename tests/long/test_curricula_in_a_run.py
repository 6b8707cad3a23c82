"""Curricula in real runs: what a bad one does, and that a resume goes on with every one of them."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain import ConfigError, Prompt, find_plugin
from retrain.config.load import parse
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.trainer import checkpoint, worker
from retrain.trainer.prompts import open_stream
from tests.clocks import without_times
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import make_run, train, with_

OWN = """
import time
from retrain import Curriculum


class Own(Curriculum):
    def __init__(self, size):
        self.size, self.steps = size, 0

    def choose(self, count):
        return [(self.steps * count + n) % self.size for n in range(count)]

    def observe(self, positions, rewards):
        self.steps += 1

    def state_dict(self):
        return {{"steps": self.steps}}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Broken(Own):
{method}


def open_curriculum(prompts, *, seed):
    return Broken(len(prompts))
"""
LATER = "        if self.steps < 3: return super().choose(count)\n"
BROKEN = {
    "too few": (LATER + "        return [0]", "chose [0]; needs a list of 3 positions"),
    "repeated": (LATER + "        return [0, 1, 0]", "chose position 0 twice; set `repeats = True`"),
    "unknown": (
        LATER + "        return [0, 1, 100_000]",
        "chose [0, 1, 100000]; needs a list of 3 positions below",
    ),
    "no list": (LATER + "        return 3", "chose 3; needs a list of 3 positions"),
    "raises": (LATER + "        return [1 / 0]", "failed in choose: "),
}


def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> dict:
    name = f"own_curriculum_{abs(hash(method))}"
    (tmp_path / f"{name}.py").write_text(OWN.format(method=method))
    monkeypatch.syspath_prepend(str(tmp_path))
    return with_("data", curriculum=f"{name}.open_curriculum")


@pytest.mark.parametrize("fault", BROKEN)
def test_a_bad_choice_ends_the_run_by_name_and_the_checkpoint_stands(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, says = BROKEN[fault]
    raw = own(tmp_path, monkeypatch, f"    def choose(self, count):\n{body}")
    files = make_run(tmp_path / "r", raw)
    assert worker.run(files.directory, threading.Event()) == 4
    message = read_attempts(files.attempts)[-1].message
    assert message.startswith("[data].curriculum: 'own_curriculum_")
    assert says in message
    saved = checkpoint.newest(files.checkpoints)
    assert saved is not None
    assert (saved.step, len(read_metrics(files.directory))) == (2, 3)


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        ("predict", "[0.5]"),
        ("predict", "['often'] * len(positions)"),
        ("predict", "[float('nan')] * len(positions)"),
        ("predict", "[1.5] * len(positions)"),
        ("success", "rewards.mean(axis=1)"),
        ("success", "rewards - 1.0"),
    ],
)
def test_success_rates_that_are_none_end_the_run_by_name(
    method: str, returned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = {"predict": "[0.5] * len(positions)", "success": "rewards.clip(0.0, 1.0)", method: returned}
    raw = own(
        tmp_path,
        monkeypatch,
        f"    def predict(self, positions): return {bodies['predict']}\n"
        f"    def success(self, rewards): return {bodies['success']}",
    )
    files = make_run(tmp_path / "r", raw)
    assert worker.run(files.directory, threading.Event()) == 4
    message = read_attempts(files.attempts)[-1].message
    assert message.startswith("[data].curriculum: 'own_curriculum_")
    assert f"from {method}; needs numbers from 0 to 1 of shape (3," in message


@pytest.mark.parametrize("state", ["{1: 2}", "{'ties': [{'of': {3: 1}}]}"])
def test_a_state_that_would_come_back_changed_ends_the_run_before_its_first_step(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_run(tmp_path / "r", own(tmp_path, monkeypatch, f"    def state_dict(self): return {state}"))
    assert worker.run(files.directory, threading.Event()) == 4
    assert "written and read again, it differs" in read_attempts(files.attempts)[-1].message


def test_a_state_that_cannot_be_saved_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_run(
        tmp_path / "r",
        own(tmp_path, monkeypatch, "    def state_dict(self): return {'seen': {1, 2}}"),
    )
    assert worker.run(files.directory, threading.Event()) == 4
    assert "has a state that cannot be saved" in read_attempts(files.attempts)[-1].message
    assert read_metrics(files.directory) == []


def test_a_slow_choice_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("retrain.trainer.prompts.SLOW_S", 0.0)
    monkeypatch.setattr("retrain.trainer.prompts.SLOW_FRACTION", 0.0)
    files = make_run(tmp_path / "r", own(tmp_path, monkeypatch, "    pass"))
    assert worker.run(files.directory, threading.Event()) == 0
    assert caplog.text.count("make `choose` faster") == 1


def test_a_skip_that_would_never_take_some_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"least: got 0.*; needs a number above 0, at most 1"):
        parse({"data": {"curriculum": "skip", "curriculum_params": {"least": 0.0}}}, "c")


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(["shuffle", "pool", "skip"]),
    refill=st.sampled_from(["none", "tied"]),
    stop=st.integers(1, 5),
)
def test_a_run_that_is_resumed_at_any_step_equals_an_undisturbed_one(
    name: str, refill: str, stop: int
) -> None:
    raw = with_("data", curriculum=name, refill=refill)
    with tempfile.TemporaryDirectory() as home:
        whole, broken = (make_run(Path(home) / side, raw) for side in ("whole", "broken"))
        assert worker.run(whole.directory, threading.Event()) == 0
        assert worker.run(broken.directory, StopAfterStep(broken, step=stop)) == 130
        assert worker.run(broken.directory, threading.Event()) == 0
        rows = [read_metrics(files.directory) for files in (whole, broken)]
        assert without_times(rows[0]) == without_times(rows[1])


@pytest.mark.parametrize("name", ["shuffle", "pool", "skip"])
def test_asynchronous_sampling_trains_with_every_curriculum(name: str, tmp_path: Path) -> None:
    raw = with_("data", curriculum=name)
    raw["rate_limiter"] = {"max_staleness": 2}
    files = make_run(tmp_path / "r", raw)
    assert worker.run(files.directory, threading.Event()) == 0
    assert len(read_metrics(files.directory)) == 6


@given(
    name=st.sampled_from(["shuffle", "pool", "skip"]),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12),
    seed=st.integers(0, 100),
)
@settings(deadline=None)
def test_prompts_put_back_come_first_and_unscored_rollouts_teach_nothing_wrong(
    name: str, steps: list[tuple[int, int]], seed: int
) -> None:
    prompts = [Prompt(number, str(number), "") for number in range(7)]
    stream, random = open_stream(prompts, name, {}, seed), np.random.default_rng(seed)
    for count, back in steps:
        draws = stream.draw(count)
        assert len(draws) == count
        stream.put_back(draws[:back])
        assert stream.draw(len(draws[:back])) == sorted(draws[:back])
        rewards = random.integers(0, 2, (count, 4)).astype(float)
        rewards[random.random(rewards.shape) < 0.5] = np.nan
        summary = stream.observe(draws, rewards)
        assert summary is None or 0 <= summary.predicted <= 1
    curriculum = find_plugin("curricula", name)(prompts, seed=seed)
    curriculum.observe([0, 1], np.full((2, 4), np.nan))
    predicted = curriculum.predict([0, 1])
    assert predicted is None or predicted.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("curriculum", ["shuffle", "pool", "skip"])
@pytest.mark.parametrize("sampling", ["in turn", "ahead"])
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, curriculum: str, sampling: str
) -> None:
    raw = with_("data", refill="tied", curriculum=curriculum)
    if sampling == "ahead":
        raw["rate_limiter"] = {"max_staleness": 1}
    undisturbed = train(tmp_path / "a", raw)
    files = make_run(tmp_path / "b", raw)
    assert worker.run(files.directory, StopAfterStep(files, 3)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    whole, resumed = (read_metrics(run.directory) for run in (undisturbed, files))
    assert [row["step"] for row in resumed] == [row["step"] for row in whole]
    if sampling == "in turn":  # what is sampled ahead depends on the clock
        assert without_times(resumed) == without_times(whole)
