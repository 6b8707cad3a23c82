"""One process of a pool: a fresh interpreter that gets one line per call, and is killed with its children."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from retrain.rewards.pool.message import LONGEST_LINE, Message, garbage, read_line


class PoolProcess:
    """A process that runs `retrain.rewards.pool.worker`; its first line reports that it is ready."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - as text
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "retrain.rewards.pool.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._received = b""
        self.send(setup)

    def fileno(self) -> int:
        """Return the file descriptor for a selector."""
        return self._stdout.fileno()

    def send(self, message: Any) -> bool:
        """Send a line; False if the process is gone."""
        line = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while line:
                line = line[self._stdin.write(line) :]
        except BrokenPipeError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages in complete lines, and garbage for anything else; None if the process is gone.

        Blocks unless a selector reported data.
        """
        chunk = os.read(self._stdout.fileno(), 1 << 16)
        if not chunk:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        messages = [read_line(line) for line in lines]
        if (messages and self._received) or len(self._received) > LONGEST_LINE:
            messages.append(garbage(self._received))
        return messages

    def kill(self) -> str:
        """Kill the process and its group; return a description of how it ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a zombie refuses signals
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._stdin.close()
        self._stdout.close()
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
