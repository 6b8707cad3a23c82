"""Identifies a process: ids are reused, so an id alone is not enough."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

_START_TIME = 19  # field 22 of /proc/PID/stat, counted after the name, which may contain blanks and brackets


def start_mark(pid: int) -> str:
    """Return a mark of when a process started, which no other process with this id has; "" without a process.

    On Linux it is relative to the boot and names the boot, so that setting the clock changes nothing.
    """
    if sys.platform == "linux":
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
            return f"{boot_id()}:{after_name.split()[_START_TIME]}"
        except (OSError, IndexError):
            return ""
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError):
        return ""


def is_of_this_boot(mark: str) -> bool:
    """Whether a process with this mark belongs to the current boot; True if the mark does not name one.

    This distinguishes machines with the same host name, and those made from copied images.
    """
    boot, named, _ = mark.partition(":")
    return sys.platform != "linux" or not named or boot == boot_id()


@cache
def boot_id() -> str:
    """Return the id of the current boot; the host name if the system has no such id."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename
