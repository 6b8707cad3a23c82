"""A counting semaphore made of files: at most N permits in use, over any number of processes.

Admission depends only on the kernel's file locks (`flock`): a permit is a locked slot file, so it is freed
however its holder dies. Admission never relies on a process id, a clock or the contents of a file: what a
slot says of its holder is for display. It works on one machine; `lock_sharing_problem` returns why a
directory's file system is not suitable.

The directory:

    permits.json      how many permits there are, and how many slots there have ever been; replaced atomically
    permits.lock      held while permits.json is replaced
    turnstile.lock    the wait queue: held by the one waiter that watches the slots
    slot-0000 ...     locked while its permit is in use; names its holder
    seat-0000 ...     locked by a waiter, so that waiters can be counted

A waiter that is stopped (SIGSTOP) as the first in the queue blocks those behind it until it continues or
dies. A process that forks without Python's knowledge and without exec shares its permits with
the child: they are free once released, or once both are dead.

One waiter, the first in the wait queue, watches the slots and takes the first free one. No other process
takes slots meanwhile, so the number of held slots can only fall while it counts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import DamagedRecordError, LaunchError, RecordsError, records_error
from retrain.base.event_loop import in_thread
from retrain.base.locks import GUARD, Descriptor, LockFile, boot_id, locked, open_regular
from retrain.control.semaphore.wait_queue import Deadline, WaitQueue, WakeupListener, wake, wakeup_address
from retrain.records.files import remove_leftovers, write_atomic

MAX_PERMITS = 512  # the watcher keeps one open file per permit, and 1024 is a usual limit
OPEN_EARLY = 8  # slots that a waiter opens before its turn; many threads of a process may wait
WAIT_QUEUE = "turnstile.lock"  # its name on disk: other versions may use the directory too
COUNTS_LOCK = "permits.lock"  # held while the number of permits is written
MAX_TEXT = 100  # characters of a label or host name: one line of a table
_RECORD_BYTES = 4096  # two such texts fit even with every character escaped; so does permits.json
POLL_S = 0.015  # a holder that is killed wakes nobody, and its permit must be free within 50 ms
# File systems that cannot count permits, because their locks are not shared or not reliable.
_NETWORK = "locks there depend on a lock service that can forget them, or keep a dead host's locks forever"
_PRIVATE = "each machine or container may keep its own locks there, so permits could be given out twice"
_REASONS = dict.fromkeys(("9p", "afs", "beegfs", "fuse", "vboxsf", "virtiofs"), _PRIVATE)
_REASONS |= dict.fromkeys(("cifs", "nfs", "nfs4", "smb2", "smb3", "smbfs"), _NETWORK)


class FileSemaphore:
    """At most `permits` holders at once among all processes that use the same directory.

        with FileSemaphore("logs/permits", permits=4, label="run 1"):
            call_the_api()

    In asyncio, `async with` waits without blocking the event loop, and a task that is cancelled
    leaves nothing behind.

    Every `acquire` takes another permit, in any process, thread or task: a thread that acquires twice
    holds two, and deadlocks if there is only one. A forked child starts with none of its parent's permits.
    """

    def __init__(
        self,
        directory: Path | str,
        permits: int,
        label: str = "",
        *,
        allow_unshared: bool = False,
        count: Callable[[float, float], None] = lambda waited_s, held_s: None,
    ) -> None:
        """Open or create the semaphore in a directory.

        Args:
            directory: made with mode 0700 if missing.
            permits: number of permits if the directory is new. Otherwise the directory's number is
                kept, so that a restarted worker does not undo `set_permits`.
            label: shown by `inspect`, at most 100 characters of it.
            allow_unshared: accept a file system that `lock_sharing_problem` warns of.
            count: called with the seconds that a permit was waited for, then with those that it was held.

        Raises:
            ValueError: `permits` is not a whole number from 1 to 512.
            LaunchError: locks on this file system are not shared or not reliable, or the permits are another
                user's.
            RecordsError: the directory cannot be made, or its files are damaged, links, or cannot be
                opened or written.
        """
        check_permits(permits)
        self._directory = Path(directory).absolute()
        self._label, self._count = label, count
        problem = None if allow_unshared else lock_sharing_problem(self._directory)
        if problem is not None:
            raise LaunchError(f"{problem}; put the permits on a local disk")
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise records_error(self._directory, "make the directory", error) from error
        _require_same_user(self._directory)
        create_permits(self._directory, permits)
        wait_queue = self._directory / WAIT_QUEUE
        LockFile(str(wait_queue)).close()
        self._wakeup_address = wakeup_address(wait_queue)
        self._wait_queue = WaitQueue(str(wait_queue))
        # (acquirer, slot, since when), oldest first; guarded by GUARD
        self._held: list[tuple[object, LockFile, float]] = []

    @property
    def permits(self) -> int:
        """Current number of permits, for all processes."""
        return read_permits(self._directory).permits

    def set_permits(self, permits: int) -> None:
        """Change the number of permits, for all processes.

        An increase wakes waiters at once. After a decrease, no waiter is admitted until enough permits
        have been released.

        Raises:
            ValueError: `permits` is not a whole number from 1 to 512.
            RecordsError: it cannot be written; the old number is kept.
        """
        check_permits(permits)
        with locked(self._directory / COUNTS_LOCK):
            slots = read_permits(self._directory).slots  # old ones may still be held: it never falls
            _write(self._directory, permits, max(permits, slots))
        wake(self._wakeup_address)

    def acquire(self, timeout_s: float | None = None) -> bool:
        """Take a permit, waiting for one in the order of arrival.

        Args:
            timeout_s: how long to wait; None waits forever, 0 tries once, which may fail
                while another waiter is being admitted.

        Returns:
            False if the time passed without a permit.

        Raises:
            RecordsError: the directory's files are gone or damaged, or cannot be opened, locked or written.
        """
        if timeout_s is not None and not timeout_s >= 0:
            raise ValueError(f"timeout_s: got {timeout_s!r}; needs 0 or more seconds, or None")
        asked_s = time.perf_counter()
        slot = self._taken(Deadline(timeout_s), may_wait=timeout_s != 0)
        if slot is not None:
            self._keep(slot, asked_s)
        return slot is not None

    def release(self) -> None:
        """Release the permit that this thread or task acquired last, or else this object's oldest.

        Raises:
            RuntimeError: this object holds none in this process.
        """
        with GUARD:
            self._held[:] = [held for held in self._held if held[1].is_open]  # a forked child holds none
            acquirer = _thread_or_task()
            mine = [held for held in self._held if held[0] is acquirer]
            if not self._held:
                raise RuntimeError(f"{self._directory}: release without acquire in process {os.getpid()}")
            released = mine[-1] if mine else self._held[0]
            self._held.remove(released)
        _, slot, since_s = released
        self._give_back(slot)
        self._count(0.0, time.perf_counter() - since_s)

    def __enter__(self) -> FileSemaphore:
        self.acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()

    async def __aenter__(self) -> FileSemaphore:
        deadline, asked_s = Deadline(None, may_give_up=True), time.perf_counter()
        came = in_thread(lambda: self._taken(deadline), unwanted=self._drop)
        try:
            slot = await came
        except BaseException:
            deadline.give_up()
            if came.done() and not came.cancelled() and came.exception() is None:
                self._drop(came.result())  # acquired, but the task was cancelled before it continued
            raise
        assert slot is not None, "only a waiter that gives up gets no slot"
        self._keep(slot, asked_s)
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.release()

    @staticmethod
    def inspect(directory: Path | str) -> SemaphoreState:
        """Return who holds permits and how many wait, without waiting or writing.

        Works in a read-only directory and in a copy, where nothing is held.

        Raises:
            RecordsError: the directory holds no semaphore, or its files cannot be read.
        """
        directory = Path(directory)
        counts = read_permits(directory)
        slots = (_slot_path(directory, number) for number in range(counts.slots))
        holders = tuple(filter(None, map(_holder_of, slots)))
        waiting = sum(_holder_of(str(seat)) is not None for seat in sorted(directory.glob("seat-*")))
        wait_queue = directory / WAIT_QUEUE
        if wait_queue.exists():  # its watcher may have seen a free slot as locked because it was inspected
            wake(wakeup_address(wait_queue))
        return SemaphoreState(counts.permits, holders, waiting)

    def _taken(self, deadline: Deadline, *, may_wait: bool = True) -> LockFile | None:
        try:
            if (slot := self._take(deadline, may_wait=may_wait)) is not None:
                try:
                    write_holder(slot, self._label)
                except BaseException:
                    self._give_back(slot)
                    raise
            return slot
        except OSError as error:
            raise records_error(self._directory, "take a permit", error) from error

    def _keep(self, slot: LockFile, asked_s: float) -> None:
        now_s = time.perf_counter()
        self._count(now_s - asked_s, 0.0)
        with GUARD:
            self._held.append((_thread_or_task(), slot, now_s))

    def _drop(self, slot: LockFile | None) -> None:
        if slot is not None:
            self._give_back(slot)

    def _give_back(self, slot: LockFile) -> None:
        slot.close()
        wake(self._wakeup_address)

    def _take(self, deadline: Deadline, *, may_wait: bool) -> LockFile | None:
        place = self._wait_queue.arrive(may_wait=may_wait)
        if place is None:
            return None
        with closing(place), closing(Slots(self._directory)) as slots:
            if place.is_first:
                slot = slots.take()
                if slot is not None or not may_wait:
                    return slot
                place.draw()  # newcomers queue behind it from now on
            with closing(take_seat(self._directory)):
                slots.prepare()
                inside = self._wait_queue.enter(place, deadline)
                if inside is None:
                    return None
                with closing(inside):  # left before the slots are closed: other waiters need it
                    return self._watch(slots, deadline)

    def _watch(self, slots: Slots, deadline: Deadline) -> LockFile | None:
        if (slot := slots.take()) is not None:
            return slot
        with closing(WakeupListener(self._wakeup_address)) as listener:
            while (slot := slots.take()) is None:
                if (left_s := deadline.left_s()) <= 0:
                    return None
                listener.wait(min(left_s, POLL_S))
            return slot


def _require_same_user(directory: Path) -> None:
    """Raise LaunchError if files of a semaphore are another user's: they are private, and so are ours."""
    for pattern in ("permits.*", "slot-*", "seat-*", WAIT_QUEUE):
        for path in directory.glob(pattern):
            if path.is_symlink() or os.access(path, os.R_OK | os.W_OK):
                continue
            import pwd  # here: seldom needed

            owner = path.stat().st_uid
            names = {user.pw_uid: user.pw_name for user in pwd.getpwall()}
            raise LaunchError(
                f"{directory}: its permits belong to the user {names.get(owner, owner)}, and users cannot "
                "share permits; set backend.throttle_dir to a directory of your own"
            )


