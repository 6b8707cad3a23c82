"""Which commit an experiment's directory is at: provenance, asked of git and never required."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 5.0  # a huge or remote work tree must not hold up a campaign


@dataclass(frozen=True)
class GitState:
    """Commit of a work tree, and whether tracked files differ from it."""

    commit: str
    is_dirty: bool


def git_state(directory: Path) -> GitState | None:
    """Ask git; None outside a repository, without git, or if it takes too long."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no") if commit else None
    return GitState(commit.strip(), bool(changes.strip())) if commit and changes is not None else None


def _git(directory: Path, *arguments: str) -> str | None:
    import subprocess  # not at the top: costs 8 ms, and readers of a manifest never need it

    # No optional locks: a look at a repository must not get into the way of somebody's commit.
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
