"""Supervised steps before the first one: what is read, what is learned, and that nothing of it is lost."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import connect
from retrain.base.errors import ConfigError
from retrain.base.json_lines import Demonstration, read_demonstrations
from retrain.base.rollouts import Prompt, TrainingSample
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plugins.tasks import successor
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from retrain.trainer.warm_up import WARM_UP_LOSS
from tests.clocks import without_times
from tests.trainer.test_trainer import SMALL, make_run, train

ANSWER = {"role": "assistant", "content": "2"}


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Right answers to every prompt of the task."""
    task = successor.build(seed=0)
    rows = [{"prompt": p.text, "completion": p.answer} for p in (*task.train, *task.held_out)]
    return write(tmp_path, *map(json.dumps, rows))


def write(directory: Path, *lines: str) -> Path:
    path = directory / "rows.jsonl"
    path.write_text("\n".join(lines))
    return path


def warmed(path: Path, steps: int = 150) -> dict:
    return {**SMALL, "warmup": {"path": str(path), "steps": steps, "batch_size": 32, "lr": 1e-2}}


def rows_of(files: RunFiles) -> list[dict]:
    return [json.loads(line) for line in files.warmup.read_text().splitlines()]


def test_a_warmed_policy_begins_with_most_answers_right(tmp_path: Path, answers: Path) -> None:
    cold = read_metrics(train(tmp_path / "cold").directory)
    files = train(tmp_path / "warm", warmed(answers))
    assert cold[0]["mean_reward"] < 0.2
    assert read_metrics(files.directory)[0]["mean_reward"] > 0.6
    losses = [row["loss"] for row in rows_of(files)]
    assert len(losses) == 150
    assert losses[0] > 2 > 0.6 > losses[-1]


def test_an_export_of_the_warm_up_holds_every_update(tmp_path: Path, answers: Path, retrain) -> None:
    files = train(tmp_path / "logs" / "maxrl_s5", warmed(answers, steps=3))
    answer = retrain("export", str(files.directory.parent), "--warmup", "--format", "jsonl")
    exported = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [(row["run"], row["step"], row["loss"]) for row in exported] == [
        ("maxrl_s5", row["step"], row["loss"]) for row in rows_of(files)
    ]
    assert retrain("export", str(files.directory), "--warmup", "--runs").returncode == 2


def test_metrics_begin_with_the_first_step_of_reinforcement_learning(tmp_path: Path, answers: Path) -> None:
    files = train(tmp_path / "r", warmed(answers, steps=3))
    assert [row["step"] for row in read_metrics(files.directory)] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows_of(files)] == [1, 2, 3]


class Killed(BaseException):
    """Ends a process as SIGKILL would: nothing catches it."""


