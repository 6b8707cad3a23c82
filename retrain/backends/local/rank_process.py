"""A rank other than 0: it loads the policy, and does its part of each call until rank 0 ends.

`python -m retrain.backends.local.rank_process [DESCRIPTOR]`, of a pipe to rank 0; one on another node
connects to it. It ignores the signals by which a run is stopped: rank 0 decides when.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from retrain.backends import BackendSpec
from retrain.backends.local import options_of
from retrain.backends.local.nodes import connect
from retrain.base import user_code
from retrain.base.errors import InfrastructureError, RetrainError, RunFailedError, is_passing
from retrain.base.redaction import cover_output
from retrain.base.threads import search_rarely, use_one_thread

PR_SET_PDEATHSIG = 1


class Pipe:
    """Messages of rank 0, read in a thread that notices its end even during a call."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._messages = connection, queue.SimpleQueue[tuple[list[str], bytes]]()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._messages.put(self._connection.recv())
        except EOFError:  # rank 0 has ended
            os._exit(0)
        finally:  # its node is lost, or this process has no memory for a message
            os._exit(1)

    def recv(self) -> Any:
        sys.path[:], message = self._messages.get()
        return pickle.loads(message)

    def send(self, message: object) -> None:
        self._connection.send(message)


def main(connection: Connection) -> None:
    """Serve rank 0."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # SIG_IGN would be inherited by what a reward starts
    pipe = Pipe(connection)
    start = pipe.recv()
    from retrain.backends.local.policy import LocalBackend
    from retrain.backends.local.ranks import Done, Failed, Ranks

    ranks = Ranks(start.rank, start.size, pipe, start.devices, (start.port, start.host))
    backend: LocalBackend | None = None

    def load() -> None:
        nonlocal backend
        spec = BackendSpec(start.seed, start.model, lora_rank=start.lora_rank, options=start.options)
        backend = LocalBackend(spec, options_of(start.options), ranks)

    def act() -> Any:
        name, *arguments = pipe.recv()
        assert backend is not None  # else rank 0 ends
        return backend.parts[name](*arguments)

    def serve(part: Callable[[], Any]) -> None:
        try:
            pipe.send(Done(part()))
        except Exception as error:  # noqa: BLE001 - this process's edge: rank 0 raises it
            pipe.send(Failed(as_sent(start.rank, error)))

    serve(load)
    while True:
        serve(act)


def as_sent(rank: int, error: Exception) -> RetrainError:
    """Return an error that rank 0 can raise, which may lack what this one is made of."""
    if isinstance(error, InfrastructureError):
        return type(error)(f"rank {rank}: {error}")
    if isinstance(error, RetrainError):
        return error
    traceback.print_exception(error)
    is_own = user_code.is_in_own_code(error)
    what = f"rank {rank}: {user_code.located(error) if is_own else f'{type(error).__name__}: {error}'}"
    return InfrastructureError(what) if is_passing(error) else RunFailedError(what)


if __name__ == "__main__":
    cover_output()
    use_one_thread()
    search_rarely()
    main(Connection(int(sys.argv[1])) if sys.argv[1:] else connect().connection)
