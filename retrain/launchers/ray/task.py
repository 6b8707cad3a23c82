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
from pathlib import Path

LOOK_S = 1.0  # between checks for a stop request
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
    save, now = Path(f"{stop}.save"), Path(f"{stop}.now")
    if save.exists() or now.exists():
        return None
    log = os.open(f"{run}/output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(log, "ab") as output:
        worker = subprocess.Popen(
            ["bash", script, "retrain.worker", run],
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
                return worker.wait(LOOK_S)
            if now.exists():
                os.killpg(worker.pid, signal.SIGKILL)
            elif save.exists() and not was_asked:
                was_asked = True
                worker.terminate()
    finally:  # Ray ends this process, or interrupts the task
        if worker.returncode is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


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
