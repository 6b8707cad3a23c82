r"""All or nothing: 1 for the answer, alone or in the last `\boxed{...}`, 0 for anything else."""

from __future__ import annotations

from retrain.rewards.boxed import last_boxed
from retrain.rollouts import Prompt

RANGE = (0.0, 1.0)


def score(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the completion, or the content of its last `\boxed{...}`, equals the answer as text.

    Surrounding whitespace is ignored. If the answer is boxed itself, its content is compared.
    """
    wanted = prompt.answer.strip()
    if completion.strip() == wanted:
        return 1.0
    boxed, wanted_boxed = last_boxed(completion), last_boxed(wanted)
    return float(boxed is not None and boxed == (wanted if wanted_boxed is None else wanted_boxed))
