"""A disk that can be stopped at any file operation, and that forgets what was not synced.

While a `Disk` is installed, `os`'s file operations go through it. It can end the writing "process"
before, half-way through or after any of them: nothing that this process does afterwards, not even
in a `finally`, reaches the disk. It also keeps what a power loss would leave: per file what was
synced and a part of what was not, per directory the names that were synced and some of the others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.base import locks

WRITERS = (
    "open",
    "write",
    "pwrite",
    "ftruncate",
    "fsync",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "close",
)
WRITING = os.O_WRONLY | os.O_RDWR
MOMENTS = ("before", "half", "after", "intrude")


def deaths_at(operation: int, disk: Disk) -> tuple[str, ...]:
    """Return the ways to die at an operation that leave different disks, by a life that did not.

    To die before an operation is to die after the one before it, and only a write ends half-way.
    """
    first = ("before",) if operation == 1 else ()
    return (*first, *(("half",) if operation in disk.written else ()), "after")


class Killed(BaseException):
    """The process is gone."""


@dataclass
class Inode:
    """A file's synced content, and the writes since."""

    synced: bytes = b""
    writes: list[tuple[str, bytes | int]] = field(default_factory=list)

    def after(self, count: int) -> bytes:
        content = self.synced
        for kind, value in self.writes[:count]:
            content = content + value if kind == "append" else content[:value]
        return content


