"""A warm interpreter that runs one program after another, each in a confined process of its own.

The zygote forks a program, watches its time, and ends everything that it left. What a program reads and
writes never passes through the zygote, so that it holds no other program's text, and its socket is closed in
the program.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.sandbox.inside import confine, jobs

MESSAGE_BYTES = 1 << 16
STOP = b"stop"
CLEANUP_S = 20.0
FAULT, OVER_TIME = 75, 124  # exit codes of a single use


def main(setup: Mapping[str, Any]) -> None:
    """Serve requests on standard input, a socket, until it closes; or run one program from there."""
    confine.hide()
    confine.adopt_orphans()
    wakes, woken = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    if setup["single_use"]:
        ended = run((os.dup(0), os.dup(1)), setup["limits"], setup, [wakes])
        os._exit(exit_status(ended))
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    gc.collect()
    gc.freeze()  # what all programs share is not copied by their collections
    answer: Mapping[str, Any] = {}  # ready
    while True:
        try:
            control.send(json.dumps(answer).encode())
            request, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8)
            while request.startswith(STOP):  # for a program that had already ended
                request = request[len(STOP) :]
                if not request:
                    request, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8)
        except OSError:
            return
        if not request:
            return
        answer = run(fds, json.loads(request), setup, [wakes, control.fileno()])


def exit_status(ended: Mapping[str, Any]) -> int:
    """Return how the only program ended: 0, 1, 128 and its signal, or a status that it cannot have itself."""
    if "fault" in ended:
        return FAULT
    if not ended["in_time"]:
        return OVER_TIME
    code = int(ended["code"])
    return 128 - code if code < 0 else min(code, 1)


def run(
    fds: Sequence[int], limits: Mapping[str, Any], setup: Mapping[str, Any], wakers: Sequence[int]
) -> dict[str, Any]:
    """Run a program on its descriptors, and leave nothing behind; return how it ended."""
    confined, confines = os.pipe()
    folder = setup["folder"]
    try:
        if not setup["mounts"]:
            folder = tempfile.mkdtemp(prefix="retrain-program-")
        program = confine.fork(namespaces=setup["mounts"])
    except OSError as error:
        os.close(confined)
        if folder != setup["folder"]:
            remove(folder)
        return {"fault": f"no further program: {error}"}
    else:
        if program == 0:
            start(fds, limits, setup, folder, confines)
    finally:
        for fd in (*fds, confines):
            os.close(fd)
    in_time = wait(program, wakers, limits["seconds"])
    was_stopped = in_time and not has_ended(program)
    kill_group(program)
    _, status, usage = os.wait4(program, 0)
    left = 0
    if not setup["mounts"]:  # a process namespace and a mount end by themselves
        left = end_children()
        remove(folder)
    is_confined = os.read(confined, 1)
    os.close(confined)
    if not is_confined and not was_stopped:  # tests may be over before a program is confined
        return {"fault": "a program could not be confined"}
    cpu_s = usage.ru_utime + usage.ru_stime
    return {"code": os.waitstatus_to_exitcode(status), "in_time": in_time, "cpu_s": cpu_s, "left": left}


def start(
    fds: Sequence[int], limits: Mapping[str, Any], setup: Mapping[str, Any], folder: str, confines: int
) -> None:
    """Confine this process, and run the program; ends this process."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if setup["mounts"]:
            confine.mount(folder, limits["disk_bytes"])
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        confine.confine(folder, limits, setup["readable"])
        os.write(confines, b"1")
        close_all_but(fds)
    except OSError:
        os._exit(FAULT)
    jobs.run(*fds)


def wait(program: int, wakers: Sequence[int], limit_s: float) -> bool:
    """Wait until a program ends, is to be stopped or is over its time; return whether it was in time."""
    deadline = time.monotonic() + limit_s
    wakes, *control = wakers
    while (left_s := deadline - time.monotonic()) > 0:
        if has_ended(program):
            return True
        ready, _, _ = select.select(wakers, [], [], left_s)
        if any(fd in ready for fd in control):  # told to stop, or nobody is there any more
            return True
        if wakes in ready:
            os.read(wakes, 64)
    return False


def has_ended(program: int) -> bool:
    """Whether a program has ended; its status can still be read."""
    return os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(leader: int) -> None:
    """Kill a program and the group that it leads."""
    for kill in (os.killpg, os.kill):
        try:
            kill(leader, signal.SIGKILL)
        except OSError:
            continue


def end_children() -> int:
    """Kill what a program left behind (Linux), and return how many processes that were."""
    ended = 0
    while True:
        try:
            with open("/proc/thread-self/children") as file:  # noqa: PTH123
                children = [int(pid) for pid in file.read().split()]
        except OSError:
            return ended
        if not children:
            return ended
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        ended += len(children)


def remove(folder: str) -> None:
    """Remove a folder, whatever is in it."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # deeper than Python can go, or without permissions
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", "--", folder]):
            subprocess.run(command, timeout=CLEANUP_S, check=False)


def close_all_but(fds: Sequence[int]) -> None:
    """Close every descriptor that a program has no use for."""
    low = 3
    for fd in [*sorted(fds), confine.OPEN_FILES]:
        os.closerange(low, fd)
        low = fd + 1
