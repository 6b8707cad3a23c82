r"""reasoning-gym's own scoring, which accepts every correct answer and gives partial credit.

For `[data] task = "reasoning_gym"` with `answers = "entry"`. The final answer is the content of the last
`\boxed{...}`, else of the last `<answer>...</answer>`, else the whole completion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any

from retrain.base.extras import load
from retrain.base.registry import Positive, Workers
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import BatchScorer, UnscoredError, score_with
from retrain.plugins.rewards.match import last_boxed
from retrain.plugins.rewards.pool import VerifierScorer

EXTRA = "reasoning-gym"
PACKAGES = ("reasoning_gym",)
RANGE = (0.0, 1.0)
PURE = True
TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def open_scorer(*, timeout_s: Positive = 10.0, workers: Workers = 0) -> BatchScorer:
    """Score the final answer from 0 to 1; a prompt that identifies no entry leaves it unscored.

    Args:
        timeout_s: limit of one check, from its start.
        workers: number of checking processes; 0 is one per core.
    """
    check = f"{__name__}.open_check"
    return VerifierScorer(check, {}, workers=workers, timeout_s=timeout_s, is_factory=True)


score = score_with(open_scorer)


def open_check() -> Callable[[str, Prompt], float]:
    """Load reasoning-gym in a checking process; return the function that scores with its own rules."""
    library = load("reasoning_gym", EXTRA, "reasoning_gym")

    @cache
    def dataset(source: str) -> Any:
        name, config = json.loads(source)
        return library.create_dataset(name, **config)

    def check(completion: str, prompt: Prompt) -> float:
        try:
            pointer = json.loads(prompt.answer)  # as the task `reasoning_gym` writes it
            entries = dataset(json.dumps([pointer["dataset"], pointer["config"]]))
            entry = entries[pointer["index"]]
        except (ValueError, LookupError, TypeError) as error:
            raise UnscoredError(f"prompt {prompt.id} names no entry of reasoning-gym: {error!r}") from error
        return float(entries.score_answer(final_answer(completion), entry))

    return check


def final_answer(completion: str) -> str:
    r"""Return the content of the last `\boxed{...}`, else of the last `<answer>`, else the whole text."""
    tagged = TAGGED.findall(completion)
    boxed = last_boxed(completion)
    if boxed is not None:
        return boxed
    return str(tagged[-1]).strip() if tagged else completion.strip()