class KilledAtLook(threading.Event):
    """Ends the process when the run looks whether to stop for the n-th time."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self._left = look

    def is_set(self) -> bool:
        self._left -= 1
        if self._left == 0:
            raise Killed
        return False


def test_a_run_that_is_killed_in_its_warm_up_loses_at_most_save_every_updates(
    tmp_path: Path, answers: Path
) -> None:
    settings = {**warmed(answers, steps=9), "training": {**SMALL["training"], "save_every": 2}}
    whole = train(tmp_path / "whole", settings)
    files = make_run(tmp_path / "killed", settings)
    with pytest.raises(Killed):
        worker.run(files.directory, KilledAtLook(6))
    assert worker.run(files.directory, threading.Event()) == 0
    assert [(row["step"], row["attempt"]) for row in rows_of(files)][4:7] == [(5, 1), (5, 2), (6, 2)]
    assert without_times(read_metrics(files.directory)) == without_times(read_metrics(whole.directory))


class StopAfter(threading.Event):
    """Asks the run to stop once it was looked at so many times."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self._left = looks

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.mark.parametrize("save_every", [1, 4])
@pytest.mark.parametrize("looks", [0, 1, 4, 5, 9])
def test_a_run_that_was_stopped_in_its_warm_up_ends_as_if_it_had_not_been(
    tmp_path: Path, answers: Path, looks: int, save_every: int
) -> None:
    settings = {**warmed(answers, steps=5), "training": {**SMALL["training"], "save_every": save_every}}
    whole = train(tmp_path / "whole", settings)
    files = make_run(tmp_path / "stopped", settings)
    assert worker.run(files.directory, StopAfter(looks)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    assert without_times(read_metrics(files.directory)) == without_times(read_metrics(whole.directory))
    assert [row["loss"] for row in rows_of(files)] == [row["loss"] for row in rows_of(whole)]


def test_the_checkpoint_after_the_last_update_holds_no_moments_of_it(tmp_path: Path, answers: Path) -> None:
    settings = {**warmed(answers, steps=60), "training": {**SMALL["training"], "save_every": 30}}
    whole = read_metrics(train(tmp_path / "whole", settings).directory)
    files = make_run(tmp_path / "stopped", settings)
    assert worker.run(files.directory, StopAfter(60)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    assert any(row["grad_norm"] for row in whole)
    assert without_times(read_metrics(files.directory)) == without_times(whole)


def test_only_completions_are_learned(tmp_path: Path) -> None:
    """The loss at lr 0 is minus the mean log-probability that the sampler itself gave the completion."""
    backend = connect(BackendSpec(seed=3, alphabet="0123456789="))
    prompts = [Prompt(1, "12=", ""), Prompt(2, "7=", "")]
    groups = backend.sample(prompts, Sampling(8, 12, 1.0))
    ended = [r for group in groups for r in group.rollouts if not r.truncated and r.text]
    written = backend.written([Demonstration(r.prompt, r.text) for r in ended])
    tokens = sum(len(r.tokens) for r in written)
    samples = [TrainingSample(r, np.ones(len(r.tokens)), 1 / tokens) for r in written]
    stats = backend.update(samples, WARM_UP_LOSS, Optimization(lr=1e-9))
    assert [r.tokens for r in written] == [r.tokens for r in ended]
    assert stats.loss == pytest.approx(-np.concatenate([r.logprobs for r in ended]).mean(), rel=1e-5)


def test_moments_of_the_warm_up_are_forgotten(tmp_path: Path, answers: Path) -> None:
    """A fresh Adam's first step moves each weight by lr at most; an old one's moments would shrink it."""
    backend = connect(BackendSpec(seed=3, alphabet="0123456789="))
    rollouts = backend.written(read_demonstrations(str(answers))[:16])
    samples = [TrainingSample(r, np.ones(len(r.tokens)), 1 / 48) for r in rollouts]
    for _ in range(5):
        backend.update(samples, WARM_UP_LOSS, Optimization(lr=1e-2))
    backend.reset_optimizer()
    before = backend.weights.flat.copy()
    backend.update(samples, WARM_UP_LOSS, Optimization(lr=1e-2))
    assert np.abs(backend.weights.flat - before).max() == pytest.approx(1e-2, rel=1e-3)


def test_every_turn_of_the_assistant_is_a_demonstration(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": "yes"},
    ]
    first, second = read_demonstrations(str(write(tmp_path, json.dumps({"messages": talk}))))
    assert (first.prompt.text, first.prompt.messages, first.completion) == ("hi", (), "hello")
    assert second.prompt.messages == (("user", "hi"), ("assistant", "hello"), ("user", "more"))
    assert second.completion == "yes"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: got a list; needs"),
        ('{"prompt": "a"}', "rows.jsonl:2: has no 'completion'"),
        ('{"prompt": 3, "completion": "b"}', "'prompt' is 3; needs a non-empty string"),
        ('{"messages": []}', "needs at least one message of the assistant"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "begins with the assistant"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "the role one of system"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    path = write(tmp_path, '{"prompt": "1=", "completion": "2"}', line)
    with pytest.raises(ConfigError) as caught:
        parse(warmed(path), "c.toml")
    assert says in str(caught.value)
    assert "c.toml [warmup].path: " in str(caught.value)


def test_a_condition_leaves_the_warm_up_out(tmp_path: Path, answers: Path) -> None:
    without = {"name": "cold", "warmup": {"steps": 0}}
    conditions = {"conditions": [{"name": "warm"}, without], "seeds": [0]}
    plan = plan_runs(parse({**warmed(answers, steps=3), "campaign": conditions}, "c.toml"))
    assert [run.config.warmup.steps for run in plan.runs] == [3, 0]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"steps": 5}, "[warmup].path: steps = 5 needs a JSONL file"),
        ({"path": "x.jsonl"}, "[warmup].steps: is not given, so path has no effect"),
        ({"path": "nowhere.jsonl", "steps": 1}, "[warmup].path: cannot read 'nowhere.jsonl'"),
    ],
)
def test_keys_that_need_each_other_are_asked_for(table: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({**SMALL, "warmup": table}, "c.toml")
    assert says in str(caught.value)


def test_a_conversation_needs_a_chat_template(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1="}]
    row = {"messages": [*talk, {"role": "assistant", "content": "2"}]}
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: a conversation needs a chat template"):
        parse(warmed(write(tmp_path, json.dumps(row))), "c.toml")


@pytest.mark.parametrize(
    "row", [{"prompt": "1=", "completion": "2ü"}, {"messages": [{"role": "user", "content": "ü="}, ANSWER]}]
)
def test_a_character_outside_the_alphabet_is_found_before_anything_is_created(
    tmp_path: Path, row: dict, retrain, here: Path
) -> None:
    write(here, json.dumps({"prompt": "1=", "completion": "2"}), json.dumps(row))
    (here / "c.toml").write_text(
        '[data]\ntask = "successor"\n[warmup]\npath = "rows.jsonl"\nsteps = 3\n[campaign]\nseeds = [0]\n'
    )
    for command in ("explain", "run"):
        answer = retrain(command, "c.toml")
        assert answer.returncode == 2
        assert "rows.jsonl:2 holds 'ü', which is not in the alphabet" in answer.stderr
    assert not (here / "logs").exists()


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows"):
        read_demonstrations(str(write(tmp_path, "")))
