"""Who a process id belongs to: ids are given out again, so an id alone proves nothing."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path

_START_TIME = 19  # field 22 of /proc/PID/stat, counted after the name, which may hold blanks and brackets


def start_mark(pid: int) -> str:
    """Return what no other process with this id has: when it started. "" if there is no such process.

    On Linux it counts from this boot and names the boot, so that setting the clock changes nothing.
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
    """Whether a process with this mark ran on this kernel since it was started; True if no mark tells.

    Machines of one host name are told apart by it, which names and ids in images that were copied are not.
    """
    boot, named, _ = mark.partition(":")
    return sys.platform != "linux" or not named or boot == boot_id()


@cache
def boot_id() -> str:
    """Return what names this boot of this machine; its host name where the system has no such id."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename
