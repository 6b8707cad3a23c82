"""A logger in a process of its own: told the same, raises the same, and ends with its parent."""

import signal
import subprocess
import sys

import psutil
import pytest

from retrain.plugins.loggers import LoggedRun
from retrain.plugins.loggers.mlflow import LoggerProcess, LoggerProcessError
from tests.semaphore_processes import running, wait_until
from tests.stopping import has_ended

PLUGINS = "tests.logger_plugins"

HANGS = """
import sys
from pathlib import Path
from tests.long.test_loggers_process import opened
logger = opened(Path(sys.argv[1]), "hanging")
print(logger.child.process.pid, flush=True)
logger.rows([{"step": 1}])
"""


def opened(directory, function, **params):
    run = LoggedRun("c", "r_s0", "r", 0, 1, 0, directory, {"a": {"b": 1}}, "")
    return LoggerProcess(PLUGINS, function, run, params)


def test_rows_and_the_end_reach_the_logger_and_its_process_ends(tmp_path):
    logger = opened(tmp_path, "recording", name="far.jsonl")
    logger.rows([{"step": 1, "mean_reward": 0.5}, {"step": 2, "mean_reward": 0.75}])
    logger.flush()
    logger.close("done", {"eval_reward": 1.0})
    assert logger.id == "id-of-attempt-1"
    assert '"mean_reward": 0.75' in (tmp_path / "far.jsonl").read_text()
    assert logger.child.process.returncode == 0


@pytest.mark.parametrize(
    ("function", "why"), [("failing", "ConnectionError: the line"), ("leaving", "SystemExit")]
)
def test_what_it_raises_is_raised_here_and_it_goes_on(tmp_path, function, why):
    logger = opened(tmp_path, function)
    with pytest.raises(LoggerProcessError, match=why):
        logger.rows([{"step": 1}])
    logger.close("failed", {})


def test_a_logger_that_cannot_be_opened_leaves_no_process(tmp_path):
    with pytest.raises(LoggerProcessError, match="no route to host"):
        opened(tmp_path, "unwilling")


def test_a_process_that_was_killed_is_an_error(tmp_path):
    logger = opened(tmp_path, "recording")
    logger.child.process.kill()
    logger.child.process.wait()
    with pytest.raises(LoggerProcessError, match="its process ended"):
        logger.rows([{"step": 1}])
    with pytest.raises(LoggerProcessError, match="its process ended"):
        logger.close("failed", {})


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_parent_that_is_killed_while_a_call_hangs(tmp_path, how):
    with running(HANGS, tmp_path) as parent:
        logger = psutil.Process(int(parent.line()))
        parent.send(how)
        parent.process.wait()
        wait_until(lambda: has_ended(logger))


def test_signals_to_the_group_are_the_parents_to_obey(tmp_path):
    logger = opened(tmp_path, "recording")
    for number in (signal.SIGINT, signal.SIGTERM):
        logger.child.process.send_signal(number)
    logger.rows([{"step": 1, "mean_reward": 0.5}])
    logger.close("interrupted", {})


def test_naming_a_tool_imports_nothing_of_it():
    code = "import sys, retrain.plugins.loggers.mlflow; print({'mlflow', 'filelock'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
