"""Processes by what is in their environment, read from /proc, which is looked at again and again."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path


def running(program: str = "") -> Iterator[int]:
    """List the processes, or those whose command line has a word."""
    wanted = program.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and wanted in _read(entry / "cmdline"):
            yield int(entry.name)


def command_of(pid: int) -> list[str]:
    """Return a process's command line; nothing if it has ended."""
    return _read(Path(f"/proc/{pid}/cmdline")).decode(errors="replace").split("\0")


def environment_of(pid: int) -> list[str]:
    """Return a process's variables as NAME=VALUE; nothing if it has ended."""
    return _read(Path(f"/proc/{pid}/environ")).decode(errors="replace").split("\0")


def kill(pids: Iterable[int]) -> None:
    """End processes at once; those that have ended are skipped."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_together(pids: Collection[int]) -> None:
    """End processes as a power cut does: none of them lives to report the end of another."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    kill(pids)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
