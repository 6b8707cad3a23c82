"""One server for many runs of a user: the first that needs it starts it, and it ends after the last one.

A daemon process, which belongs to no run, starts the server, restarts it after a crash, and ends it once
nobody uses it: a user holds a lock while it lives, so that one that was killed does not count. Files:

    users/*.lock   held by the users
    start.lock     for whoever starts a daemon, and a daemon that is about to end
    daemon.lock    held by the daemon
    server.json    what the daemon knows of the server: `ServerState`
    server.log     the server's output
    turns.lock     shared by users that sample, held by one that trains, if they share a GPU in turn

This module is the daemon's program, too; it reads {"command": [...], "environment": {...}, "memory": "4",
"linger_s": 10.0} from its standard input.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from retrain.base.errors import ConfigError, InfrastructureError, RecordsError
from retrain.base.line_process import how_ended, kill_group
from retrain.base.locks import LockFile, hold, is_held, is_of_this_boot, start_mark
from retrain.base.redaction import redacted
from retrain.records.files import opened, read_json, record_of, write_json
from retrain.records.layout import own_temporary_folder
from retrain.records.lines import read_end

STARTING, READY, RESTARTING, FAILED, ENDED = "starting", "ready", "restarting", "failed", "ended"
POLL_S = 0.1
TURN_POLL_S = 0.02  # for one whose turn it is on a shared GPU
LISTENS_S = 1.0
LINGER_S = 10.0  # after the last user, so that a campaign's next run finds the server
DAEMONS = 3  # started by one user in a row before it gives up
SHOWN_LINES = 5  # of the server's log, in an error
KEPT_LINES = 40  # after a crash: vLLM says the cause, and then what its libraries leak
LOG_TAIL_BYTES = 1 << 14
LINE_LIMIT = 300  # characters
CHECK_S = 0.25  # between a daemon's looks at its server and its users
SOON_S = 0.01
DEAF_S = 5.0  # a server that refuses connections for so long is ended: vLLM may hang while it shuts down
GRACE_S = 10.0  # for the server to end by itself
CRASHES = 5  # restarts without a steady hour between them
STEADY_S = 3600.0


@dataclass(frozen=True, slots=True)
class ServerState:
    """What a daemon tells of its server."""

    state: str
    port: int = 0
    key: str = ""  # that the server asks of its users; others on this machine do not know it
    pid: int = 0
    started: str = ""  # `start_mark` of that process
    restarts: int = 0
    problem: str = ""  # how it ended, if it has crashed
    last_lines: str = ""  # of its log, when it did

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def listens(self) -> bool:
        """Whether the server accepts connections; True if it is too busy to say."""
        try:
            socket.create_connection(("127.0.0.1", self.port), LISTENS_S).close()
        except TimeoutError:
            return True
        except OSError:
            return False
        return True


class ServerFiles:
    """The files of one server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.users = directory / "users"
        self.start_lock, self.daemon_lock = directory / "start.lock", directory / "daemon.lock"
        self.turns = directory / "turns.lock"
        self.state, self.log = directory / "server.json", directory / "server.log"

    def read_state(self) -> ServerState:
        """Return what the daemon wrote last; that of an ended server if nothing can be read."""
        with suppress(RecordsError, ValueError):
            if (found := read_json(self.state)) is not None:
                return record_of(ServerState, found)
        return ServerState(ENDED)

    def last_lines(self) -> str:
        with suppress(FileNotFoundError, RecordsError), opened(self.log) as log:
            tail = redacted(read_end(log, LOG_TAIL_BYTES, LOG_TAIL_BYTES)[1].decode(errors="replace"))
            lines = [line for line in tail.splitlines() if line.strip()][-KEPT_LINES:]
            return "\n".join(line[:LINE_LIMIT] for line in lines)
        return ""

    def has_users(self) -> bool:
        """Whether a live process uses the server; removes what dead ones left."""
        is_used = False
        for path in self.users.glob("*.lock"):
            if is_held(path):
                is_used = True
            else:
                path.unlink(missing_ok=True)
        return is_used


