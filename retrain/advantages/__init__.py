"""Advantages: how much better each rollout is than its group's baseline.

A plugin is one file with `estimate(rewards, *, <params>) -> advantages`, both of shape
(prompts, rollouts). A group whose advantages are all zero carries no signal.
"""

from __future__ import annotations

from typing import Any, Protocol

from retrain.rollouts import Floats


class Advantage(Protocol):
    """Rewards (prompts, rollouts) -> advantages of the same shape."""

    def __call__(self, rewards: Floats, **params: Any) -> Floats: ...
