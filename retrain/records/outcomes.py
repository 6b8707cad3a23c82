"""evals/<name>.jsonl: the rewards of one evaluation, a line per question and step.

A line is `{"step": 20, "attempt": 1, "question": 7, "rewards": [1, 0, null]}`: the id of a held-out prompt,
and the reward of each of its samples; null if it was not scored. A resumed run repeats steps, whose last
lines count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from retrain.records.files import make_directory
from retrain.records.lines import LineAppender, dump_line, parse_line
from retrain.records.samples import latest_lines

Rewards: TypeAlias = Mapping[int, Sequence[float | None]]  # by question


class OutcomesWriter:
    """Append the outcomes of one attempt; only for the holder of the run's lock."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Set up; the folder and the file of each evaluation are made when there are outcomes for them."""
        self._folder, self._attempt = folder, attempt
        self._files: dict[str, LineAppender] = {}

    def append(self, name: str, step: int, rewards: Rewards) -> None:
        """Write all questions of an evaluation after a step."""
        if name not in self._files:
            make_directory(self._folder)
            self._files[name] = LineAppender(self._folder / f"{name}.jsonl")
        start = {"step": step, "attempt": self._attempt}
        lines = [
            dump_line({**start, "question": question, "rewards": [_short(one) for one in found]})
            for question, found in rewards.items()
        ]
        self._files[name].write("\n".join(lines))

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def read_outcomes(path: Path) -> dict[int, Rewards]:
    """Read the rewards of each step's questions, also after crashes; empty if there is no file."""
    found: dict[int, dict[int, Sequence[float | None]]] = {}
    for step, _, line in latest_lines(path):
        row = parse_line(line) or {}
        question, rewards = row.get("question"), row.get("rewards")
        if isinstance(question, int) and isinstance(rewards, list):
            found.setdefault(step, {})[question] = [_number(one) for one in rewards]
    return dict(found)


def _short(reward: float | None) -> float | None:
    """Return a whole number without a decimal point."""
    return int(reward) if reward is not None and float(reward).is_integer() else reward


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]