class Disk:
    """One life of a process on a directory."""

    def __init__(
        self,
        root: Path,
        stop_at: int = 0,
        moment: str = "before",
        on_intrude: Callable[[], None] = lambda: None,
        *,
        loses_power: bool = False,
        before: Disk | None = None,
        before_sync: Callable[[], None] | None = None,
    ) -> None:
        """Watch a directory.

        Args:
            root: of what is watched.
            stop_at: which operation the process dies at, from 1; 0: none.
            moment: in which way.
            on_intrude: what another process does at that operation, if `moment` is "intrude".
            loses_power: keep what a power loss would leave, for `image`.
            before: an earlier life here that ended without a power loss: what it had not synced is
                still not synced.
            before_sync: is called before each sync: until then, what a power loss would leave did not change.
        """
        self.operations = 0
        self.made: list[int] = []  # operations that gave something the name it keeps
        self.written: set[int] = set()  # operations that can end half-way
        self.is_dead = False
        self._root = str(root)
        self._stop_at, self._moment, self._on_intrude = stop_at, moment, on_intrude
        self._before_sync = before_sync
        self._real = {name: getattr(os, name) for name in WRITERS}
        self._path_of: dict[int, str] = {}
        self._writable: set[int] = set()  # the others may have been closed behind our back, by a file object
        self._loses_power = loses_power
        self._names: dict[str, Inode | None] = {}  # durable names; None is a directory
        self._now: dict[str, Inode | None] = {}
        self._changes: dict[str, list[tuple[str, str, Inode | None]]] = {}  # per directory, not synced
        if before is not None:
            self._names, self._now, self._changes = before._names, before._now, before._changes
        elif loses_power:
            self._take_stock(root)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Put this disk under `os`; a `Killed` ends the block quietly."""
        for name in WRITERS:
            setattr(os, name, self._wrapped(name))
        try:
            yield
        except Killed:
            pass
        finally:
            for name, real in self._real.items():
                setattr(os, name, real)
            lost = self._writable & self._path_of.keys()
            for descriptor in list(locks.OPEN):  # closed by themselves, or a later fork
                if (fd := descriptor.fileno()) in lost:  # would close files that reuse their numbers
                    lost.remove(fd)
                    locks.Descriptor.close(descriptor)
            for fd in lost:  # as the kernel does
                self._real["close"](fd)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not self._is_mine(name, arguments, options):
                return self._real[name](*arguments, **options)
            if name == "close":
                return self._close(arguments[0])
            if self.is_dead:
                raise Killed
            changes = name != "open" or self._is_creation(arguments, options)
            if changes:
                self._count("before", name, arguments)
            result = self._do(name, arguments, options)
            if changes:
                self.made += [self.operations] if self._gives_a_lasting_name(name, arguments, options) else []
                self._count("after", name, arguments)
            return result

        return call

    def _is_mine(self, name: str, arguments: Any, options: Any) -> bool:
        if name in ("write", "pwrite", "ftruncate", "fsync", "close"):
            return arguments[0] in self._path_of
        return self._path(arguments[0], options).startswith(self._root)

    def _path(self, path: Any, options: Any) -> str:
        inside = options.get("dir_fd")
        name = os.fspath(path) if not isinstance(path, int) else self._path_of.get(path, "")
        return f"{self._path_of.get(inside, '')}/{name}" if inside is not None else name

    def _is_creation(self, arguments: Any, options: Any) -> bool:
        return bool(arguments[1] & os.O_CREAT) and not os.path.lexists(self._path(arguments[0], options))

    def _gives_a_lasting_name(self, name: str, arguments: Any, options: Any) -> bool:
        path = self._path(arguments[0], options) if name in ("open", "mkdir") else ".tmp"
        return not path.endswith((".tmp", ".partial")) and ".partial/" not in path

    def _count(self, moment: str, name: str, arguments: Any) -> None:
        if moment == "before":
            self.operations += 1
            if name in ("write", "pwrite"):
                self.written.add(self.operations)
            if name == "fsync" and self._before_sync is not None:
                self._intrude(self._before_sync)
        if self.operations != self._stop_at or self.is_dead:
            return
        if self._moment == "intrude" and moment == "before":
            self._intrude(self._on_intrude)
        elif self._moment == "half" and name in ("write", "pwrite") and moment == "before":
            part = bytes(arguments[1])[: len(arguments[1]) // 2]
            self._do(name, (arguments[0], part, *arguments[2:]), {})
            self._die()
        elif self._moment == moment or (self._moment == "half" and moment == "after"):
            self._die()

    def _die(self) -> None:
        self.is_dead = True
        raise Killed

    def _intrude(self, act: Callable[[], None]) -> None:
        wrapped = {name: getattr(os, name) for name in WRITERS}
        for name, real in self._real.items():
            setattr(os, name, real)
        try:
            act()
        finally:
            for name, call in wrapped.items():
                setattr(os, name, call)

    def _close(self, fd: int) -> None:
        del self._path_of[fd]
        self._real["close"](fd)

    def _do(self, name: str, arguments: Any, options: Any) -> Any:
        if name == "fsync":  # takes effect in the image below; the real one would only cost time
            return self._record(name, self._path_of[arguments[0]], arguments)
        path = "" if isinstance(arguments[0], int) else self._path(arguments[0], options)
        is_new = name == "open" and self._is_creation(arguments, options)
        result = self._real[name](*arguments, **options)
        if name == "open":
            self._path_of[result] = path
            (self._writable.add if arguments[1] & WRITING else self._writable.discard)(result)
            if is_new or arguments[1] & os.O_TRUNC:
                self._record("create" if is_new else "ftruncate", path, (0, 0))
        else:
            self._record(name, path or self._path_of[arguments[0]], arguments)
        return result

    # What a power loss leaves

    def image(self, chance: random.Random, target: Path) -> None:
        """Write what would be found after losing power now."""
        names = dict(self._names)
        for changes in self._changes.values():
            for kind, path, inode in changes[: chance.randint(0, len(changes))]:
                self._apply(names, kind, path, inode)
        for path in sorted(names):
            at = target / path[len(self._root) + 1 :]
            if not at.parent.is_dir():
                continue  # a name in a directory that was lost with its own
            inode = names[path]
            if inode is None:
                at.mkdir()
            else:
                at.write_bytes(self._remains(inode, chance))

    def _remains(self, inode: Inode, chance: random.Random) -> bytes:
        done = chance.randint(0, len(inode.writes))
        content = inode.after(done)
        if done < len(inode.writes) and inode.writes[done][0] == "append":
            data = inode.writes[done][1]
            torn = data[: chance.randint(0, len(data))]
            content += torn if chance.random() < 0.7 else bytes(len(torn))  # a size without its data
        return content

    def _take_stock(self, root: Path) -> None:
        for path in (*root.rglob("*"),):
            self._names[str(path)] = None if path.is_dir() else Inode(path.read_bytes())
        self._now = dict(self._names)

    def _record(self, name: str, path: str, arguments: Any) -> None:
        if not self._loses_power:
            return
        inode = self._now.get(path)
        if name in ("write", "pwrite") and inode is not None:
            if name == "pwrite" and arguments[2]:
                raise AssertionError("a record is written somewhere else than at an end")
            inode.writes.append(("append", bytes(arguments[1])))
        elif name == "ftruncate" and inode is not None:
            inode.writes.append(("cut", arguments[1]))
        elif name == "fsync":
            self._sync(path, inode)
        elif name == "create":
            self._change("add", path, Inode())
        elif name == "mkdir":
            self._change("add", path, None)
        elif name in ("unlink", "rmdir"):
            self._change("remove", path, None)
        elif name in ("replace", "rename"):
            self._move(path, os.fspath(arguments[1]))

    def _sync(self, path: str, inode: Inode | None) -> None:
        if inode is not None:
            inode.synced, inode.writes = inode.after(len(inode.writes)), []
        else:
            for kind, changed, what in self._changes.pop(path, []):
                self._apply(self._names, kind, changed, what)

    def _move(self, old: str, new: str) -> None:
        inside = {p: i for p, i in self._now.items() if p.startswith(old + "/")}
        inode = self._now[old]
        self._changes.setdefault(new.rpartition("/")[0], []).append((f"move {old}", new, inode))
        self._apply(self._now, f"move {old}", new, inode)
        for path in inside:  # what is not synced below a directory goes with it
            moved = new + path[len(old) :]
            if path in self._changes:
                self._changes[moved] = self._changes.pop(path)
        if old in self._changes:
            self._changes[new] = [
                (kind, new + path[len(old) :], i) for kind, path, i in self._changes.pop(old)
            ]

    def _change(self, kind: str, path: str, inode: Inode | None) -> None:
        self._changes.setdefault(path.rpartition("/")[0], []).append((kind, path, inode))
        self._apply(self._now, kind, path, inode)

    @staticmethod
    def _apply(names: dict[str, Inode | None], kind: str, path: str, inode: Inode | None) -> None:
        if kind == "remove":
            names.pop(path, None)
        elif kind == "add":
            names[path] = inode
        else:
            old = kind.removeprefix("move ")
            for below in [p for p in names if p == old or p.startswith(old + "/")]:
                names[path + below[len(old) :]] = names.pop(below)
            if inode is not None:
                names[path] = inode
