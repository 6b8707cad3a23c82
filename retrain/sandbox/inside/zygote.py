"""A warm interpreter that starts one program after another, each in a confined process of its own.

Per program: the zygote forks a supervisor, which forks the program, watches its time, and ends everything
that it left. What the program reads and writes never passes through the zygote, so that it holds no other
program's text, and its socket is closed in the program.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from retrain.sandbox.inside import confine, jobs

MESSAGE_BYTES = 1 << 16
MOUNT_POINT = "/tmp"
STOP = b"stop"
CLEANUP_S = 20.0
FAULT, OVER_TIME = 75, 124  # exit codes of a single use


def main(setup: Mapping[str, Any]) -> None:
    """Serve requests on standard input, a socket, until it closes; or run one program from there."""
    confine.hide()
    confine.adopt_orphans()
    if setup["single_use"]:
        supervise(None, (os.dup(0), os.dup(1)), setup["limits"], setup)
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    gc.collect()
    gc.freeze()  # what all programs share is not copied by their collections
    control.send(b"{}")  # ready
    while True:
        request, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8)
        if not request:
            return
        while request.startswith(STOP):  # for a program that had already ended
            request = request[len(STOP) :]
        if request:
            serve(control, fds, json.loads(request), setup)


def serve(
    control: socket.socket, fds: Sequence[int], limits: Mapping[str, Any], setup: Mapping[str, Any]
) -> None:
    """Run a program in processes of its own, and wait for them."""
    supervisor = -1
    try:
        supervisor = os.fork()
    except OSError as error:
        answer(control, fault=f"no further process: {error}")
    if supervisor == 0:
        supervise(control, fds, limits, setup)
    for fd in fds:
        os.close(fd)
    if supervisor > 0:
        os.waitpid(supervisor, 0)


def supervise(
    control: socket.socket | None, fds: Sequence[int], limits: Mapping[str, Any], setup: Mapping[str, Any]
) -> NoReturn:
    """Run a program, answer how it ended, and leave nothing behind; ends this process."""
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    mounts = setup["mounts"]
    try:
        folder = MOUNT_POINT if mounts else tempfile.mkdtemp(prefix="retrain-program-")
        if mounts:
            confine.unshare(folder, limits["disk_bytes"])
        program = os.fork()
    except OSError as error:
        answer(control, fault=f"no further program: {error}")
        os._exit(FAULT)
    if program == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.close(wakes)
        os.close(woken)
        if control is not None:
            control.close()
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        confine.confine(folder, limits, setup["readable"])
        jobs.run(*fds)  # ends this process
    for fd in fds:
        os.close(fd)
    in_time = wait(program, wakes, -1 if control is None else control.fileno(), limits["seconds"])
    kill_group(program)
    _, status, usage = os.wait4(program, 0)
    code, cpu_s, left = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, 0
    if not mounts:  # a process namespace and a mount end by themselves
        left = end_children()
        remove(folder)
    answer(control, code=code, in_time=in_time, cpu_s=cpu_s, left=left)
    os._exit(code & 0x7F if in_time else OVER_TIME)


def wait(program: int, wakes: int, control: int, limit_s: float) -> bool:
    """Wait until a program ends, is to be stopped or is over its time; return whether it was in time."""
    deadline = time.monotonic() + limit_s
    watched = [fd for fd in (wakes, control) if fd >= 0]
    while (left_s := deadline - time.monotonic()) > 0:
        if os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return True
        ready, _, _ = select.select(watched, [], [], left_s)
        if control in ready:  # told to stop, or nobody is there any more
            return True
        if wakes in ready:
            os.read(wakes, 64)
    return False


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
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # deeper than Python can go, or without permissions
        for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", "--", folder]):
            subprocess.run(command, timeout=CLEANUP_S, check=False)


def answer(control: socket.socket | None, **message: Any) -> None:
    """Send a message, unless this is a single use; if nobody is there, end."""
    if control is None:
        return
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        sys.exit(0)
