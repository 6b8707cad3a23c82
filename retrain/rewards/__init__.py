"""Rewards: how good a completion is, from its text alone.

A plugin is one file with `score(completion, prompt, *, <params>) -> float`. A reward of 1 or more
counts as correct.
"""

from __future__ import annotations

from typing import Any, Protocol

from retrain.rollouts import Prompt


class Reward(Protocol):
    """A completion's text and its prompt (with the answer) -> reward, finite; 1 = correct."""

    def __call__(self, completion: str, prompt: Prompt, **params: Any) -> float: ...
