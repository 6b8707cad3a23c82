"""Loggers get every step once, in the background, and nothing that they do reaches the training."""

import json
import subprocess
import sys
import threading

import pytest

from retrain.base.errors import ConfigError
from retrain.base.locks import is_held
from retrain.campaign.run import reopen, run_campaign
from retrain.plugins.loggers import without_secrets
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunEntry, read_run
from retrain.records.run_state import read_attempts, read_done
from retrain.results.status import survey
from retrain.trainer import logger_threads, worker
from tests import logger_plugins
from tests.semaphore_processes import wait_until
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import SMALL, make_run, parse, train

OWN = "tests.logger_plugins"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Try a call again at once."""
    monkeypatch.setattr(logger_threads, "PAUSE_S", 0.0)


def with_loggers(*names, **training):
    return SMALL | {
        "training": SMALL["training"] | training,
        "logging": {"loggers": [f"{OWN}.{name}" for name in names]},
    }


def told(files, name="recorded.jsonl"):
    return [json.loads(line) for line in (files.directory / name).read_text().splitlines()]


def steps(files):
    return [line["step"] for line in told(files) if "step" in line]


def test_a_logger_is_told_every_row_and_the_end(tmp_path):
    files = train(tmp_path / "run", with_loggers("recording"))
    rows = [(line["step"], line["mean_reward"]) for line in told(files) if "step" in line]
    assert rows == [(row["step"], row["mean_reward"]) for row in read_metrics(files.directory)]
    assert told(files)[-1]["closed"] == "done"
    assert "eval_reward" in told(files)[-1]["result"]


def test_a_logger_knows_whose_rows_they_are(tmp_path):
    opened = told(train(tmp_path / "run", with_loggers("recording")))[0]
    assert (opened["run"], opened["seed"], opened["attempt"]) == ("maxrl_s5", 5, 1)
    assert opened["settings"]["training"]["batch_size"] == 3


def test_several_loggers_with_parameters_get_the_same(tmp_path):
    raw = with_loggers("recording", "failing")
    raw["logging"]["logger_params"] = {f"{OWN}.recording": {"name": "elsewhere.jsonl"}}
    files = train(tmp_path / "run", raw)
    assert told(files, "elsewhere.jsonl")[-1]["closed"] == "done"
    assert told(files, "failing.jsonl")[0]["opened"]


@pytest.mark.parametrize("name", ["unwilling", "failing"])
def test_a_logger_that_fails_stops_nothing_and_says_so(tmp_path, capfd, name):
    files = train(tmp_path / "run", with_loggers(name))
    assert len(read_metrics(files.directory)) == SMALL["training"]["max_steps"]
    said = capfd.readouterr().err
    assert "ConnectionError" in said
    assert f"logger {OWN}.{name} is off for this attempt" in said


@pytest.mark.parametrize("name", ["unwilling", "failing", "unflushable", "leaving"])
def test_a_failing_logger_says_its_reason_once_in_one_line(tmp_path, capfd, name):
    train(tmp_path / "run", with_loggers(name, max_steps=12, save_every=2))
    said = [line for line in capfd.readouterr().err.splitlines() if line]
    assert [line.split()[2] for line in said] == ["cannot", "is"]
    assert "hunter2" not in said[0]
    assert len(said[0]) < 400


def test_a_tool_begins_no_run_whose_id_could_not_be_kept(tmp_path, capfd):
    files = make_run(tmp_path / "run", with_loggers("recording"))
    (files.directory / "loggers").write_text("no directory")
    assert worker.run(files.directory, threading.Event()) == 0
    assert not (files.directory / "recorded.jsonl").exists()
    assert "is off for this attempt" in capfd.readouterr().err


def test_a_logger_that_hangs_is_left_behind(tmp_path):
    files = make_run(tmp_path / "run", with_loggers("hanging", "recording"))
    program = (
        "import sys; from retrain.trainer import logger_threads; logger_threads.CLOSING_S = 2.0;"
        "import runpy; sys.argv = ['worker', sys.argv[1]];"
        "runpy.run_module('retrain.trainer.worker', run_name='__main__')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(files.directory)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert "hanging did not finish in time and was abandoned" in ended.stderr
    assert files.done.exists()
    assert told(files)[-1]["closed"] == "done"


def test_a_slow_logger_has_every_row_before_the_run_ends(tmp_path):
    files = train(tmp_path / "run", with_loggers("slow", max_steps=60))
    rows = [line["step"] for line in told(files, "slow.jsonl") if "step" in line]
    assert rows == list(range(1, 61))
    assert told(files, "slow.jsonl")[-1]["closed"] == "done"
    assert read_attempts(files.attempts)[-1].message == ""


def test_a_run_is_done_before_its_loggers_are(tmp_path):
    files = make_run(tmp_path / "run", with_loggers("hanging"))
    worker_thread = threading.Thread(target=worker.run, args=(files.directory, stop := threading.Event()))
    worker_thread.start()
    wait_until(files.done.exists)
    assert worker_thread.is_alive()
    logger_plugins.NEVER.set()
    worker_thread.join()
    logger_plugins.NEVER.clear()
    assert not stop.is_set()


def test_what_a_logger_lacks_at_the_end_is_written_down(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_threads, "SILENT_S", 0.1)
    files = train(tmp_path / "run", with_loggers("hanging"))
    assert read_attempts(files.attempts)[-1].message == (
        f"{OWN}.hanging lacks 6 of 6 rows; `retrain resume` logs them"
    )
    assert read_run(RunEntry("run", "", -1, 6), files).row.message.startswith(f"{OWN}.hanging lacks 6")


def test_a_run_that_is_asked_to_leave_does_not_wait_for_its_loggers(tmp_path, monkeypatch):
    monkeypatch.setattr(logger_threads, "LEAVING_S", 0.1)
    files, stop = make_run(tmp_path / "run", with_loggers("hanging")), threading.Event()
    worker_thread = threading.Thread(target=worker.run, args=(files.directory, stop))
    worker_thread.start()
    wait_until(files.done.exists)
    stop.set()
    worker_thread.join(60)
    assert not worker_thread.is_alive()


def test_a_batch_that_failed_is_handed_over_again_whole(tmp_path):
    files = train(tmp_path / "run", with_loggers("hiccup"))
    assert [line["step"] for line in told(files, "hiccup.jsonl") if "step" in line] == list(range(1, 7))


CAMPAIGN = """
[training]
batch_size = 2
group_size = 4
max_tokens = 3
[data]
task = "successor"
[logging]
loggers = ["tests.logger_plugins.away"]
[campaign]
name = "study"
seeds = [0]
max_steps = 6
launcher = "inline"
[[campaign.conditions]]
name = "maxrl"
"""


def test_resume_logs_what_the_loggers_of_finished_runs_lack(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(CAMPAIGN)
    directory = run_campaign(tmp_path / "study.toml").directory
    files = CampaignFiles(directory).run("maxrl_s0")
    ended_at = read_attempts(files.attempts)[-1].ended_at
    assert "away lacks 6 of 6 rows; `retrain resume` logs them" in str(survey(directory))

    (directory / "back").touch()
    assert reopen(directory).execute().exit_code == 0

    assert [line["step"] for line in told(files, "away.jsonl") if "step" in line] == [1, 2, 3, 4, 5, 6]
    closed, result = told(files, "away.jsonl")[-1], read_done(files.done).result
    assert closed["closed"] == "done"
    assert closed["result"].keys() == result.keys() - {"steps", "resumed_from_step"}
    assert "lacks" not in str(survey(directory))
    assert read_attempts(files.attempts)[-1].ended_at == ended_at
    before = (files.directory / "away.jsonl").read_text()
    assert reopen(directory).execute().exit_code == 0
    assert (files.directory / "away.jsonl").read_text() == before


def test_a_finished_run_whose_attempts_are_lost_is_left_as_it_is_and_unlocked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(CAMPAIGN)
    directory = run_campaign(tmp_path / "study.toml").directory
    files = CampaignFiles(directory).run("maxrl_s0")
    files.attempts.unlink()
    assert reopen(directory).execute().exit_code == 0
    assert not is_held(files.lock)


def resumed(tmp_path, *names, stop_at=5):
    """Stop a run at a step, and finish it; with other loggers if there are two names."""
    files = make_run(tmp_path / "run", with_loggers(names[0], max_steps=12, save_every=4))
    assert worker.run(files.directory, StopAfterStep(files, stop_at)) == 130
    if len(names) > 1:
        other = with_loggers(names[1], max_steps=12, save_every=4)
        files.run_toml.write_text(make_run(tmp_path / "other", other).run_toml.read_text())
    assert worker.run(files.directory, threading.Event()) == 0
    return files


def test_a_resumed_run_goes_on_under_the_same_id_without_gap_or_repetition(tmp_path):
    files = resumed(tmp_path, "recording")
    opened = [line["opened"] for line in told(files) if "opened" in line]
    assert opened == ["id-of-attempt-1", "id-of-attempt-1"]
    assert steps(files) == list(range(1, 13))


def test_rows_that_a_logger_missed_are_logged_when_the_run_is_resumed(tmp_path):
    files = resumed(tmp_path, "failing", "recording")
    assert steps(files) == list(range(1, 13))


def test_steps_after_the_checkpoint_are_logged_again_as_they_came_out_then(tmp_path):
    files = make_run(tmp_path / "run", with_loggers("recording", max_steps=8, save_every=4))
    program = (
        "import json, os, sys, threading, time; from retrain.trainer.journal import Journal;"
        "from pathlib import Path; from retrain.trainer import worker; real = Journal.samples\n"
        "def die(self, step, rows):\n"
        "    real(self, step, rows)\n"
        "    if step == 6:\n"
        "        kept = Path(sys.argv[1]) / 'loggers'\n"
        "        while not any(json.loads(p.read_text())['step'] >= 4 for p in kept.glob('*.json')):\n"
        "            time.sleep(0.01)\n"
        "        os._exit(9)\n"
        "Journal.samples = die\n"
        "worker.run(Path(sys.argv[1]), threading.Event())"
    )
    assert subprocess.run([sys.executable, "-c", program, str(files.directory)], check=False).returncode == 9
    assert worker.run(files.directory, threading.Event()) == 0
    second = told(files)[[("attempt", 2) in line.items() for line in told(files)].index(True) :]
    assert [line["step"] for line in second if "step" in line] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("logging", "problem"),
    [
        ({"loggers": ["wandbb"]}, "[logging].loggers: 'wandbb' is not a known logger; did you mean"),
        ({"loggers": "wandb"}, "[logging].loggers"),
        ({"loggers": [f"{OWN}.recording"] * 2}, "is named twice"),
        ({"logger_params": {"wandb": {}}}, "is not in logging.loggers"),
        ({"loggers": [f"{OWN}.recording"], "logger_params": {f"{OWN}.recording": {"nam": "x"}}}, "'name'?"),
    ],
)
def test_a_wrong_logger_is_an_error_before_anything_starts(logging, problem):
    with pytest.raises(ConfigError) as error:
        parse({"logging": logging}, "c.toml")
    assert problem in str(error.value)


def test_what_may_be_secret_is_hidden():
    settings = {
        "base_url": "https://user:hunter2@host/v1?api_key=abc&x=1",
        "api_key": "sk-123",
        "judge": {"token": "t", "tokens": "3", "key": "", "api_keys": ["sk-1"], "auth": "u:p"},
        "list": ["redis://:pass@host/0"],
        "max_tokens": 5,
    }
    assert without_secrets(settings) == {
        "base_url": "https://host/v1?api_key=***&x=1",
        "api_key": "***",
        "judge": {"token": "***", "tokens": "3", "key": "", "api_keys": ["***"], "auth": "***"},
        "list": ["redis://host/0"],
        "max_tokens": 5,
    }
