"""What several tests of the Slurm launcher start from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from retrain.campaign.launchers import Assignment


def assignment(directory: Path, runs: int = 3, **changes: object) -> Assignment:
    """Return what a launcher is opened for: so many runs, all at a time."""
    named = {f"r{n}": directory / "runs" / f"r{n}" for n in range(runs)}
    plain = Assignment(directory.name, directory, named, workers=runs, permits=None, where=Path("/"))
    return replace(plain, **changes)  # type: ignore[arg-type]


def submitted_before(given: Assignment) -> Assignment:
    """Leave what an earlier submission wrote, by which a launcher finds its tasks without asking Slurm."""
    home = given.directory / "slurm"
    home.mkdir(parents=True, exist_ok=True)
    (home / "name.json").write_text(json.dumps({"name": given.campaign}))
    return given


def command(directory: Path, name: str, script: str) -> str:
    """Make a command of Slurm's; gives the PATH on which it is found."""
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def squeue(directory: Path, *tasks: str) -> str:
    """Make a squeue that lists these tasks; gives the PATH on which it is found."""
    (directory / "queue").write_text("\n".join(tasks))
    return command(directory, "squeue", f'cat "{directory}/queue"')


def expand(text: str) -> set[int]:
    """Read indices as Slurm does: 0-3,7."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
