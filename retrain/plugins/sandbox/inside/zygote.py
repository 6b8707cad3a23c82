"""A warm interpreter that runs one program after another, each in a confined process of its own.

The zygote forks a program, watches its time, its files and its denied calls, and ends everything that it
left. What a program reads and writes never passes through the zygote, so that it holds no other program's
text, and its socket is closed in the program.
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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from retrain.base.hide_process import hide
from retrain.plugins.sandbox.inside import confine, jobs

MESSAGE_BYTES = 1 << 16
STOP, STARTED = b"stop", b"{}"
CLEANUP_S = 20.0
POLL_S = 0.05  # between two checks of a program's folder
MOST_FILES = 8192
UNTOUCHED_BYTES = 64 << 20  # of its memory, which a program that ran out of it may not have used


class Allowed(TypedDict):
    """The limits of one program."""

    seconds: float
    memory_bytes: int


class Setup(TypedDict):
    """What a sandbox tells its zygote of itself."""

    single_use: bool
    mounts: bool
    folder: str
    readable: Sequence[str]
    limits: Allowed  # of the only program


def main(setup: Setup) -> None:
    """Serve requests on standard input, a socket, until it closes; or run one program from there."""
    hide()
    confine.adopt_orphans()
    confine.filters()  # once for all programs
    wakes, woken = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    if setup["single_use"]:  # whose program has no standard error
        os.write(2, STARTED + b"\n")
        last_words = json.dumps(run((os.dup(0), os.dup(1)), setup["limits"], setup, [wakes]))
        os.write(2, last_words.encode() + b"\n")
        os._exit(0)
    control = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.close(nothing)
    gc.collect()
    gc.freeze()  # what all programs share is not copied by their collections
    answer: Mapping[str, Any] = {}  # ready
    with contextlib.suppress(OSError):
        while True:
            control.send(json.dumps(answer).encode())
            request, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8)
            while request.startswith(STOP):  # for a program that had already ended
                request = request.removeprefix(STOP)
                if not request:
                    request, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 8)
            if not request:
                return
            answer = run(fds, json.loads(request), setup, [wakes, control.fileno()])


def run(fds: Sequence[int], limits: Allowed, setup: Setup, wakers: Sequence[int]) -> dict[str, Any]:
    """Run a program on its descriptors, and leave nothing behind; return how it ended."""
    folder = ""  # a mounted one goes with its program
    try:
        ours, theirs = socket.socketpair()
        folder = "" if setup["mounts"] else tempfile.mkdtemp(prefix="retrain-program-")
        program = confine.fork(namespaces=setup["mounts"])
        if program == 0:
            start(fds, limits, setup, folder or setup["folder"], theirs)
    except OSError as error:
        remove(folder)
        return {"fault": f"no further program: {error}"}
    finally:
        close(fds)
    theirs.close()
    with ours:
        confined, told, _, _ = socket.recv_fds(ours, 1, 2)
    mounted, listeners = told[: setup["mounts"]], told[setup["mounts"] :]
    watch = Watch(program, folder, limits, wakers, listeners)
    in_time = not confined or watch.wait()
    code, is_out_of_memory = end(program, limits)
    left = 0 if setup["mounts"] else end_children()  # a process namespace ends by itself
    is_full = watch.is_full() or any(map(has_no_room, mounted))
    remove(folder)
    close(told)
    if not confined:
        return {"fault": "a program could not be confined"}
    broke = faults(code, is_full=is_full, left=left)
    watch.told["memory"] += is_out_of_memory
    over = [what for what in confine.OVER.values() if watch.told[what]]
    return {"code": code, "in_time": in_time, "broke": broke, "denied": watch.told["denied"], "over": over}


def end(program: int, limits: Allowed) -> tuple[int, bool]:
    """End a program and its group; return its exit status, and whether it ran out of memory (Linux)."""
    was_killed = not has_ended(program)  # by what follows, not by the kernel for its memory
    kill_group(program)
    _, status, used = os.wait4(program, 0)
    code = os.waitstatus_to_exitcode(status)
    touched = used.ru_maxrss << 10 if confine.IS_LINUX else 0
    is_large = touched > limits["memory_bytes"] - min(UNTOUCHED_BYTES, limits["memory_bytes"] // 4)
    return code, is_large or (code == -signal.SIGKILL and not was_killed)


def has_ended(program: int) -> bool:
    """Whether a child has ended; its status is left to be read."""
    return os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def has_no_room(folder: int) -> bool:
    """Whether a program has filled the mounted folder behind a descriptor."""
    volume = os.statvfs(folder)
    return not volume.f_bfree or bool(volume.f_files and not volume.f_ffree)  # some count no files


def faults(code: int, *, is_full: bool, left: int) -> str:
    """Return what a program did that no solution does, in words."""
    kinds = {
        "made a forbidden system call": code == -signal.SIGSYS,
        "wrote too many or too large files": is_full,
        f"left {left} processes behind": left,
    }
    return " and ".join(what for what, is_so in kinds.items() if is_so)


def start(fds: Sequence[int], limits: Allowed, setup: Setup, folder: str, tells: socket.socket) -> None:
    """Confine this process, and run the program; ends this process."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if setup["mounts"]:
            confine.mount(folder)
        os.environ.update(HOME=folder, TMPDIR=folder)
        tempfile.tempdir = None
        mounted = [os.open(folder, os.O_RDONLY)] if setup["mounts"] else []
        descriptors = confine.confine(folder, limits["seconds"], limits["memory_bytes"], setup["readable"])
        socket.send_fds(tells, [b"1"], mounted + descriptors)
        close_all_but(fds)
        jobs.run(*fds)
    finally:  # this process must not go on as the zygote
        os._exit(1)


