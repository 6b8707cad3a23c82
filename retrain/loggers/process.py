"""A logger in its own process, for a tool whose calls would take processor time from training.

The child reads one request per line of JSON and answers with one line. It ends with its parent, however the
parent ends, even while a call of the tool hangs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retrain.line_process import LineProcess, lines_of, private_pipes
from retrain.loggers import LoggedRun, Row

ENDING_S = 10.0  # for the child to exit once everything is logged


class LoggerProcessError(Exception):
    """The logger raised an error in its process, or the process ended."""


class LoggerProcess:
    """Forwards calls to a logger in a child process and raises its errors."""

    def __init__(self, module: str, function: str, run: LoggedRun, params: Mapping[str, Any]) -> None:
        """Open a logger by a function of a module, given a run and parameters as JSON, in a child process."""
        self.child = LineProcess("retrain.loggers.process", module, function)
        try:
            opened = self._ask("open", asdict(run) | {"directory": str(run.directory)}, params)
        except BaseException:
            self.child.end()
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
            self.child.end(ENDING_S)

    def _ask(self, what: str, *arguments: Any) -> Any:
        self.child.send([what, *arguments])
        answer = json.loads(self.child.receive() or '{"error": "its process ended"}')
        if "error" in answer:
            raise LoggerProcessError(answer["error"])
        return answer


def main(module: str, function: str) -> None:
    """Answer requests until the parent closes the pipe or ends."""
    requests, answers = private_pipes()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a cluster tells every process; the parent decides when to end
    logger: Any = None
    for line in lines_of(requests):
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
            answers.write(json.dumps(answer).encode() + b"\n")
        if what == "close":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
