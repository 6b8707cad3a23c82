"""One process of a pool: a fresh interpreter that gets one line per call, and is killed with its children.

It replies with one line of JSON, which repeats the call's token. Scored code may write to the pipe too:
anything but exactly one valid line is garbage, and nothing that arrives with it counts as a reward.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from retrain.line_process import command_of, how_ended, kill_group, variables

LONGEST_LINE = 1 << 16  # bytes; a message is cut at 2,000 characters, each at most six bytes of JSON
SHOWN = 80  # bytes of garbage that are shown


class Kind(StrEnum):
    """What a process replies at its start (the first two) and to a call, or why there is no reply."""

    READY = "ready"
    FAILED = "failed"  # the function cannot be loaded
    SCORED = "scored"  # with a number
    UNSCORED = "unscored"  # raised UnscoredError
    TIMEOUT = "timeout"  # raised TimeoutError
    RAISED = "raised"  # raised another exception
    LATE = "late"  # did not reply in time
    DIED = "died"  # ended its process
    GARBAGE = "garbage"  # wrote something other than one reply


AT_THE_START = (Kind.READY, Kind.FAILED)
OF_A_CALL = (Kind.SCORED, Kind.UNSCORED, Kind.TIMEOUT, Kind.RAISED)


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a call or a start, with the number or a message."""

    kind: Kind
    content: float | str


def line_of(token: str, reply: Reply) -> bytes:
    """Return the line that replies to a call ("" for the start)."""
    return json.dumps([token, reply.kind, reply.content]).encode() + b"\n"


def reply_in(received: bytes, token: str) -> Reply:
    """Return the reply to a call; GARBAGE unless that is all that was received."""
    line, _, more = received.partition(b"\n")
    try:
        of, kind, content = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        of, kind, content = None, "", None
    known = AT_THE_START if of == "" else OF_A_CALL
    wanted = float if kind == Kind.SCORED else str
    if not (isinstance(of, str) and isinstance(kind, str) and kind in known and type(content) is wanted):
        return Reply(Kind.GARBAGE, f"the scoring process wrote {line[:SHOWN]!r} instead of a reply")
    if more or of != token:
        return Reply(Kind.GARBAGE, "the scoring process sent a reply that belongs to no call")
    return Reply(Kind(kind), content)


class PoolProcess:
    """A process that runs `retrain.rewards.pool.worker`; used by one thread at a time, but for `kill`."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            command_of("retrain.rewards.pool.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
            env=variables(),
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        self.send(setup)

    def send(self, message: Any) -> None:
        """Send a line; if the process is gone, `reply` returns DIED."""
        line = memoryview(json.dumps(message, default=str).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[self._stdin.write(line) :]

    def reply(self, token: str, timeout_s: float) -> Reply:
        """Wait for the reply to a call; LATE or DIED if there is none."""
        deadline, received = time.monotonic() + timeout_s, b""
        while b"\n" not in received and len(received) <= LONGEST_LINE:
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return Reply(Kind.LATE, f"took over {timeout_s:g} s")
            if not (chunk := os.read(self._stdout.fileno(), 1 << 16)):
                return Reply(Kind.DIED, "")
            received += chunk
        return reply_in(received, token)

    def is_silent(self) -> bool:
        """Whether the process lives and has written nothing since its last reply."""
        return not self._poll.poll(0)

    def kill(self) -> None:
        """Kill the process and its children; its user then calls `end`."""
        kill_group(self._process.pid)

    def end(self) -> str:
        """Kill the process and release its pipes; return a description of how it ended."""
        self.kill()
        how = how_ended(self._process.wait())
        self._stdin.close()
        self._stdout.close()
        return f"ended {how}"
