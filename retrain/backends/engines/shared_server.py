"""One server for many runs of a user: the first that needs it starts it, and it ends after the last one.

A daemon process, which belongs to no run, starts the server, restarts it after a crash, and ends it once
nobody uses it: a user holds a lock while it lives, so that one that was killed does not count. Files:

    users/*.lock   held by the users
    start.lock     for whoever starts a daemon, and a daemon that is about to end
    daemon.lock    held by the daemon
    server.json    what the daemon knows of the server: `ServerState`
    server.log     the server's output
    turns.lock     shared by users that sample, held by one that trains, if they share a GPU in turn
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import ConfigError, InfrastructureError, RecordsError
from retrain.base.locks import LockFile, hold, is_held
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
        with contextlib.suppress(RecordsError, ValueError):
            if (found := read_json(self.state)) is not None:
                return record_of(ServerState, found)
        return ServerState(ENDED)

    def last_lines(self) -> str:
        """Return the end of the server's log."""
        with contextlib.suppress(FileNotFoundError, RecordsError), opened(self.log) as log:
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
        self._plan = {
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
            found = self.files.read_state()
            if found.state == FAILED:
                kind = InfrastructureError if found.restarts else ConfigError
                raise kind(self._problem(found.problem, found.last_lines))
            if not is_held(self.files.daemon_lock):
                if daemons >= DAEMONS:
                    raise InfrastructureError(f"{self._who}: its daemon was killed repeatedly")
                daemons += self._ensure_daemon()
            elif found.state == READY and found.listens():  # the daemon may not have seen its end yet
                return found
            watch(found, waited_s)
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
        import filelock  # here: importing it takes 50 ms

        with filelock.FileLock(self.files.start_lock, mode=0o600):
            if is_held(self.files.daemon_lock):
                return False
            left = self.files.read_state()
            write_json(self.files.state, {"state": STARTING, "pid": left.pid, "started": left.started})
            module = ["-m", "retrain.base.hide_process", "retrain.backends.engines.daemon"]
            command = [sys.executable, *module, str(self.files.directory)]
            plan = json.dumps(self._plan).encode()
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


@contextlib.contextmanager
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
