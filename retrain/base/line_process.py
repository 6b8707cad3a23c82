"""Processes of ours that answer each line of their standard input with a line, and end with their parent."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

from retrain.base.redaction import cover_output

LONGEST_LINE = 1 << 26  # bytes


def command_of(module: str) -> list[str]:
    """Return the command that runs a module of retrain in a fresh interpreter, hidden from programs."""
    return [sys.executable, "-P", "-m", "retrain.base.hide_process", module]


def variables() -> dict[str, str]:
    """Return its environment variables: it finds the modules that this process finds."""
    from retrain.base import threads  # not at the top: `explain` imports this module and starts nothing

    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - as text
    return {threads.VARIABLE: "1", **os.environ, "PYTHONPATH": path}


class LineProcess:
    """A process of ours; used by one thread at a time, but for `kill`."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*command_of(module), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
            env=variables(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)

    def send(self, message: Any) -> None:
        """Send a line of JSON; if the process is gone, `receive` returns nothing."""
        line = memoryview(json.dumps(message, default=str).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[self._stdin.write(line) :]

    def receive(self, limit_s: float | None = None, longest: int = LONGEST_LINE) -> bytes:
        """Wait for a line and return all that came, perhaps without its end; nothing if the process ended.

        Raises:
            TimeoutError: no line came in time.
        """
        deadline, received = time.monotonic() + (limit_s or 0.0), b""
        while b"\n" not in received and len(received) <= longest:
            left_s = None if limit_s is None else max(0.0, deadline - time.monotonic())
            if not self._poll.poll(None if left_s is None else left_s * 1000):
                raise TimeoutError
            if not (chunk := os.read(self._stdout.fileno(), 1 << 16)):
                return b""
            received += chunk
        return received

    def is_silent(self) -> bool:
        """Whether the process lives and has written nothing that was not received."""
        return not self._poll.poll(0)

    def kill(self) -> None:
        """Kill the process and its children; its user then calls `end`."""
        kill_group(self.process.pid)

    def end(self, patience_s: float = 0.0) -> str:
        """Kill the process, unless it ends by itself, and release its pipes; return how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        self.kill()
        how = how_ended(self.process.wait())
        self._stdin.close()
        self._stdout.close()
        return f"ended {how}"


def kill_group(leader: int, number: int = signal.SIGKILL) -> None:
    """Signal a process that leads a group, and its children; none is there any more without an error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a zombie refuses signals
        os.killpg(leader, number)


def how_ended(code: int) -> str:
    """Return how a process ended, by its exit status: `by SIGKILL`, or `with exit code 1`."""
    if code >= 0:
        return f"with exit code {code}"
    names = {known.value: known.name for known in signal.Signals}  # most real-time signals have none
    return f"by {names.get(-code, f'signal {-code}')}"


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes, moved to descriptors that code which reads or prints does not use.

    What it prints is redacted, as a worker's.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    cover_output()
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
