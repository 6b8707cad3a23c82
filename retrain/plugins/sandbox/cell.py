"""A sandbox that is open: starts programs one at a time, and ends with everything in it.

`holes` is its self-test: a program tries to get out, and says where it could.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from retrain.base import threads
from retrain.base.line_process import kill_group
from retrain.plugins.sandbox import Limits, ProgramEnd, Sandbox, SandboxEndedError, SandboxError
from retrain.plugins.sandbox.inside import BOOT, boot_text, values
from retrain.plugins.sandbox.inside.zygote import STARTED, STOP

STARTUP_S = 120.0  # imports on a cold network disk; only a broken machine takes longer
STOPPING_S = 5.0  # in which a program ends when nobody reads or writes any more
GRACE_S = 30.0  # beyond a program's limit, in which the sandbox ends it and removes its files
LONGEST_OUTPUT = 16 << 20
CHUNK = 1 << 15
LAST_WORDS = ({"code", "in_time", "broke", "denied", "over"}, {"fault"})  # keys
PROBE_LIMITS = Limits(seconds=20.0, memory_bytes=1 << 30)
HOLES = ("files", "network", "processes")
PROBE = """
import json, os, socket, sys
holes = []
def reaches(what, attempt):
    try:
        attempt()
    except (OSError, IndexError):
        return
    holes.append(what)
reaches("files", lambda: open(sys.stdin.read()).read())
reaches("network", lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9)))
reaches("processes", lambda: os.listdir("/proc")[0])
open("own", "w").write("x")
print(json.dumps(holes))
"""
_SOCKET_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_STREAM


class RunningProgram:
    """A program that runs: a socket is its input and its output."""

    def __init__(self, end: socket.socket, deadline: float) -> None:
        self._end, self._deadline = end, deadline

    def fileno(self) -> int:
        """Return the descriptor of our end of the socket."""
        return self._end.fileno()

    def send(self, data: bytes) -> None:
        """Write to its input; a program that is gone needs none; SandboxError if nothing was read in time."""
        self._exchange(self._end.sendall, data)

    def output(self, job: Mapping[str, str], most: int) -> bytes | None:
        """Send a job; return what is written, None if it is too much; SandboxError if it does not end."""
        output = bytearray()
        try:
            self.send(values.frame(job))
            while part := self._exchange(self._end.recv, 1 << 16):
                output += part
                if len(output) > most:
                    return None
            return bytes(output)
        finally:
            self.close()

    def close(self) -> None:
        """Close our end; safe to call twice."""
        self._end.close()

    def _exchange(self, call: Callable[[Any], Any], data: bytes | int) -> Any:
        self._end.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            return call(data)
        except TimeoutError as error:
            raise SandboxError("the sandbox did not end a program in time") from error
        except OSError:  # it has ended
            return b""
        finally:
            self._end.settimeout(None)  # another process may use it from here on


class Cell:
    """An interpreter in a sandbox, warm between programs unless the sandbox is for a single use."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start it; SandboxError if it does not start."""
        self.sandbox = sandbox
        self._opened = contextlib.ExitStack()
        self._errors = self._opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with it
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        if not sandbox.single_use:
            try:
                self._warm_up()
            except BaseException as error:
                self.close()
                if isinstance(error, SandboxEndedError):  # not because of a program
                    raise SandboxError(str(error)) from error
                raise

    def start(self, limits: Limits, *others: int) -> RunningProgram:
        """Start a program, which may use other descriptors as well; SandboxError if it cannot be started."""
        self._deadline = time.monotonic() + limits.seconds + GRACE_S
        ours, theirs = _socket_pair(socket.SOCK_STREAM)
        program = RunningProgram(ours, self._deadline)
        try:
            with theirs:
                if not self.sandbox.single_use:
                    self._say(json.dumps(asdict(limits)).encode(), *[theirs.fileno()] * 2, *others)
                    return program
                text = boot_text(self.sandbox, limits)
                self._end()
                self._process = self._start(theirs, theirs, len(text))
            program.send(text)
        except BaseException:
            program.close()
            raise
        return program

    def run(self, limits: Limits, job: Mapping[str, str], most: int) -> tuple[ProgramEnd, bytes | None]:
        """Run a program; return how it ended, and what it wrote, None if that is more than `most` bytes."""
        output = self.start(limits).output(job, most)
        return self.ended(stop=output is None), output

    def ended(self, *, stop: bool = False) -> ProgramEnd:
        """Wait for the end of the program; `stop` ends it now; SandboxError if the sandbox has failed."""
        left_s = max(0.0, self._deadline - time.monotonic())
        if self.sandbox.single_use:
            last_words = self._last_words(min(left_s, STOPPING_S) if stop else left_s, stop)
        else:
            if stop:
                self._say(STOP)
            last_words = self._heard(left_s)
        if "fault" in last_words:
            raise SandboxError(str(last_words["fault"]))
        return ProgramEnd(**last_words)

    def close(self) -> None:
        """End it, with every process in it."""
        if self._process is not None and not self.sandbox.single_use:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                self._control.shutdown(socket.SHUT_RDWR)  # it ends its program, and removes what that wrote
                self._process.wait(STOPPING_S)
        self._end()
        self._opened.close()

    def _end(self) -> None:
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)
            self._process.wait()

    def _warm_up(self) -> None:
        text = boot_text(self.sandbox)
        self._control, theirs = _socket_pair(_SOCKET_KIND)
        self._opened.enter_context(self._control)
        with theirs:
            self._process = self._start(theirs, subprocess.DEVNULL, len(text))
        self._control.settimeout(STARTUP_S)
        for start in range(0, len(text), CHUNK):
            self._say(text[start : start + CHUNK])
        self._heard(STARTUP_S)

    def _start(self, stdin: Any, stdout: Any, size: int) -> subprocess.Popen[bytes]:
        self._errors.seek(0)
        self._errors.truncate()
        try:
            return subprocess.Popen(
                [*self.sandbox.command, "-I", "-B", "-X", "utf8", "-c", BOOT, str(size)],
                stdin=stdin,
                stdout=stdout,
                stderr=self._errors,
                start_new_session=True,
                cwd="/",
                env=clean_environment(self.sandbox),
            )
        except OSError as error:
            raise SandboxError(f"{self.sandbox.name} cannot be started: {error}") from error

    def _last_words(self, left_s: float, stop: bool) -> dict[str, Any]:
        """Return what a sandbox for a single use says at its end."""
        assert self._process is not None
        try:
            self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            self._end()
            if not stop:
                raise SandboxError("the sandbox did not end a program in time") from None
            return {"code": -signal.SIGKILL}
        for line in reversed(lines := self._lines()):
            with contextlib.suppress(ValueError):  # a container's client may write, too
                last_words = json.loads(line)
                if isinstance(last_words, dict) and last_words.keys() in LAST_WORDS:
                    return last_words
        if STARTED.decode() not in lines:
            raise SandboxError(f"{self.sandbox.name} has ended without a program: {self._complaint()}")
        if not stop:
            raise SandboxEndedError(f"{self.sandbox.name} has ended: {self._complaint()}")
        return {"code": -signal.SIGKILL, "is_known": False}  # perhaps as nobody read what its client wrote

    def _say(self, message: bytes, *fds: int) -> None:
        try:
            socket.send_fds(self._control, [message], fds)
        except OSError as error:
            raise SandboxEndedError(f"{self.sandbox.name} has ended: {error}") from error

    def _heard(self, limit_s: float) -> dict[str, Any]:
        self._control.settimeout(limit_s)
        try:
            message = self._control.recv(1 << 16)
        except OSError as error:
            raise SandboxEndedError(f"{self.sandbox.name} does not answer: {error}") from error
        if not message:
            raise SandboxEndedError(f"{self.sandbox.name} has ended: {self._complaint()}")
        told: dict[str, Any] = json.loads(message)
        return told

    def _lines(self) -> list[str]:
        """Return what the sandbox has written to standard error, which no program can."""
        self._errors.seek(0)
        return self._errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()

    def _complaint(self) -> str:
        lines = [line for line in self._lines() if line != STARTED.decode()]
        return lines[-1][:400] if lines else "without a message"


