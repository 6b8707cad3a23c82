"""A reward that any process may give, which writes down which one did."""

from __future__ import annotations

import os
import time
from pathlib import Path

from retrain import Prompt, Score

PURE = True


class Bound(float):
    """A number that stays in its process."""

    def __reduce__(self) -> str:
        raise TypeError("a number of mine")


def rows_below(logs: Path) -> int:
    """Return how many rows runs have written, those of steps that were taken again included."""
    return sum(file.read_bytes().count(b"\n") for file in logs.glob("*/runs/*/metrics.jsonl"))


def let_have(gate: Path, rows: int) -> None:
    """Let runs have so many rows."""
    written = gate.with_suffix(".written")
    written.write_text(str(rows))
    written.replace(gate)


def score(
    completion: str,
    prompt: Prompt,
    *,
    notes: str = "",
    logs: str = "",
    gate: str = "",
    wait_s: float = 0.0,
    only: int = 0,
    is_bound: bool = False,
) -> float | Score:
    """Take some time, and wait while runs below `logs` have all rows that `gate` lets them have.

    Fail in any process but `only`.
    """
    if notes := notes or os.environ.get("NOTES", ""):
        with Path(notes).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if only not in (0, os.getpid()):
        raise ValueError("a reward of mine")
    time.sleep(wait_s)
    while gate and rows_below(Path(logs)) >= int(Path(gate).read_text()):
        time.sleep(0.01)
    reward = float(completion == prompt.answer) + len(completion) / 100
    return Score(Bound(reward)) if is_bound else reward
