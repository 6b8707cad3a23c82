"""Runs on a node: one worker process, until its task is stopped.

Sent to the nodes by value, so it imports only the standard library and Ray: nodes need `retrain` only in the
Python that the script starts.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0  # between checks for a stop request
FILE_MODE = 0o600
PR_SET_PDEATHSIG = 1


def work(script: str, run: str, began: str, stop: str, terms: str, driver: str, node: str) -> int | None:
    """Run a worker to its end.

    Args:
        script: starts a module of retrain.
        run: the run's directory.
        began: file to write before anything is started.
        stop: path of the files that ask this worker to exit, without `.save` or `.now`.
        terms: file that names the driver in charge; if that is another driver, the worker is asked to exit.
        driver: number of the driver that submitted this task.
        node: where this runs; written to `began`.

    Returns:
        The exit code, minus the signal that ended the worker; None if it was stopped before it began.
    """
    with os.fdopen(os.open(began, os.O_WRONLY | os.O_CREAT, FILE_MODE), "w") as file:
        file.write(node)
    if _wish(stop, terms, driver):
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
    obeyed = 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return worker.wait(LOOK_S)
            wish = _wish(stop, terms, driver)
            if wish > obeyed:
                obeyed = wish
                worker.terminate() if wish == 1 else os.killpg(worker.pid, signal.SIGKILL)
    finally:  # Ray ends this process, or interrupts the task
        if worker.returncode is None:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def _wish(stop: str, terms: str, driver: str) -> int:
    """Return the request to the worker: 0 none, 1 save and exit, 2 end at once."""
    if Path(f"{stop}.now").exists():
        return 2
    if Path(f"{stop}.save").exists():
        return 1
    try:
        return int(str(json.loads(Path(terms).read_text())["driver"]) != driver)
    except FileNotFoundError:
        return 1  # the directory was removed
    except (OSError, ValueError, LookupError, TypeError):
        return 0  # the file server is unreachable: no request


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
