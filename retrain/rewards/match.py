"""All or nothing: 1 for the answer, 0 for anything else."""

from __future__ import annotations

from retrain.rollouts import Prompt


def score(completion: str, prompt: Prompt) -> float:
    """Give 1 if the completion is the answer, blanks around either put aside."""
    return float(completion.strip() == prompt.answer.strip())
