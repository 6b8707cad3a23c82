"""The loop: what it records, what it refuses, and that a resumed run is the undisturbed one."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from retrain.base.errors import RecordsError, RunFailedError, exit_code_of
from retrain.base.rollouts import Prompt
from retrain.config.load import parse
from retrain.config.resolve import as_tables
from retrain.plan.build import plan_runs
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts, read_done
from retrain.trainer import checkpoint, worker
from retrain.trainer.prompts import open_stream
from tests.clocks import without_times
from tests.stopping import StopAfterStep

ALWAYS = set(
    """
    step run condition seed attempt timestamp step_time_s sample_time_s reward_time_s train_time_s
    permit_wait_s batch_size group_size loss mean_reward reward_std correct_rate lr grad_norm entropy
    zero_signal_group_fraction max_token_hit_rate tokens_per_step tokens_per_second
    """.split()
)
SMALL = {
    "training": {
        "seed": 5,
        "max_steps": 6,
        "batch_size": 3,
        "group_size": 4,
        "max_tokens": 4,
        "temperature": 1.0,
        "lr": 5e-3,
        "save_every": 2,
    },
    "data": {"task": "successor"},
}


def make_run(directory: Path, raw: dict) -> RunFiles:
    directory.mkdir(parents=True)
    run = plan_runs(parse(raw, "c")).runs[0]
    files = RunFiles(directory)
    files.run_toml.write_text(tomli_w.dumps(as_tables(run.config)))
    return files


def train(directory: Path, raw: dict = SMALL) -> RunFiles:
    files = make_run(directory, raw)
    assert worker.run(directory, threading.Event()) == 0
    return files


def with_(section: str, **values: object) -> dict:
    return {**SMALL, section: {**SMALL.get(section, {}), **values}}


def test_every_step_gives_a_row_with_every_promised_key(tmp_path: Path) -> None:
    rows = read_metrics(train(tmp_path / "r").directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all(set(row) >= ALWAYS for row in rows)
    assert {(row["batch_size"], row["group_size"]) for row in rows} == {(3, 4)}


def test_the_same_seed_gives_the_same_rows(tmp_path: Path) -> None:
    first, second = (read_metrics(train(tmp_path / name).directory) for name in "ab")
    assert without_times(first) == without_times(second)


def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    broken = make_run(tmp_path / "broken", SMALL)
    stop = StopAfterStep(broken, step=3)
    assert worker.run(broken.directory, stop) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert without_times(read_metrics(broken.directory)) == without_times(read_metrics(whole.directory))
    assert weights(broken) == weights(whole)


@pytest.mark.parametrize(("steps", "said"), [(0, "stopped after step 0"), (2, "; a checkpoint was saved")])
def test_a_stop_speaks_of_a_checkpoint_if_there_is_one(tmp_path: Path, steps: int, said: str) -> None:
    files = make_run(tmp_path / "r", SMALL)
    assert worker.run(files.directory, StopAfterStep(files, steps)) == 130
    message = read_attempts(files.attempts)[-1].message
    assert message.endswith(said)
    assert ("checkpoint" in message) == any(files.checkpoints.glob("step-*"))


def test_a_run_goes_on_from_its_newest_valid_checkpoint(tmp_path: Path) -> None:
    files = train(tmp_path / "r")
    files.done.unlink()
    newest = files.checkpoints / "step-000006"
    (newest / "trainer.json").write_text("{}")
    assert worker.run(files.directory, threading.Event()) == 0
    assert [row["attempt"] for row in read_metrics(files.directory)] == [1, 1, 1, 1, 2, 2]


def test_a_group_without_signal_is_a_row_and_no_update(tmp_path: Path) -> None:
    constant = with_("reward", reward="tests.plugins.always_right")
    rows = read_metrics(train(tmp_path / "r", constant).directory)
    assert [row["zero_signal_group_fraction"] for row in rows] == [1.0] * 6
    assert {(row["loss"], row["grad_norm"]) for row in rows} == {(0.0, 0.0)}
    assert all(row["correct_rate"] == 1.0 and row["tokens_per_step"] > 0 for row in rows)


def test_a_reward_that_is_not_finite_stops_the_run_and_names_itself(tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", with_("reward", reward="tests.plugins.not_a_number"))
    assert worker.run(files.directory, threading.Event()) == 4
    assert "a reward must be a finite number" in read_attempts(files.attempts)[-1].message
    assert read_metrics(files.directory) == []


def test_evaluation_uses_held_out_prompts_only(tmp_path: Path) -> None:
    files = train(tmp_path / "r", with_("training", eval_every=3))
    rows = read_metrics(files.directory)
    assert [row["step"] for row in rows if "eval_reward" in row] == [3, 6]
    assert read_done(files.done).result["eval_prompts"] > 0  # type: ignore[union-attr]


def test_a_run_that_is_finished_is_left_untouched(tmp_path: Path) -> None:
    files = train(tmp_path / "r")
    before = files.metrics.read_bytes(), files.attempts.read_bytes()
    assert worker.run(files.directory, threading.Event()) == 75
    assert (files.metrics.read_bytes(), files.attempts.read_bytes()) == before


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    files = train(tmp_path / "r", with_("training", keep_checkpoints=1))
    assert sorted(p.name for p in files.checkpoints.iterdir()) == ["step-000006"]


def test_a_checkpoint_with_a_flipped_bit_is_passed_over(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step, {"n": step}, lambda d: (d / "w").write_bytes(b"abc"), keep=3)
    (tmp_path / "step-000002" / "w").write_bytes(b"abd")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert (found.step, found.state) == (1, {"n": 1})


def test_prompts_come_in_epochs_whatever_the_batch_sizes() -> None:
    prompts = [Prompt(i, str(i), "") for i in range(7)]
    stream = open_stream(prompts, "shuffle", {}, 1)
    seen = [p.id for size in (3, 5, 1, 5) for p in map(stream.at, stream.draw(size))]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    assert seen[:7] != seen[7:]


def test_a_prompt_stream_goes_on_from_its_cursor() -> None:
    prompts = [Prompt(i, str(i), "") for i in range(7)]
    one, two = open_stream(prompts, "shuffle", {}, 1), open_stream(prompts, "shuffle", {}, 1)
    one.draw(9)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.draw(10) == two.draw(10)


def test_a_run_whose_checkpoint_is_damaged_says_so_and_goes_on_from_an_older_one(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = make_run(tmp_path / "r", with_("training", max_steps=6, save_every=2))
    assert worker.run(files.directory, StopAfterStep(files, 5)) == 130
    damaged = max(files.checkpoints.iterdir())
    (damaged / "trainer.json").write_text("{}")
    assert worker.run(files.directory, threading.Event()) == 0
    assert f"{damaged}: is damaged" in capfd.readouterr().err
    assert read_attempts(files.attempts)[-1].resumed_from_step == 4


def test_a_pipe_as_any_file_of_the_newest_checkpoint_is_damage_and_holds_nothing_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = make_run(tmp_path / "r", with_("training", max_steps=6, save_every=2))
    assert worker.run(files.directory, StopAfterStep(files, 5)) == 130
    newest = max(files.checkpoints.iterdir())
    names = sorted(path.name for path in newest.iterdir())
    assert {"digests.json", "policy.npz", "trainer.json"} <= set(names)
    for name in names:
        kept = (newest / name).rename(tmp_path / "kept")
        os.mkfifo(newest / name)
        found = checkpoint.newest(files.checkpoints)
        assert found is not None, name
        assert found.step == 4, name
        kept.replace(newest / name)
    os.mkfifo(newest / "later.json")
    with pytest.raises(RecordsError, match=r"later\.json: is not a regular file"):
        checkpoint.newest(files.checkpoints)
    (newest / "later.json").unlink()
    os.mkfifo(files.directory / "pipe")
    (files.directory / "pipe").replace(files.run_toml)
    assert worker.run(files.directory, threading.Event()) == 5
    assert "run.toml: is not a regular file" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that opens and cannot be read")
def test_a_checkpoint_that_cannot_be_read_for_now_is_not_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = make_run(tmp_path / "r", with_("training", max_steps=6, save_every=2))
    assert worker.run(files.directory, StopAfterStep(files, 5)) == 130
    state = max(files.checkpoints.iterdir()) / "trainer.json"
    kept = state.rename(tmp_path / "kept")
    state.symlink_to("/proc/self/mem")  # which begins with an input/output error
    assert worker.run(files.directory, threading.Event()) == 75
    assert f"{state}: cannot read (Input/output error)" in capfd.readouterr().err
    kept.replace(state)
    assert worker.run(files.directory, threading.Event()) == 0
    assert [one.resumed_from_step for one in read_attempts(files.attempts)] == [0, 5]


def test_a_configuration_that_cannot_be_read_for_now_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files, limits = make_run(tmp_path / "r", SMALL), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        code = worker.run(files.directory, threading.Event())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert code == 75
    assert f"{files.run_toml}: cannot read (Too many open files)" in capfd.readouterr().err


class WrappedError(Exception):
    """What a library makes of an error below it."""


def raising(cause: BaseException) -> Exception:
    try:
        try:
            raise cause
        except BaseException as error:
            raise WrappedError from error
    except WrappedError as error:
        return error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConnectionResetError(), 75),
        (OSError(errno.EHOSTUNREACH, "No route to host"), 75),
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), 75),  # of a lost FUSE mount
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 75),
        (OSError(errno.EMFILE, "Too many open files"), 75),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"), 75),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), 4),
        (raising(ConnectionRefusedError()), 75),
        (raising(KeyError("bug")), 4),
        (FileNotFoundError(errno.ENOENT, "No such file"), 4),
        (RunFailedError("the reward is wrong"), 4),
    ],
    ids=str,
)
def test_only_what_the_surroundings_did_is_worth_another_try(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code


def weights(files: RunFiles) -> dict[str, bytes]:
    newest = checkpoint.newest(files.checkpoints)
    assert newest is not None
    arrays = [np.load(path, allow_pickle=False) for path in sorted(newest.directory.glob("*.npz"))]
    return {name: archive[name].tobytes() for archive in arrays for name in archive.files}


def test_sampled_evaluation_gives_pass_at_k(tmp_path: Path) -> None:
    files = train(tmp_path / "r", with_("data", eval_samples=4, eval_prompts=5))
    result = read_done(files.done).result  # type: ignore[union-attr]
    assert 0 <= result["eval_pass_at_1"] <= result["eval_pass_at_4"] <= 1


def test_a_reward_that_cannot_score_is_counted_apart_from_wrong_answers(tmp_path: Path) -> None:
    rows = read_metrics(train(tmp_path / "r").directory)
    assert {(row["reward_error_fraction"], row["reward_timeout_fraction"]) for row in rows} == {(0.0, 0.0)}
