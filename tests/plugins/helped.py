"""A reward that any process may give, with a process of its own until it is closed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from retrain import BatchScorer, Score, score_with
from retrain.plugins.rewards import Answer

PURE = True


class Helped(BatchScorer):
    """Writes down the number of its process."""

    def __init__(self, notes: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with notes.open("a") as file:
            file.write(f"{self.process.pid}\n")

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        time.sleep(0.01 * len(answers))  # else rank 0 scores alone
        return [Score(len(answer.completion) / 100) for answer in answers]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def open_scorer(*, notes: str) -> Helped:
    """Open it."""
    return Helped(Path(notes))


score = score_with(open_scorer)
