"""One run in one process: lock, signals, records, exit code.

`python -m retrain.trainer.worker RUN_DIR` needs only the run's directory and can be started anywhere. On
SIGTERM or SIGINT it saves a checkpoint at the next step boundary and exits. It does not touch a run that
another process holds, that has finished, or whose campaign was stopped.
"""

from __future__ import annotations

if __name__ == "__main__":  # first of all
    from retrain.base.hide_process import hide

    hide()
    from retrain.base.threads import search_rarely

    search_rarely()

import contextlib
import os
import signal
import sys
import threading
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.base import user_code
from retrain.base.errors import (
    EXIT_CONFIG,
    EXIT_DONE,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    ConfigError,
    RecordsError,
    RetrainError,
    RunFailedError,
    UnscoredStepError,
    exit_code_of,
    is_passing,
    records_error,
)
from retrain.base.locks import hold, present_holder
from retrain.base.redaction import cover_output, recorded_error
from retrain.base.streams import fill_closed, leave
from retrain.base.threads import use_one_thread
from retrain.config.digest import is_as_written
from retrain.config.files import KEY as ADAPTER
from retrain.config.files import changed_files
from retrain.config.keys import as_meant
from retrain.config.resolve import build
from retrain.config.schema import Config
from retrain.records.campaign_state import asked_to_stop
from retrain.records.files import read_small, remove_leftovers
from retrain.records.layout import CampaignFiles, RunFiles, campaign_of
from retrain.records.metrics import Seal, require_steps, seal_of
from retrain.records.row_parts import Value
from retrain.records.run_state import RunState, begin_attempt, end_attempt, read_done, write_done
from retrain.records.text import as_typed

if TYPE_CHECKING:
    from retrain.trainer.checkpoint import Checkpoint
    from retrain.trainer.journal import Journal

POLL_S = 1.0  # between checks for a stop request
STATE_OF_EXIT = {
    EXIT_DONE: RunState.DONE,
    EXIT_INFRASTRUCTURE: RunState.INFRASTRUCTURE,
    EXIT_INTERRUPTED: RunState.INTERRUPTED,
}
# their messages are complete: a traceback would not help
COMPLETE = (ConfigError, RunFailedError, RecordsError)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended, and the result if it finished the run."""

    code: int
    message: str = ""
    result: Mapping[str, Value] = field(default_factory=dict)
    seal: Seal | None = None  # of the rows of a finished run
    is_unscored: bool = False  # whether no completion of its last step had a score


def read_run(files: RunFiles) -> Config:
    """Read a run's configuration.

    Raises:
        ConfigError: it was edited, or a file that it names has changed.
        RecordsError: it, or such a file, cannot be read for now.
    """
    resume = f"retrain resume {as_typed(campaign_of(files.directory).directory)}"
    try:
        text = read_small(files.run_toml)
        if text is None:
            raise FileNotFoundError("it is missing")
        tables = tomllib.loads(text.decode())
        config = build(Config, as_meant(tables))
        is_intact = is_as_written(tables)
        planned = config.run.files.items() if config.run else ()
        changed = changed_files(config, {key: text for key, text in planned if key != ADAPTER})
    except (OSError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and is_passing(error):
            raise records_error(Path(error.filename or files.run_toml), "read", error) from error
        raise ConfigError(
            f"{files.run_toml}: is not a run's configuration ({error}); `{resume}` writes it again"
        ) from error
    if not is_intact:
        raise ConfigError(f"{files.run_toml}: was changed since it was planned; `{resume}` writes it again")
    if changed:
        what = f"restore it; `{resume}` finds the files of a moved project, and says how to accept a change"
        raise ConfigError([f"{files.run_toml} {problem.in_table}; {what}" for problem in changed])
    return config


def run(directory: Path, stop: threading.Event) -> int:
    """Make one attempt at a run.

    Args:
        directory: of the run; holds run.toml and receives all records.
        stop: when set, save a checkpoint at the next step boundary and stop.

    Returns:
        The exit code: 0 done, 2 configuration, 4 failed, 75 try again later, 130 interrupted.
    """
    files = RunFiles(directory)
    try:
        config = read_run(files)
        if config.run is not None and (where := str(config.run.origin.get("where", ""))):
            sys.path.append(where)  # the campaign's plugins, wherever this process was started
            user_code.search_first(Path(where) / str(config.run.origin.get("beside", ".")))
        lock = hold(files.lock)
        if lock is None:
            who = present_holder(files.lock) or "another process"
            return _say(f"{directory}: this run is held by {who}; left alone", EXIT_INFRASTRUCTURE)
        with lock:
            if os.environ.get("RETRAIN_JOB"):  # a cluster may start the run on another machine
                lock.renew()
            for folder in (directory, directory / "loggers"):
                remove_leftovers(folder)
            done, campaign = read_done(files.done), campaign_of(directory)
            if done is not None and config.run is not None and done.config_hash == config.run.config_hash:
                return _say(f"{directory}: this run is finished; left alone", EXIT_INFRASTRUCTURE)
            if asked_to_stop(campaign):
                advice = f"continue with: retrain resume {as_typed(campaign.directory)}"
                return _say(f"{directory}: its campaign was stopped; {advice}", EXIT_INTERRUPTED)
            return _attempt(config, files, campaign, stop)
    except (RetrainError, OSError) as error:
        return _say(error, exit_code_of(error))


def _attempt(config: Config, files: RunFiles, campaign: CampaignFiles, stop: threading.Event) -> int:
    from retrain.trainer import checkpoint
    from retrain.trainer.journal import Journal
    from retrain.trainer.logger_threads import open_loggers

    started = time.monotonic()

    def say_damaged(directory: Path) -> None:
        _say(f"{directory}: is damaged; an older checkpoint is used if there is one", EXIT_DONE)

    resumed = checkpoint.newest(files.checkpoints, say_damaged)
    step = resumed.step if resumed else 0
    number = begin_attempt(files.attempts, resumed_from_step=step)
    loggers = open_loggers(config, files, campaign, number, step, stop.is_set)
    journal = Journal(files, number, config.last_step, loggers)
    with _watching_for_stop(campaign, stop):
        try:
            end = _train(config, files, campaign, journal, stop, resumed)
            if end.seal is not None:  # before closing the loggers, which may take long
                write_done(files.done, config.run.config_hash if config.run else "", end.result, end.seal)
        finally:
            lacking = journal.close()
    end_attempt(
        files.attempts,
        number,
        STATE_OF_EXIT.get(end.code, RunState.FAILED),
        exit_code=end.code,
        message=lacking if end.code == EXIT_DONE else end.message,
        duration_s=time.monotonic() - started,
        is_unscored=end.is_unscored,
    )
    return end.code


@contextlib.contextmanager
def _watching_for_stop(campaign: CampaignFiles, stop: threading.Event) -> Iterator[None]:
    """Watch for the campaign's stop.json: an orchestrator or cluster that is down sends no signal."""
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(POLL_S):
            if asked_to_stop(campaign):
                stop.set()

    poller = threading.Thread(target=poll, name="stop request", daemon=True)
    poller.start()
    try:
        yield
    finally:
        is_over.set()
        poller.join()


