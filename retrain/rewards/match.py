r"""All or nothing: 1 for the answer, alone or in the last `\boxed{...}`, 0 for anything else."""

from __future__ import annotations

from retrain.rewards.boxed import last_boxed
from retrain.rollouts import Prompt

RANGE = (0.0, 1.0)


def score(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the completion, or what its last `\boxed{...}` holds, is the answer as text.

    Blanks around either are put aside. An answer that is boxed itself counts by what it holds.
    """
    wanted = prompt.answer.strip()
    if completion.strip() == wanted:
        return 1.0
    boxed, wanted_boxed = last_boxed(completion), last_boxed(wanted)
    return float(boxed is not None and boxed == (wanted if wanted_boxed is None else wanted_boxed))