def _socket_pair(kind: int) -> tuple[socket.socket, socket.socket]:
    """Return two sockets that block, even if a library has set a default timeout."""
    pair = socket.socketpair(socket.AF_UNIX, kind)
    for end in pair:
        end.settimeout(None)
    return pair


def clean_environment(sandbox: Sandbox) -> dict[str, str]:
    """Return an environment without keys and names of this user."""
    path = os.environ.get("PATH", os.defpath)
    folder = sandbox.folder if sandbox.mounts or sandbox.single_use else tempfile.gettempdir()
    return {"PATH": path, "HOME": folder, "TMPDIR": folder, threads.VARIABLE: "1"}


def holes(sandbox: Sandbox) -> list[str]:
    """Return which of HOLES a program finds in a sandbox; SandboxError if programs do not run in it."""
    cell = Cell(sandbox)
    try:
        with tempfile.NamedTemporaryFile(prefix="retrain-probe-") as secret:
            job = {"job": "stdio", "source": PROBE, "input": secret.name}
            ended, output = cell.run(PROBE_LIMITS, job, LONGEST_OUTPUT)
    finally:
        cell.close()
    if ended.broke:
        raise SandboxError(f"programs do not run in {sandbox.name}: a harmless one {ended.broke}")
    try:
        reached = json.loads(output or b"")
    except ValueError:
        raise SandboxError(f"programs do not run in {sandbox.name}: exit status {ended.code}") from None
    return [what for what in HOLES if what in reached]
