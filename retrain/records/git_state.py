"""The git state of a work tree, for provenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 5.0  # a huge or remote work tree must not hold up a campaign


@dataclass(frozen=True)
class GitState:
    """State of a work tree."""

    commit: str
    is_dirty: bool  # whether tracked files differ from it

    def __str__(self) -> str:
        return self.commit + " (with uncommitted changes)" * self.is_dirty


def git_state(directory: Path) -> GitState | None:
    """Return a directory's git state; None outside a repository, without git, or if git takes too long."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no") if commit else None
    return GitState(commit.strip(), bool(changes.strip())) if commit and changes is not None else None


def _git(directory: Path, *arguments: str) -> str | None:
    import subprocess  # not at the top: costs 8 ms, and readers of a manifest never need it

    # without optional locks, because reading a repository must not block a commit
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None
