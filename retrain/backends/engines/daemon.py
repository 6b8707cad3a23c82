"""The process that starts a shared server, restarts it after a crash, and ends it with its last user.

python -m retrain.base.hide_process retrain.backends.engines.daemon DIRECTORY < PLAN, which is
{"command": [...], "environment": {...}, "memory": "4", "linger_s": 10.0}
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from retrain.backends.engines.shared_server import (
    FAILED,
    READY,
    RESTARTING,
    STARTING,
    ServerFiles,
    ServerState,
)
from retrain.base.line_process import how_ended, kill_group
from retrain.base.locks import hold, is_held, is_of_this_boot, start_mark
from retrain.records.files import write_json

POLL_S = 0.25
SOON_S = 0.01
DEAF_S = 5.0  # a server that refuses connections for so long is ended: vLLM may hang while it shuts down
GRACE_S = 10.0  # for the server to end by itself
CRASHES = 5  # restarts without a steady hour between them
STEADY_S = 3600.0
PR_SET_PDEATHSIG = 1


class Daemon:
    """Runs one server while anybody uses it."""

    def __init__(
        self,
        files: ServerFiles,
        command: list[str],
        environment: Mapping[str, str],
        memory: str,
        linger_s: float,
    ) -> None:
        key = secrets.token_urlsafe(24)
        with socket.socket() as probe:  # for a free port
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        self._files, self._state = files, ServerState(STARTING, port=port, key=key)
        fill = {"{port}": str(self._state.port), "{key}": key, "{memory}": memory}
        self._command = [_filled(part, fill) for part in command]
        self._environment = {name: _filled(value, fill) for name, value in environment.items()}
        self._linger_s = linger_s
        self._server: subprocess.Popen[bytes] | None = None
        self._crashes_s: list[float] = []
        self._heard_s = 0.0  # when it accepted a connection last

    def run(self) -> None:
        """Run the server until nobody has used it for a while, or it does not stay alive."""
        import filelock

        self._start()
        used_s = time.monotonic()
        while True:
            time.sleep(POLL_S)
            if self._files.has_users():
                used_s = time.monotonic()
            elif time.monotonic() - used_s > self._linger_s:
                with filelock.FileLock(self._files.start_lock, mode=0o600):  # or a user comes just now
                    if not self._files.has_users():
                        self._end()
                        return
            if (problem := self._problem()) and not self._restart(problem):
                return
            if self._state.state != READY and self._answers():
                self._say(replace(self._state, state=READY))

    def _start(self) -> None:
        with self._files.log.open("ab") as log:
            self._server = subprocess.Popen(
                self._command,
                env=os.environ | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        pid = self._server.pid
        self._say(replace(self._state, pid=pid, started=start_mark(pid)))

    def _problem(self) -> str:
        """Return why the server is of no use any more; empty if it is, or will be."""
        if self._server is not None and (code := self._server.poll()) is not None:
            return f"the server ended {how_ended(code)}"
        now_s = time.monotonic()
        if self._state.state != READY or self._state.listens():
            self._heard_s = now_s
        return "the server stopped listening" if now_s - self._heard_s > DEAF_S else ""

    def _restart(self, problem: str) -> bool:
        """Start the server again after a pause; False if that is no use."""
        assert self._server is not None, "a server was started"
        kill_group(self._server.pid, signal.SIGKILL)  # or what it left
        self._server.wait()
        was_ready, now_s = self._state.state == READY or self._crashes_s, time.monotonic()
        self._crashes_s = [at for at in self._crashes_s if now_s - at < STEADY_S] + [now_s]
        crashed = replace(self._state, problem=problem, last_lines=self._files.last_lines())
        if not was_ready or len(self._crashes_s) > CRASHES:
            often = f" for the {len(self._crashes_s)}th time within an hour" if was_ready else ""
            self._say(replace(crashed, state=FAILED, problem=problem + often))
            return False
        self._say(replace(crashed, state=RESTARTING, restarts=self._state.restarts + 1))
        time.sleep(2.0 ** (len(self._crashes_s) - 1) - 0.5)
        self._start()
        return True

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._state.port, timeout=2.0)
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        return False

    def _end(self) -> None:
        self._files.state.unlink(missing_ok=True)
        if self._server is not None:
            end_group(self._server)

    def _say(self, state: ServerState) -> None:
        self._state = state
        write_json(self._files.state, asdict(state), durable=False)


def end_group(server: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, by force after a grace period."""
    kill_group(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    kill_group(server.pid, signal.SIGKILL)
    server.wait()


def end_left_over(left: ServerState) -> None:
    """Kill what is left of a server whose daemon is dead: its own process, or only those that it started."""
    is_reused = start_mark(left.pid) not in ("", left.started)  # the number; then no group has it either
    if left.pid and left.started and is_of_this_boot(left.started) and not is_reused:
        kill_group(left.pid, signal.SIGKILL)


def stand_guard(files: ServerFiles) -> int:
    """Fork a process that ends the server if this one is killed; a byte to the returned descriptor arms it.

    The kernel tells only the server's first process that its parent has died, and that one may hang, or
    leave others behind.
    """
    import filelock

    daemon, (until_end, told) = os.getpid(), os.pipe()
    if os.fork():
        os.close(until_end)
        return told
    os.close(told)
    os.setsid()
    if os.read(until_end, 1) and not os.read(until_end, 1):
        while os.getppid() == daemon:  # its lock may still be held
            time.sleep(SOON_S)
        with filelock.FileLock(files.start_lock, mode=0o600):
            if not is_held(files.daemon_lock):  # else the next daemon does it
                end_left_over(files.read_state())  # none, if it ended by itself
    os._exit(0)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def main() -> None:
    """Detach, take the lock, let whoever started this go on, and keep the server."""
    files, plan = ServerFiles(Path(sys.argv[1])), json.load(sys.stdin)
    locked, told = os.pipe()
    if os.fork():  # the starter waits for this process, until the lock is taken
        os.close(told)
        sys.exit(0 if os.read(locked, 1) else 1)
    os.setsid()
    with Path(os.devnull).open("r+b") as nowhere:
        for stream in (0, 1, 2):
            os.dup2(nowhere.fileno(), stream)
    left = files.read_state()
    guard = stand_guard(files)  # before it could inherit the lock
    if (lock := hold(files.daemon_lock)) is None:
        os._exit(1)
    os.write(guard, b"1")
    os.write(told, b"1")
    os.close(told)
    end_left_over(left)
    with lock:
        Daemon(files, **plan).run()


if __name__ == "__main__":
    main()