def _train(
    config: Config,
    files: RunFiles,
    campaign: CampaignFiles,
    journal: Journal,
    stop: threading.Event,
    resumed: Checkpoint | None,
) -> AttemptEnd:
    """Train until the run is finished, stopped or failed; no error escapes."""
    from retrain.trainer.opening import open_trainer

    step = resumed.step if resumed else 0
    try:
        journal.phase("load", step)
        require_steps(files.metrics, step)
        with open_trainer(config, files, campaign, journal, stop, resumed) as trainer:
            first = step = trainer.step
            try:
                result = trainer.train()
            finally:
                step = trainer.step
            require_steps(files.metrics, step)
            seal = seal_of(files.metrics)
            journal.ended(RunState.DONE, result)
            journal.phase("", step, state=RunState.DONE)
            return AttemptEnd(
                EXIT_DONE, result={"steps": step, "resumed_from_step": first, **result}, seal=seal
            )
    except Exception as error:  # noqa: BLE001 - the worker's edge: every error is recorded
        code = exit_code_of(error)
        message = str(error)
        if not isinstance(error, RetrainError):
            message = user_code.fault_of(error) or f"{type(error).__name__}: {error}"
        if code != EXIT_INTERRUPTED:
            is_complete = isinstance(error, COMPLETE) or user_code.names_place(message)
            _say(message if is_complete else traceback.format_exc().rstrip(), code)
        journal.ended(STATE_OF_EXIT.get(code, RunState.FAILED), {})
        with contextlib.suppress(RecordsError):  # for display only: must not hide the error
            journal.phase("", step, state=STATE_OF_EXIT.get(code, RunState.FAILED), message=message)
        return AttemptEnd(code, recorded_error(message), is_unscored=isinstance(error, UnscoredStepError))


def _say(what: object, code: int) -> int:
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        print(what, file=sys.stderr, flush=True)
    return code


def main(arguments: list[str]) -> int:
    """Run the worker as a process and return its exit code."""
    if len(arguments) != 1:
        return _say("usage: python -m retrain.trainer.worker RUN_DIR", EXIT_CONFIG)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with contextlib.suppress(FileNotFoundError):  # the directory may have been deleted
        sys.path.append(str(Path.cwd()))  # a plugin's dotted path may name a file in the campaign's directory
    return run(Path(arguments[0]).absolute(), stop)  # its campaign is above it


if __name__ == "__main__":
    fill_closed()
    cover_output()
    use_one_thread()
    leave(main(sys.argv[1:]))