class SharedServer:
    """This process's share in a server; `close` gives it back."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        who: str,
        linger_s: float = LINGER_S,
        *,
        memory: str = "",
    ) -> None:
        """Become a user; nothing is started yet.

        Args:
            command: what starts the server; `{port}` stands for its port, which it must open on 127.0.0.1,
                and `{key}` for the key that it must ask for. Equal commands share one server.
            environment: variables in addition to this process's own; may hold `{key}` as well.
            who: names the server in messages.
            linger_s: how long a server that this process starts stays after its last user.
            memory: for `{memory}` in both, if this process starts the server; it is no part of what is equal.
        """
        self.files = ServerFiles(_directory(command, environment))
        self.plan = {
            "command": list(command),
            "environment": dict(environment),
            "memory": memory,
            "linger_s": linger_s,
        }
        self._who = who
        self.files.users.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = hold(self.files.users / f"{os.getpid()}-{secrets.token_hex(4)}.lock")
        assert self._lock is not None, "nobody else knows this name"

    def ready(
        self, timeout_s: float, watch: Callable[[ServerState, float], object] = lambda state, waited_s: None
    ) -> ServerState:
        """Return the server's address once it answers, after starting it if nobody has.

        Until it does, `watch` is told its state and the seconds so far; what it raises ends the wait.

        Raises:
            ConfigError: it ended before it ever answered.
            InfrastructureError: it does not answer in time, or does not stay alive.
        """
        began_s = time.monotonic()
        daemons = int(self._ensure_daemon())
        while (waited_s := time.monotonic() - began_s) < timeout_s:
            server = self.files.read_state()
            if server.state == FAILED:
                kind = InfrastructureError if server.restarts else ConfigError
                raise kind(self._problem(server.problem, server.last_lines))
            if not is_held(self.files.daemon_lock):
                if daemons >= DAEMONS:
                    raise InfrastructureError(f"{self._who}: its daemon was killed repeatedly")
                daemons += self._ensure_daemon()
            elif server.state == READY and server.listens():  # the daemon may not have seen its end yet
                return server
            watch(server, waited_s)
            time.sleep(POLL_S)
        raise InfrastructureError(
            self._problem(f"not ready after {timeout_s:.0f} s", self.files.last_lines())
        )

    def close(self) -> None:
        """Stop using the server; safe to call twice."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            lock.path.unlink(missing_ok=True)
            lock.release()

    def _ensure_daemon(self) -> bool:
        """Start a daemon unless one lives; return whether one was started."""
        import filelock  # here: importing it takes 50 ms, as in the other places

        with filelock.FileLock(self.files.start_lock, mode=0o600):
            if is_held(self.files.daemon_lock):
                return False
            left = self.files.read_state()
            write_json(self.files.state, {"state": STARTING, "pid": left.pid, "started": left.started})
            module = ["-m", "retrain.base.hide_process", "retrain.backends.engines.shared_server"]
            command = [sys.executable, *module, str(self.files.directory)]
            plan = json.dumps(self.plan).encode()
            # returns once the daemon, which leaves this process's tree, holds its lock
            subprocess.run(command, input=plan, check=True, cwd="/")
        return True

    def _problem(self, what: str, last_lines: str) -> str:
        shown = "".join(f"\n  {line}" for line in last_lines.splitlines()[-SHOWN_LINES:])
        return f"{self._who}: {what}; its log is {self.files.log}{shown}"


def _directory(command: Sequence[str], environment: Mapping[str, str]) -> Path:
    """Return the directory of a server; raise ConfigError if its folder belongs to another user."""
    identity = json.dumps([list(command), sorted(environment.items())]).encode()
    return own_temporary_folder("engines") / hashlib.sha256(identity).hexdigest()[:16]


@contextmanager
def gpu_shared(path: Path | None, *, trains: bool) -> Iterator[None]:
    """Share a GPU with a server while entered: all who do sample at the same time, or one trains alone.

    Each of them trains before it samples again. Without a file, nobody waits for anybody.
    """
    if path is None:
        yield
        return
    lock = LockFile(str(path))
    try:
        while not lock.try_lock(shared=not trains):
            time.sleep(TURN_POLL_S)
        yield
    finally:
        lock.close()


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
            time.sleep(CHECK_S)
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
        with suppress(OSError, http.client.HTTPException):
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
    with suppress(subprocess.TimeoutExpired):
        server.wait(GRACE_S)
    kill_group(server.pid, signal.SIGKILL)
    server.wait()


def end_left_over(left: ServerState) -> None:
    """Kill what is left of a server whose daemon is dead: its own process, or only those that it started."""
    is_reused = start_mark(left.pid) not in ("", left.started)  # the number; then no group has it either
    if left.pid and left.started and is_of_this_boot(left.started) and not is_reused:
        kill_group(left.pid, signal.SIGKILL)


def stand_guard(files: ServerFiles) -> int:
    """Fork a process that ends the server, with all that it started, if this one is killed.

    A byte to the returned descriptor arms it.
    """
    import filelock

    daemon, (until_end, armed) = os.getpid(), os.pipe()
    if os.fork():
        os.close(until_end)
        return armed
    os.close(armed)
    os.setsid()
    if os.read(until_end, 1) and not os.read(until_end, 1):
        while os.getppid() == daemon:  # its lock may still be held
            time.sleep(SOON_S)
        with filelock.FileLock(files.start_lock, mode=0o600):
            if not is_held(files.daemon_lock):  # else the next daemon does it
                end_left_over(files.read_state())  # none, if it ended by itself
    os._exit(0)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace(name, value)
    return text


def main() -> None:
    """Detach, take the lock, let whoever started this go on, and keep the server."""
    files, plan = ServerFiles(Path(sys.argv[1])), json.load(sys.stdin)
    locked, held = os.pipe()
    if os.fork():  # the starter waits for this process, until the lock is taken
        os.close(held)
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
    os.write(held, b"1")
    os.close(held)
    end_left_over(left)
    with lock:
        Daemon(files, **plan).run()


if __name__ == "__main__":
    main()
