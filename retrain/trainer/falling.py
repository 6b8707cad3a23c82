"""Whether an evaluation falls while the reward rises: a sign that the policy exploits its reward."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from retrain.records.row_parts import EvalWatch
from retrain.trainer.evaluation import standard_error

WINDOW = 10  # steps whose mean reward is that of an evaluation's policy
CERTAIN = 3.0  # standard errors: the best of many evaluations is partly luck


@dataclass(frozen=True)
class Seen:
    """An evaluation: each question's mean reward, and the training reward before it."""

    step: int
    scores: Mapping[str, float]  # by question; a text, since checkpoints are JSON
    reward: float  # mean of the last steps

    @property
    def score(self) -> float:
        return float(np.mean(list(self.scores.values())))


class Falling:
    """Compares each evaluation with the best one before it, question by question."""

    def __init__(self) -> None:
        self._rewards: deque[float] = deque(maxlen=WINDOW)
        self._best: dict[str, Seen] = {}
        self._falling: dict[str, str] = {}

    def trained(self, reward: float) -> None:
        """Take the mean reward of a step; the first one is that of the policy before all steps."""
        if not self._rewards:
            self._best = {name: replace(start, reward=reward) for name, start in self._best.items()}
        self._rewards.append(reward)

    def evaluated(self, name: str, step: int, scores: Mapping[int, float]) -> None:
        """Take an evaluation, of the policy after the last step."""
        reward = float(np.mean(self._rewards)) if self._rewards else 0.0
        now = Seen(step, {str(question): score for question, score in scores.items()}, reward)
        best = self._best.setdefault(name, now)
        self._falling.pop(name, None)
        if now.score >= best.score:
            self._best[name] = now
        elif now.reward > best.reward and _is_worse(now, best):
            self._falling[name] = (
                f"{name} fell from a reward of {best.score:.2f} at step {best.step} "
                f"to {now.score:.2f} at step {step}"
            )

    def watch(self) -> EvalWatch:
        """Return the evaluations that fall, in words."""
        return EvalWatch(falling="; ".join(self._falling.values()))

    def state_dict(self) -> dict[str, Any]:
        """Return what is known so far, as JSON takes it."""
        best = {name: asdict(seen) for name, seen in self._best.items()}
        return {"rewards": list(self._rewards), "best": best, "falling": self._falling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rewards = deque(state["rewards"], maxlen=WINDOW)
        self._best = {name: Seen(**seen) for name, seen in state["best"].items()}
        self._falling = dict(state["falling"])


def _is_worse(now: Seen, best: Seen) -> bool:
    """Whether the questions that both had cannot explain the difference by chance."""
    gains = np.array([score - best.scores[q] for q, score in now.scores.items() if q in best.scores])
    error = standard_error(gains)
    return error is not None and bool(np.mean(gains) < -CERTAIN * error)
