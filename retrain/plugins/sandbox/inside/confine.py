"""Confines the process that is about to run a program; nothing of it can be undone from inside."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import re
import resource
import signal
import struct
import sys
from collections.abc import Iterator, Sequence
from functools import cache

FILE_BYTES, DISK_BYTES = 16 << 20, 64 << 20  # of one file, and of a program's folder
OPEN_FILES = 64
MOST_THREADS = 1024  # that a program may start: beyond, they use up the kernel's memory
IS_LINUX = sys.platform == "linux"
CLONE_THREAD, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWPID = 0x10000, 0x20000, 0x8000000, 0x20000000
MS_NOSUID, MS_NODEV = 2, 4
PDEATHSIG, SECCOMP, NO_NEW_PRIVS, SUBREAPER, AMBIENT = 1, 22, 38, 36, 47
READ_AND_RUN, READ_AND_WRITE = 0b1101, 0b110  # Landlock's rights
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

# System calls, each with its number on x86_64 and on aarch64: those that end a program,
KILLED = """ptrace 101 117 process_vm_readv 310 270 process_vm_writev 311 271 mount 165 40 umount2 166 39
pivot_root 155 41 chroot 161 51 unshare 272 97 setns 308 268 bpf 321 280 perf_event_open 298 241
keyctl 250 219 add_key 248 217 request_key 249 218 open_by_handle_at 304 265 kexec_load 246 104
init_module 175 105 finit_module 313 273 reboot 169 142 userfaultfd 323 282 pidfd_getfd 438 438
process_madvise 440 440 move_mount 429 429 open_tree 428 428 fsopen 430 430 mount_setattr 442 442"""
# those that are denied and counted,
DENIED = """fork 57 -1 vfork 58 -1 execve 59 221 execveat 322 281 socket 41 198 connect 42 203 bind 49 200
kill 62 129 pidfd_open 434 434 pidfd_send_signal 424 424 rt_sigqueueinfo 129 138 rt_tgsigqueueinfo 297 240
setsid 112 157 setpgid 109 154 shmctl 31 195 semop 65 193 semctl 66 191 semtimedop 220 192 msgsnd 69 189
msgrcv 70 188 msgctl 71 187 mq_unlink 241 181 io_uring_setup 425 425 personality 135 92 shmget 29 194
shmat 30 196 semget 64 190 msgget 68 186 mq_open 240 180 memfd_secret 447 447 seccomp 317 277
syslog 103 116 io_setup 206 0 path 1000 1000 memory 1001 1001 files 1002 1002"""
# and those that are only denied, since a library or a crash may make them.
REFUSED = """tkill 200 130 tgkill 234 131 setpriority 141 140 ioprio_set 251 30 sched_setaffinity 203 122
sched_setscheduler 144 119 sched_setparam 142 118 sched_setattr 314 274 chmod 90 -1 fchmod 91 52
fchmodat 268 53 chown 92 -1 fchown 93 55 lchown 94 -1 fchownat 260 54 setxattr 188 5 lsetxattr 189 6
fsetxattr 190 7 removexattr 197 14 utime 132 -1 utimes 235 -1 utimensat 280 88 futimesat 261 -1
fchmodat2 452 452 truncate 76 45 memfd_create 319 279 inotify_add_watch 254 27 fanotify_init 300 262
sync 162 81 syncfs 306 267"""
NEWER = 463  # calls from here on, such as setxattrat, are not known: they do not exist
# No system calls: by them a program's interpreter tells of a path, or of a limit that it ran into.
FORBIDDEN_PATH, OVER_MEMORY, OVER_FILES = 1000, 1001, 1002
OVER = {OVER_MEMORY: "memory", OVER_FILES: "files"}
LONGEST_CHAIN = 20  # of exceptions
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE)
# column, kernel's number, seccomp
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
CLONE, CLONE3, KILL, PRLIMIT = (56, 220), (435, 435), (62, 129), (302, 261)
PRCTL, FCNTL, IOCTL, SOCKETPAIR = (157, 167), (72, 25), (16, 29), (53, 199)
FALLOCATE = (285, 47)  # ignores the limit of a file's size; C libraries write instead
OPENAT2 = (437, 437)  # its flags cannot be seen; C libraries use openat
# System calls that are refused for values of an argument, of whose bits some count: a filter of its own that
# could hide calls; a process that gets signals when a file is ready; a lease, which has others wait for the
# file; typing into a terminal; flags of files, which need no permission to write (flags, project, version,
# verity, encryption); datagrams, which need no connection; and what Landlock takes for no writing: to cut a
# file that is only read (before Linux 6.2), and to open one for neither.
OPEN, OPENAT, ALL_BITS = (2, -1), (257, 56), 0xFFFFFFFF
UNSEEN = (os.O_TRUNC | os.O_ACCMODE, (os.O_TRUNC, os.O_ACCMODE, os.O_TRUNC | os.O_ACCMODE))
FLAGS = (0x40086602, 0x401C5820, 0x40087602, 0x40806685, 0x800C6613)
ARGUMENTS = (
    (PRCTL, 0, ALL_BITS, (PDEATHSIG, SECCOMP)),
    (FCNTL, 1, ALL_BITS, (8, 15, 1024)),
    (IOCTL, 1, ALL_BITS, (0x8901, 0x8902, 0x5412, *FLAGS)),
    (SOCKETPAIR, 1, 0xF, (2, 3)),
    (OPEN, 1, *UNSEEN),
    (OPENAT, 2, *UNSEEN),
)
LANDLOCK = (444, 445, 446)  # on every machine
RETURN, LOAD, EQUAL, AT_LEAST, ANY_BIT, AND = 0x06, 0x20, 0x15, 0x35, 0x45, 0x54
ALLOW, KILL_PROCESS, EPERM, ENOSYS, EOPNOTSUPP = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x0005005F
ASK = 0x7FC00000
FILTER, LISTENS, RECEIVE, REPLY, GO_ON = 1, 8, 0xC0502100, 0xC0182101, 1
ASKS_SINCE = [5, 5]  # kernel whose listener may let a call go on
NO_FILTER = -1

libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, such as those that left their group (Linux)."""
    if IS_LINUX:
        libc.prctl(SUBREAPER, 1)


def fork(*, namespaces: bool) -> int:
    """Fork; with namespaces, the child is the first process of a new one. The kernel may refuse it."""
    if not namespaces:
        return os.fork()
    process = os.pidfd_open(os.getpid())
    try:
        _check(libc.unshare(CLONE_NEWPID), "unshare")  # of children only
        return os.fork()
    finally:
        libc.setns(process, CLONE_NEWPID)
        os.close(process)


def mount(folder: str) -> None:
    """Leave the mounts and IPC of others, and mount an empty folder of bounded size; it may be refused."""
    _check(libc.unshare(CLONE_NEWNS | CLONE_NEWIPC), "unshare")
    size = f"size={DISK_BYTES},nr_inodes=8192,mode=700".encode()
    _check(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, size), "mount")


def confine(folder: str, seconds: float, memory_bytes: int, readable: Sequence[str]) -> list[int]:
    """Confine this process to a folder; return the descriptor that tells of denied calls, if there is one."""
    os.chdir(folder)
    listener = NO_FILTER
    if IS_LINUX:
        libc.prctl(PDEATHSIG, signal.SIGKILL)
        libc.prctl(AMBIENT, 4, 0, 0, 0)  # clear all
        libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))  # version 3, this process: none
        libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
        if readable:
            _landlock(folder, readable)
        for flags, code in filters().items():
            head = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(code))
            listener = libc.syscall(MACHINES[platform.machine()][2], FILTER, flags, head)
            if listener >= 0:  # 0: one that tells of nothing
                break
    _limit(seconds, memory_bytes, may_start_threads=listener >= 0)
    return [listener] if listener > 0 else []


def answer(listener: int, own: int, threads: int) -> str:
    """Answer a call that waits; return "thread", "signal", "denied", a limit, or "" if it is gone.

    Args:
        listener: from `confine`.
        own: the program's process, by its own number; a signal to it is denied, but no sign of anything.
        threads: that it has started.
    """
    notice = bytearray(80)
    try:
        fcntl.ioctl(listener, RECEIVE, notice)
        call, _, number, _, _, argument = struct.unpack_from("QQiIQQ", notice)
        what = OVER.get(number, "denied")
        if number in CLONE and argument & CLONE_THREAD and threads < MOST_THREADS:
            what = "thread"
        elif number in KILL and argument == own:
            what = "signal"
        how = (0, GO_ON) if what == "thread" else (-errno.EPERM, 0)
        fcntl.ioctl(listener, REPLY, struct.pack("QqiI", call, 0, *how))
    except OSError:  # it was interrupted, and comes again
        return ""
    return what


def tell_of_path() -> None:
    """Have the supervisor count a path that this program should not touch (Linux)."""
    if IS_LINUX:
        libc.syscall(FORBIDDEN_PATH)


def tell_of_limits(error: BaseException | None) -> None:
    """Have the supervisor note the limit that an exception or its causes stand for, if any (Linux)."""
    with contextlib.suppress(BaseException):  # of the exception's own code
        for _ in range(LONGEST_CHAIN if IS_LINUX else 0):
            code = error.errno if isinstance(error, OSError) else None
            memory = isinstance(error, MemoryError) or code == errno.ENOMEM
            if memory or code in FULL:
                libc.syscall(OVER_MEMORY if memory else OVER_FILES)
            error = error and error.__context__


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _limit(seconds: float, memory_bytes: int, *, may_start_threads: bool) -> None:
    most = {
        resource.RLIMIT_CPU: (int(seconds) + 2) * (os.cpu_count() or 1),  # beyond its deadline
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if IS_LINUX:
        most[resource.RLIMIT_AS] = memory_bytes
        if not may_start_threads:
            most[resource.RLIMIT_NPROC] = 0
    for what, value in most.items():
        resource.setrlimit(what, (value, value))


def _landlock(folder: str, readable: Sequence[str]) -> None:
    """Leave the folder, the interpreter and nothing else of the file system, where the kernel can."""
    create, add, restrict = LANDLOCK
    version = libc.syscall(create, None, 0, 1)
    if version < 1:
        return
    rights = (1 << min(13 + (version > 1) + (version > 2) + (version > 4), 16)) - 1
    rules = libc.syscall(create, struct.pack("Q", rights), 8, 0)
    allowed = {**dict.fromkeys(readable, READ_AND_RUN), **dict.fromkeys(DEVICES, READ_AND_WRITE)}
    for path, access in {**allowed, folder: rights}.items():
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError:
            continue
        if not os.path.isdir(path):  # noqa: PTH112 - pathlib is slow to import
            access &= READ_AND_WRITE
        libc.syscall(add, rules, 1, struct.pack("=Qi", access, fd), 0)
        os.close(fd)
    libc.syscall(restrict, rules, 0)
    os.close(rules)


@cache
def filters() -> dict[int, ctypes.Array[ctypes.c_char]]:
    """Return the filters of system calls to try, by flags; none where the calls are not known here."""
    if platform.machine() not in MACHINES:
        return {}
    version = [int(part) for part in re.findall(r"\d+", os.uname().release)[:2]]
    column, architecture, _ = MACHINES[platform.machine()]
    return {
        flags: ctypes.create_string_buffer(
            b"".join(struct.pack("HBBI", *one) for one in _instructions(column, architecture, flags))
        )
        for flags in ((LISTENS, 0) if version >= ASKS_SINCE else (0,))
    }


def _instructions(column: int, architecture: int, listens: int) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over the filter's instructions: operation, jump if true, jump if false, operand."""
    denied, thread = (ASK, ASK) if listens else (EPERM, ALLOW)
    yield LOAD, 0, 0, 4
    yield EQUAL, 1, 0, architecture
    yield RETURN, 0, 0, KILL_PROCESS
    yield LOAD, 0, 0, 0
    yield AT_LEAST, 0, 1, 0x40000000  # x86's other numbering
    yield RETURN, 0, 0, KILL_PROCESS
    for calls, result in ((KILLED, KILL_PROCESS), (DENIED, denied), (REFUSED, EPERM)):
        for number in _numbers(calls, column):
            yield EQUAL, 0, 1, number
            yield RETURN, 0, 0, result
    yield AT_LEAST, 0, 1, NEWER
    yield RETURN, 0, 0, ENOSYS
    yield EQUAL, 0, 1, FALLOCATE[column]
    yield RETURN, 0, 0, EOPNOTSUPP
    for call in (CLONE3, OPENAT2):
        yield EQUAL, 0, 1, call[column]
        yield RETURN, 0, 0, ENOSYS  # its flags cannot be seen; the C library then uses the older call
    yield EQUAL, 0, 4, CLONE[column]
    yield LOAD, 0, 0, 16  # its first argument
    yield ANY_BIT, 0, 1, CLONE_THREAD
    yield RETURN, 0, 0, thread
    yield RETURN, 0, 0, denied  # another process
    yield EQUAL, 0, 3, PRLIMIT[column]
    yield LOAD, 0, 0, 16
    yield EQUAL, 1, 0, 0  # its own limits
    yield RETURN, 0, 0, EPERM
    for call, argument, bits, values in ARGUMENTS:
        if call[column] >= 0:
            yield EQUAL, 0, 2 * len(values) + 3, call[column]
            yield LOAD, 0, 0, 16 + 8 * argument
            yield AND, 0, 0, bits
            for value in values:
                yield EQUAL, 0, 1, value
                yield RETURN, 0, 0, EPERM
            yield RETURN, 0, 0, ALLOW
    yield RETURN, 0, 0, ALLOW


def _numbers(calls: str, column: int) -> list[int]:
    words = calls.split()
    return [int(number) for number in words[1 + column :: 3] if number != "-1"]
