"""The software that results may depend on: installed versions, and the commit of the experiment."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "peft", "tinker")


@cache  # does not change during a process's life
def installed() -> str:
    """Return the versions of Python and the packages in `PACKAGES`, without importing them."""
    from importlib import metadata  # not at the top: costs 15 ms, and readers never need it

    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


_TIMEOUT_S = 5.0  # a huge or remote work tree must not hold up a campaign


@dataclass(frozen=True)
class GitState:
    """Commit of a work tree, and whether tracked files differ from it."""

    commit: str
    is_dirty: bool


def git_state(directory: Path) -> GitState | None:
    """Return a directory's git state; None outside a repository, without git, or if git takes too long."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no") if commit else None
    return GitState(commit.strip(), bool(changes.strip())) if commit and changes is not None else None


def _git(directory: Path, *arguments: str) -> str | None:
    import subprocess  # not at the top: costs 8 ms, and readers of a manifest never need it

    # No optional locks: reading a repository must not block a commit.
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None
