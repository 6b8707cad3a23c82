"""Processes of ours that answer each line of their standard input with a line, and end with their parent."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator
from typing import BinaryIO


def command_of(module: str) -> list[str]:
    """Return the command that runs a module of retrain in a fresh interpreter, hidden from programs."""
    return [sys.executable, "-P", "-m", "retrain.hidden", module]


def variables() -> dict[str, str]:
    """Return its environment variables: it finds the modules that this process finds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - as text
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}


def kill_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that leads a group, and its children; none is there any more without an error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a zombie refuses signals
        os.killpg(leader, number)


def how_ended(code: int) -> str:
    """Return how a process ended, by its exit status: `by SIGKILL`, or `with exit code 1`."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes, moved to descriptors that code which reads or prints does not use."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def lines_of(requests: BinaryIO) -> Iterator[bytes]:
    """Iterate over lines, read in a thread that notices the end of input even during a call.

    The process is to lead its group, all of which is killed then.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        try:
            for line in iter(requests.readline, b""):
                lines.put(line)
        finally:  # end of input, or no memory for a line: no process may be left behind
            os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()
