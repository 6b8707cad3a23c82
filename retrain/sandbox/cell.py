"""A sandbox that is open: starts programs one at a time, and ends with everything in it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from retrain.sandbox import Ended, Limits, Sandbox, SandboxEndedError, SandboxError
from retrain.sandbox.inside import confine, values
from retrain.sandbox.inside.zygote import FAULT, OVER_TIME, STOP

STARTUP_S = 120.0  # imports on a cold network disk; only a broken machine takes longer
STOPPING_S = 5.0  # in which a program ends when nobody reads or writes any more
GRACE_S = 30.0  # beyond a program's limit, in which the sandbox ends it and removes its files
LONGEST_OUTPUT = 16 << 20
BOOT = """\
import os, sys
size = int(sys.argv[1]); text = b""
while len(text) < size: text += os.read(0, size - len(text)) or sys.exit(1)
exec(text)"""
MODULES = ("values", "confine", "stand_in", "peer", "testing", "jobs", "zygote")
OURS = "retrain.sandbox.inside"


class Program:
    """A program that runs: what it reads, what it writes, and how it ended."""

    def __init__(self, reads: int, writes: int, deadline: float) -> None:
        self.reads, self.writes = reads, writes  # its output and its input
        self._deadline = deadline

    def send(self, data: bytes) -> None:
        """Write to its input; a program that is gone needs none.

        Raises:
            SandboxError: nothing was read in time.
        """
        os.set_blocking(self.writes, False)
        left = memoryview(data)
        while left:
            self._wait(self.writes, select.POLLOUT)
            try:
                left = left[os.write(self.writes, left) :]
            except BrokenPipeError:
                return
            except BlockingIOError:
                continue
        os.set_blocking(self.writes, True)

    def output(self, most: int = LONGEST_OUTPUT) -> bytes | None:
        """Return everything that it writes until it ends; None if that is too much.

        Raises:
            SandboxError: it did not end in time.
        """
        parts: list[bytes] = []
        size = 0
        while True:
            self._wait(self.reads, select.POLLIN)
            part = os.read(self.reads, 1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
            if size > most:
                return None

    def close(self) -> None:
        """Close both ends; safe to call twice."""
        for fd in {self.reads, self.writes} - {-1}:
            os.close(fd)
        self.reads = self.writes = -1

    def _wait(self, fd: int, event: int) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000):
            raise SandboxError("the sandbox did not end a program in time")


class Cell:
    """An interpreter in a sandbox, warm between programs unless the sandbox is for a single use."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start it.

        Raises:
            SandboxError: it does not start.
        """
        self.sandbox = sandbox
        self._opened = contextlib.ExitStack()
        self._errors = self._opened.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with it
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = 0.0
        if not sandbox.mounts:
            confine.hide()
        if not sandbox.single_use:
            try:
                self._warm_up()
            except SandboxEndedError as error:  # not because of a program
                self.close()
                raise SandboxError(str(error)) from error
            except BaseException:
                self.close()
                raise

    def start(self, limits: Limits, *others: int) -> Program:
        """Start a program, which may use other descriptors as well.

        Raises:
            SandboxError: it cannot be started.
        """
        self._deadline = time.monotonic() + limits.seconds + GRACE_S
        if self.sandbox.single_use:
            text = program_text(self.sandbox, asdict(limits))
        (reads, their_output), (their_input, writes) = os.pipe(), os.pipe()
        program = Program(reads, writes, self._deadline)
        try:
            if self.sandbox.single_use:
                self._end()
                self._process = self._start(their_input, their_output, len(text))
                program.send(text)
            else:
                self._say(json.dumps(asdict(limits)).encode(), their_input, their_output, *others)
        except BaseException:
            program.close()
            raise
        finally:
            os.close(their_output)
            os.close(their_input)
        return program

    def ended(self, *, stop: bool = False) -> Ended:
        """Wait for the end of the program; `stop` ends it now.

        Raises:
            SandboxError: the sandbox has failed.
        """
        left_s = max(0.0, self._deadline - time.monotonic())
        if self.sandbox.single_use:
            return self._ended_once(min(left_s, STOPPING_S) if stop else left_s, stop)
        if stop:
            self._say(STOP)
        told = self._heard(left_s)
        if "fault" in told:
            raise SandboxError(str(told["fault"]))
        return Ended(int(told["code"]), bool(told["in_time"]), float(told["cpu_s"]), int(told["left"]))

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
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a zombie refuses signals
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _warm_up(self) -> None:
        text = program_text(self.sandbox, {})
        self._control, theirs = socket.socketpair(socket.AF_UNIX, _SOCKET_KIND)
        self._opened.enter_context(self._control)
        with theirs:
            self._process = self._start(theirs, subprocess.DEVNULL, len(text))
        for start in range(0, len(text), 1 << 15):
            self._say(text[start : start + (1 << 15)])
        self._heard(STARTUP_S)

    def _start(self, stdin: Any, stdout: Any, size: int) -> subprocess.Popen[bytes]:
        self._errors.seek(0)
        self._errors.truncate()
        try:
            process = subprocess.Popen(
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
        return process

    def _ended_once(self, left_s: float, stop: bool) -> Ended:
        assert self._process is not None
        try:
            code = self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            self._end()
            if stop:
                return Ended(-signal.SIGKILL)
            raise SandboxError("the sandbox did not end a program in time") from None
        if code == FAULT:
            raise SandboxError(self._complaint())
        return Ended(128 - code if code > 128 else code, in_time=code != OVER_TIME)

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

    def _complaint(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode("utf-8", "replace").strip().splitlines()
        return lines[-1][:200] if lines else "without a message"


_SOCKET_KIND = socket.SOCK_SEQPACKET if sys.platform == "linux" else socket.SOCK_STREAM


def clean_environment(sandbox: Sandbox) -> dict[str, str]:
    """Return an environment without keys and names of this user."""
    path = os.environ.get("PATH", os.defpath)
    folder = sandbox.folder if sandbox.mounts or sandbox.single_use else tempfile.gettempdir()
    return {"PATH": path, "HOME": folder, "TMPDIR": folder, "OMP_NUM_THREADS": "1"}


def program_text(sandbox: Sandbox, limits: Mapping[str, Any]) -> bytes:
    """Return what an interpreter in the sandbox runs."""
    setup = {
        "single_use": sandbox.single_use,
        "mounts": sandbox.mounts,
        "folder": sandbox.folder,
        "readable": list(sandbox.readable),
        "limits": limits,
    }
    return "\n".join([*_modules(), f"sys.modules[{OURS + '.zygote'!r}].main({setup!r})"]).encode()


@cache
def _modules() -> tuple[str, ...]:
    package = f"package = sys.modules[{OURS!r}] = types.ModuleType({OURS!r})"
    return ("import sys, types", package, *_module_texts())


def _module_texts() -> Iterator[str]:
    for name in MODULES:
        source = (Path(values.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
        path = f"{OURS}.{name}"
        yield f"module = package.{name} = sys.modules[{path!r}] = types.ModuleType({path!r})"
        yield f"exec(compile({source!r}, {name + '.py'!r}, 'exec'), module.__dict__)"
