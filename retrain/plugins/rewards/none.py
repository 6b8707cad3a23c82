"""No reward: completions are not judged, and a run learns from its teacher alone."""

from __future__ import annotations

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Score

RANGE = (0.0, 1.0)


def score(completion: str, prompt: Prompt) -> Score:
    """Return a score without a value, whatever the completion is."""
    return Score(None, message='reward = "none"', is_unjudged=True)
