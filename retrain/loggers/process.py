"""A logger in its own process, for a tool whose calls would take processor time from training.

The child reads one request per line of JSON and answers with one line. It ends with its parent, however the
parent ends, even while a call of the tool hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retrain.loggers import LoggedRun, Row

ENDING_S = 10.0  # for the child to exit once everything is logged
LOOK_S = 1.0  # between the child's checks that its parent lives


class LoggerProcessError(Exception):
    """The logger raised an error in its process, or the process ended."""


class LoggerProcess:
    """Forwards calls to a logger in a child process and raises its errors."""

    def __init__(self, module: str, function: str, run: LoggedRun, params: Mapping[str, Any]) -> None:
        """Open a logger by a function of a module, given a run and parameters as JSON, in a child process."""
        self.child = subprocess.Popen(
            [sys.executable, "-P", "-m", "retrain.hidden", "retrain.loggers.process", module, function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            opened = self._ask("open", asdict(run) | {"directory": str(run.directory)}, params)
        except BaseException:
            self._end()
            raise
        self.id, self.durable_after_s = str(opened["id"]), float(opened["durable_after_s"])

    def rows(self, rows: Sequence[Row]) -> None:
        self._ask("rows", rows)

    def flush(self) -> None:
        self._ask("flush")

    def close(self, state: str, result: Row) -> None:
        """End the tracker's run and the process."""
        try:
            self._ask("close", state, result)
        finally:
            self._end()

    def _ask(self, what: str, *arguments: Any) -> Any:
        stdin, stdout = self.child.stdin, self.child.stdout
        assert stdin is not None
        assert stdout is not None
        line = ""
        with contextlib.suppress(OSError, ValueError):
            stdin.write(json.dumps([what, *arguments]) + "\n")
            stdin.flush()
            line = stdout.readline()
        answer = json.loads(line or '{"error": "its process ended"}')
        if "error" in answer:
            raise LoggerProcessError(answer["error"])
        return answer

    def _end(self) -> None:
        try:
            self.child.communicate(timeout=ENDING_S)  # closes its input, which ends it
        except (subprocess.TimeoutExpired, OSError, ValueError):
            self.child.kill()
            self.child.communicate()


def main(module: str, function: str) -> None:
    """Answer requests until the parent closes the pipe or ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a tool prints must not be taken for an answer
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group; the parent decides when to end
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    logger: Any = None
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        try:
            answer = {}
            if what == "open":
                run, params = arguments
                opener = getattr(importlib.import_module(module), function)
                logger = opener(LoggedRun(**run | {"directory": Path(run["directory"])}), **params)
                answer = {"id": logger.id, "durable_after_s": getattr(logger, "durable_after_s", 0.0)}
            else:
                getattr(logger, what)(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - every error goes to the parent
            answer = {"error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(OSError):
            print(json.dumps(answer), file=answers, flush=True)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