class Watch:
    """What a program does while it runs: how long, what it was denied, and how much it writes."""

    def __init__(
        self, program: int, folder: str, limits: Allowed, wakers: Sequence[int], listeners: Sequence[int]
    ) -> None:
        self._program, self._folder = program, folder
        self._deadline = time.monotonic() + limits["seconds"]
        self._poll_at_s = time.monotonic() + POLL_S
        self._wakes, self._listeners = wakers[0], listeners
        self._poll = select.poll()
        for fd in (*wakers, *listeners):
            self._poll.register(fd, select.POLLIN)
        self.told: Counter[str] = Counter()
        self._own = program if folder else 1  # its number in a namespace

    def wait(self) -> bool:
        """Wait until the program ends, is to be stopped or breaks a limit; return whether it was in time."""
        while not has_ended(self._program):
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                return False
            ready = self._poll.poll(1000 * (min(left_s, POLL_S) if self._folder else left_s))
            if any(self._ends(fd, event) for fd, event in ready):
                return True
            if (began_s := time.monotonic()) >= self._poll_at_s:  # seldom if a look at the folder takes long
                is_full = self.is_full()
                self._poll_at_s = time.monotonic() + max(POLL_S, 10 * (time.monotonic() - began_s))
                if is_full:
                    return True
        return True

    def _ends(self, fd: int, event: int) -> bool:
        """Take what a descriptor tells; return whether the program is to be stopped, or nobody is there."""
        if fd == self._wakes:
            os.read(fd, 64)
        elif fd not in self._listeners:
            return True
        elif event & select.POLLIN:
            self.told[confine.answer(fd, self._own, self.told["thread"])] += 1
        else:  # the program has ended
            self._poll.unregister(fd)
        return False

    def is_full(self) -> bool:
        """Whether the program's files are too many or too large, or cannot be listed."""
        size = count = 0
        folders = [self._folder] if self._folder else []
        while folders and size <= confine.DISK_BYTES and count <= MOST_FILES:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        status = entry.stat(follow_symlinks=False)
                        size += max(status.st_size, 512 * status.st_blocks)
                        count += 1
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
            except FileNotFoundError:  # removed just now
                continue
            except OSError:  # nested too deeply
                return True
        return size > confine.DISK_BYTES or count > MOST_FILES


def kill_group(leader: int) -> None:
    """Kill a program and the group that it leads."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(OSError):
            kill(leader, signal.SIGKILL)


def end_children() -> int:
    """Kill what a program left behind (Linux), and return how many processes that were."""
    ended = 0
    with contextlib.suppress(OSError):
        while True:
            with open("/proc/thread-self/children") as file:  # noqa: PTH123
                children = [int(pid) for pid in file.read().split()]
            if not children:
                break
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            ended += len(children)
    return ended


def remove(folder: str) -> None:
    """Remove a folder, whatever is in it; none if it has no name."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # deeper than Python can go, without permissions, or replaced by a link
        opens = ["true"] if os.path.islink(folder) else ["chmod", "-R", "u+rwx", folder]  # noqa: PTH114
        for command in (opens, ["rm", "-rf", "--", folder]):
            subprocess.run(command, timeout=CLEANUP_S, check=False)


def close(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


def close_all_but(fds: Sequence[int]) -> None:
    """Close every descriptor that a program has no use for."""
    low = 3
    for fd in [*sorted(fds), confine.OPEN_FILES]:
        os.closerange(low, fd)
        low = fd + 1
