"""Which file systems cannot count permits, because their locks are not shared or not reliable."""

from __future__ import annotations

import re
from pathlib import Path

_NETWORK = "locks there depend on a lock service that can forget them, or keep a dead host's locks forever"
_PRIVATE = "each machine or container may keep its own locks there, so permits could be given out twice"
_REASONS = dict.fromkeys(("9p", "afs", "beegfs", "fuse", "vboxsf", "virtiofs"), _PRIVATE)
_REASONS |= dict.fromkeys(("cifs", "nfs", "nfs4", "smb2", "smb3", "smbfs"), _NETWORK)
MOUNTINFO = Path("/proc/self/mountinfo")


def lock_sharing_problem(directory: Path | str, mountinfo: str | None = None) -> str | None:
    """Return why locks in a directory are not reliable; None if they are, or if nothing is known.

    Args:
        directory: need not exist yet.
        mountinfo: the mount table, as in proc_pid_mountinfo(5); by default this process's mount table.
            Systems without one (macOS) have no known problem.
    """
    if mountinfo is None:
        if not MOUNTINFO.exists():
            return None
        mountinfo = MOUNTINFO.read_text(encoding="utf-8", errors="surrogateescape")
    place = Path(directory).resolve()
    mount_point, kind, options = _mount_of(place, mountinfo)
    reason = _REASONS.get("fuse" if kind.startswith("fuse.") else kind)
    if kind == "lustre" and "flock" not in options:
        reason = "it is mounted without the option flock, so locks are private or refused"
    if reason is None:
        return None
    return f"{place}: on a {kind} file system (mounted at {mount_point}); {reason}"


def _mount_of(place: Path, mountinfo: str) -> tuple[Path, str, list[str]]:
    """Return the mount point, type and options; of stacked mounts, the last one counts."""
    best = (Path("/"), "unknown", list[str]())
    for line in mountinfo.splitlines():
        mount, _, filesystem = line.partition(" - ")
        fields, tail = mount.split(" "), filesystem.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        point = Path(_unescaped(fields[4]))
        if place.is_relative_to(point) and len(point.parts) >= len(best[0].parts):
            best = (point, tail[0], tail[2].split(","))
    return best


def _unescaped(field: str) -> str:
    """Undo the kernel's octal escapes of space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