def _thread_or_task() -> object:
    """Return the asyncio task that runs here, if one does, else the thread."""
    if (asyncio := sys.modules.get("asyncio")) is not None:
        with contextlib.suppress(RuntimeError, AttributeError):  # no event loop; still importing asyncio
            return asyncio.current_task() or threading.current_thread()
    return threading.current_thread()


def lock_sharing_problem(directory: Path | str) -> str | None:
    """Return why locks in a directory, which need not exist, are not reliable; None if nothing is known."""
    import psutil  # here: takes 40 ms, and no worker asks

    place, mounts = Path(directory).resolve(), []
    with contextlib.suppress(OSError):  # no mount table
        mounts = [
            mount for mount in psutil.disk_partitions(all=True) if place.is_relative_to(mount.mountpoint)
        ]
    # of stacked mounts, the last one counts
    mount = max(reversed(mounts), key=lambda mount: len(Path(mount.mountpoint).parts), default=None)
    if mount is None:
        return None
    reason = _REASONS.get("fuse" if mount.fstype.startswith("fuse.") else mount.fstype)
    if mount.fstype == "lustre" and "flock" not in mount.opts.split(","):
        reason = "it is mounted without the option flock, so locks are private or refused"
    if reason is None:
        return None
    return f"{place}: on a {mount.fstype} file system (mounted at {mount.mountpoint}); {reason}"


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a permit, as written by itself: untrusted text of bounded length."""

    pid: int  # 0 until the holder has written its record
    host: str
    label: str
    held_s: float


@dataclass(frozen=True, slots=True)
class SemaphoreState:
    """A semaphore at one moment."""

    permits: int
    holders: tuple[Holder, ...]
    waiting: int


class PermitsFile:
    """The counts as read once; can check whether they were replaced since.

    `permits` may be in use at once; after a decrease, slots up to `slots` may still be held.
    """

    def __init__(self, directory: Path) -> None:
        """Read the counts; raise RecordsError if the directory holds no semaphore, or a damaged one."""
        self._path = f"{directory}/permits.json"
        try:
            with GUARD:
                self._file = Descriptor(open_regular(self._path, os.O_RDONLY))
        except FileNotFoundError as error:
            raise RecordsError(
                f"{self._path}: missing, so this is not a semaphore's directory; opening one there, as "
                "`retrain resume` does, writes it"
            ) from error
        text = os.read(self._file.fileno(), _RECORD_BYTES)
        try:
            fields = json.loads(text)
            self.permits, self.slots = check_permits(fields["permits"]), check_permits(fields["slots"])
        except (ValueError, TypeError, KeyError, RecursionError):
            self.close()
            raise DamagedRecordError(
                f"{self._path}: damaged; opening the semaphore again, as `retrain resume` does, repairs it"
            ) from None

    def is_current(self) -> bool:
        """Whether the file was not replaced: the inode of an open file is not reused."""
        return os.stat(self._path).st_ino == os.stat(self._file.fileno()).st_ino  # noqa: PTH116

    def close(self) -> None:
        self._file.close()


def read_permits(directory: Path) -> PermitsFile:
    """Read the counts once, as `PermitsFile` does."""
    file = PermitsFile(directory)
    file.close()
    return file


def create_permits(directory: Path, permits: int) -> None:
    """Set the number of permits, unless the directory has a readable one."""
    with locked(directory / COUNTS_LOCK):
        remove_leftovers(directory, "permits.json")
        with suppress(DamagedRecordError):
            if os.path.lexists(directory / "permits.json"):
                read_permits(directory)
                return
        numbers = [path.name.removeprefix("slot-") for path in directory.glob("slot-*")]  # each may be held
        slots = max((int(n) + 1 for n in numbers if n.isascii() and n.isdigit()), default=0)
        _write(directory, permits, max(permits, min(slots, MAX_PERMITS)))


def _write(directory: Path, permits: int, slots: int) -> None:
    write_atomic(directory / "permits.json", json.dumps({"permits": permits, "slots": slots}))


def check_permits(permits: object) -> int:
    """Return `permits`; raise ValueError unless it is a whole number from 1 to `MAX_PERMITS`."""
    if type(permits) is not int or not 1 <= permits <= MAX_PERMITS:
        raise ValueError(f"permits: got {permits!r}; needs a whole number from 1 to {MAX_PERMITS}")
    return permits


def write_holder(slot: LockFile, label: str) -> None:
    """Write that this process holds a slot into the first line of its file, with the time.

    Also by the monotonic clock, which all processes of one boot share, so that setting the wall clock does
    not change `held_s`.
    """
    record = {
        "pid": os.getpid(),
        "host": os.uname().nodename[:MAX_TEXT],
        "label": label[:MAX_TEXT],
        "clock": boot_id(),
        "monotonic_s": time.monotonic(),
        "wall_s": time.time(),
    }
    os.pwrite(slot.fileno(), f"{json.dumps(record)}\n".encode(), 0)


def take_seat(directory: Path) -> LockFile:
    """Lock a random free seat: many waiters need few tries, and few waiters need few files."""
    seats = 8.0
    while True:
        number = int.from_bytes(os.urandom(4), "big") % int(seats)
        seat = LockFile(f"{directory}/seat-{number:04d}")
        if seat.try_lock():
            return seat
        seat.close()
        seats *= 1.25


def _slot_path(directory: Path, number: int) -> str:
    return f"{directory}/slot-{number:04d}"


def _holder_of(path: str) -> Holder | None:
    """Return who holds a slot or a seat; None if it is free."""
    try:
        file = LockFile(path, read_only=True)
    except FileNotFoundError:
        return None
    with closing(file):
        return None if file.try_lock(shared=True) else read_holder(file)


def read_holder(slot: LockFile) -> Holder:
    """Read the current or last holder of a slot; see `write_holder`."""
    text = os.pread(slot.fileno(), _RECORD_BYTES, 0)
    try:
        fields = json.loads(text.partition(b"\n")[0])
        since_s, now_s = float(fields["monotonic_s"]), time.monotonic()
        if fields["clock"] != boot_id():
            since_s, now_s = float(fields["wall_s"]), time.time()
        host, label = str(fields["host"])[:MAX_TEXT], str(fields["label"])[:MAX_TEXT]
        return Holder(int(fields["pid"]), host, label, max(0.0, now_s - since_s))
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return Holder(0, "", "", 0.0)


class Slots:
    """The slot files, kept open between tries; only for the first in the wait queue."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, LockFile] = {}
        self._counts = PermitsFile(directory)

    def prepare(self) -> None:
        """Open the first files while another process is still the first in the queue."""
        for number in range(min(self._counts.slots, OPEN_EARLY)):
            self._file(number)

    def take(self) -> LockFile | None:
        """Lock a free slot; None if all permits are in use."""
        while True:
            counts = self._counts
            if counts.slots == counts.permits:
                number = next((n for n in range(counts.slots) if self._file(n).try_lock()), None)
            else:  # after a decrease, also slots beyond the permits may be held
                free = [n for n in range(counts.slots) if self._file(n).try_lock()]
                is_room = counts.slots - len(free) < counts.permits
                number = free[0] if is_room and free else None
                for unused in free[1:] if is_room else free:
                    self._files[unused].unlock()
            # Checked after locking: a process that changes the number from now on finds the slot taken.
            if self._counts.is_current():
                return None if number is None else self._files.pop(number)
            if number is not None:
                self._files[number].unlock()
            self._counts.close()
            self._counts = PermitsFile(self._directory)

    def close(self) -> None:
        """Close all files except the taken slot."""
        self._counts.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, number: int) -> LockFile:
        if number not in self._files:
            self._files[number] = LockFile(_slot_path(self._directory, number))
        return self._files[number]
