"""Shuffled epochs in which prompts whose groups tied the last times are skipped, most of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.base.registry import Fraction, Share
from retrain.base.rollouts import Floats, Prompt
from retrain.plugins.curricula import Curriculum
from retrain.plugins.curricula.epochs import Epochs

SCORED_LEAST = 2  # rollouts of a group that can tie


class Skip(Curriculum):
    """Takes a prompt that tied `n` times in a row with probability max(explore ** n, least)."""

    repeats = True

    def __init__(self, size: int, seed: int, explore: float, least: float) -> None:
        self._epochs = Epochs(size, seed)
        self._rng = np.random.default_rng([seed, size])
        self._explore, self._least = explore, least
        self._ties: dict[int, int] = {}  # in a row, by position; 0 is left out

    def choose(self, count: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < count:
            position = self._epochs.next()
            ties = self._ties.get(position, 0)
            if not ties or self._rng.random() < max(self._explore**ties, self._least):
                chosen.append(position)
        return chosen

    def observe(self, positions: Sequence[int], rewards: Floats) -> None:
        for position, group in zip(positions, rewards, strict=True):
            scored = group[~np.isnan(group)]
            if len(scored) < SCORED_LEAST:
                continue
            if scored.min() == scored.max():
                self._ties[position] = self._ties.get(position, 0) + 1
            else:
                self._ties.pop(position, None)

    def state_dict(self) -> dict[str, Any]:
        ties = [[position, ties] for position, ties in self._ties.items()]
        return {"epochs": self._epochs.state_dict(), "ties": ties, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epochs.load_state_dict(state["epochs"])
        self._ties = {position: ties for position, ties in state["ties"]}
        self._rng.bit_generator.state = state["rng"]


def open_curriculum(
    prompts: Sequence[Prompt], *, seed: int, explore: Fraction = 0.5, least: Share = 0.1
) -> Curriculum:
    """Return shuffled epochs that skip prompts whose rewards tied.

    Args:
        explore: a prompt that tied n times in a row is taken with probability explore ** n in each epoch.
        least: but never less likely than this, so that it is found when the policy has moved on.

    Source: GRESO, arXiv:2506.02177, with one rate of exploration for easy and hard prompts.
    """
    return Skip(len(prompts), seed, explore, least)
