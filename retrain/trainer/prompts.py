"""The order of a run's training prompts: what its curriculum chooses, and what is put back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from retrain.base import registry
from retrain.base.errors import RunFailedError
from retrain.base.rollouts import Floats, Prompt
from retrain.base.user_code import located
from retrain.control.rules import StateDict
from retrain.plugins.curricula import Curriculum
from retrain.records.step_row import CurriculumSummary

BINS = 10  # of predicted success rates


class Draw(NamedTuple):
    """A prompt that is to be trained on, once."""

    number: int  # of all draws of the run, from 0
    position: int  # of the prompt, among those to train on


class PromptStream:
    """Endless draws of training prompts, for batches of any size.

    The state is the number of draws, those to take again, and the curriculum's.
    """

    def __init__(self, prompts: Sequence[Prompt], curriculum: Curriculum, name: str = "shuffle") -> None:
        self._prompts, self._curriculum, self._name = prompts, curriculum, name
        self._drawn = 0
        self._again: list[Draw] = []
        self.state_dict()  # what cannot be saved fails before the first step

    def draw(self, count: int) -> list[Draw]:
        """Return the next draws, those put back first."""
        repeated, self._again = self._again[:count], self._again[count:]
        if not (lacking := count - len(repeated)):
            return repeated
        start = self._drawn
        self._drawn += lacking
        return [*repeated, *(Draw(start + n, p) for n, p in enumerate(self._chosen(lacking)))]

    def put_back(self, draws: Iterable[Draw]) -> None:
        """Queue prompts to be drawn again before any others."""
        self._again = sorted({*self._again, *draws})

    @property
    def due(self) -> int:
        """How many were put back, which are drawn before any others."""
        return len(self._again)

    def at(self, draw: Draw) -> Prompt:
        return self._prompts[draw.position]

    def observe(self, draws: Sequence[Draw], rewards: Floats) -> CurriculumSummary | None:
        """Tell the curriculum of a step; return what it predicted beside what was seen, if it predicts.

        Args:
            rewards: of shape (draws, rollouts), NaN where unscored.
        """
        positions = [draw.position for draw in draws]
        predicted = self._asked("predict", positions)
        scored = np.flatnonzero(~np.isnan(rewards).all(axis=1))
        summary = None
        if predicted is not None and len(scored):
            seen = np.nanmean(self._asked("success", rewards[scored]), axis=1)
            summary = _calibration(np.asarray(predicted, dtype=np.float64)[scored], seen)
        self._asked("observe", positions, rewards)
        return summary

    def state_dict(self, under_way: Iterable[Draw] = ()) -> StateDict:
        """Return the state in which what is under way was put back."""
        state = self._asked("state_dict")
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise self._failed(f"has a state that cannot be saved: {error}; needs what JSON takes") from error
        again = [list(draw) for draw in sorted({*self._again, *under_way})]
        return {"drawn": self._drawn, "again": again, "curriculum": state}

    def load_state_dict(self, state: StateDict) -> None:
        self._drawn, self._again = int(state["drawn"]), [Draw(*draw) for draw in state["again"]]
        self._asked("load_state_dict", state["curriculum"])

    def _chosen(self, count: int) -> list[int]:
        """Return the curriculum's choice, checked."""
        choice = self._asked("choose", count)
        try:
            positions = [int(p) for p in choice if isinstance(p, Integral)]
            is_whole = len(positions) == len(choice)
        except TypeError:
            is_whole = False
        if not is_whole:
            raise self._failed(f"chose {choice!r:.80}; needs a list of {count} positions")
        if len(positions) != count:
            raise self._failed(f"chose {len(positions)} prompts; {count} were asked for")
        size = len(self._prompts)
        if unknown := [p for p in positions if not 0 <= p < size]:
            raise self._failed(f"chose position {unknown[0]}; there are {size} prompts, from 0 to {size - 1}")
        if not self._curriculum.repeats and count <= size and len(set(positions)) < count:
            twice = next(p for n, p in enumerate(positions) if p in positions[:n])
            raise self._failed(f"chose position {twice} twice; set `repeats = True` if that is meant")
        return positions

    def _asked(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._curriculum, method)(*arguments)
        except Exception as error:
            if registry.is_built_in("curricula", self._name):
                raise
            raise self._failed(f"failed in {method}: {located(error)}") from error

    def _failed(self, what: str) -> RunFailedError:
        return RunFailedError(f"[data].curriculum: {self._name!r} {what}")


def _calibration(predicted: Floats, seen: Floats) -> CurriculumSummary:
    """Return predicted success rates beside those that were seen, in all and by bins of the former."""
    bins: dict[str, list[float]] = {}
    for expected, rate in sorted(zip(predicted.tolist(), seen.tolist(), strict=True)):
        bins.setdefault(f"{min(int(expected * BINS), BINS - 1) * 100 // BINS:02}", []).append(rate)
    return CurriculumSummary(
        predicted=float(predicted.mean()),
        seen=float(seen.mean()),
        prompts={name: len(rates) for name, rates in bins.items()},
        solved={name: sum(rates) / len(rates) for name, rates in bins.items()},
    )


def open_stream(prompts: Sequence[Prompt], name: str, params: Mapping[str, Any], seed: int) -> PromptStream:
    """Return the draws of a run whose `[data]` names a curriculum."""
    curriculum = registry.find_plugin("curricula", name)(prompts, seed=seed, **params)
    return PromptStream(prompts, registry.check_made("curricula", name, curriculum), name)
