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


def score(
    completion: str,
    prompt: Prompt,
    *,
    notes: str = "",
    gate: str = "",
    wait_s: float = 0.0,
    only: int = 0,
    is_bound: bool = False,
) -> float | Score:
    """Take some time before somebody has made a file `gate`; fail in any process but `only`."""
    if notes := notes or os.environ.get("NOTES", ""):
        with Path(notes).open("a") as file:
            file.write(f"{os.getpid()}\n")
    if only not in (0, os.getpid()):
        raise ValueError("a reward of mine")
    if wait_s and not (gate and Path(gate).exists()):
        time.sleep(wait_s)
    reward = float(completion == prompt.answer) + len(completion) / 100
    return Score(Bound(reward)) if is_bound else reward
