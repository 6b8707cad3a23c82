"""Runs on a node: one worker process, until its task is stopped.

Sent to the nodes by value, so it imports only the standard library: nodes need `retrain` only in the Python
that the script starts.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

POLL_S = 1.0  # between checks for a stop request
FILE_MODE = 0o600
PR_SET_PDEATHSIG = 1


def work(script: str, run: str, stop: str) -> int | None:
    """Run a worker to its end.

    Args:
        script: starts a module of retrain.
        run: the run's directory.
        stop: `stop.save` asks this worker to save and exit, `stop.now` to end at once.

    Returns:
        The exit code, minus the signal that ended the worker; None if it was stopped before it began.
    """
    save, now = f"{stop}.save", f"{stop}.now"
    if _is_there(save) or _is_there(now):
        return None
    log = os.open(f"{run}/output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(log, "ab") as output:
        worker = subprocess.Popen(
            ["bash", script, "retrain.trainer.worker", run],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_death_with_parent(),
        )
    was_asked = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return worker.wait(POLL_S)
            if _is_there(now):
                os.killpg(worker.pid, signal.SIGKILL)
            elif _is_there(save) and not was_asked:
                was_asked = True
                worker.terminate()
    finally:  # Ray ends this process, or interrupts the task
        if worker.returncode is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def _is_there(path: str) -> bool:
    """Whether a file exists; no if the file server is unreachable, which is asked again at the next look."""
    return os.path.exists(path)  # noqa: PTH110 (Path.exists raises errors of the file server in Python 3.11)


def _death_with_parent() -> Callable[[], None] | None:
    """Return a function that makes the kernel kill a child whose parent dies, for whatever reason."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def die_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return die_with_parent
