"""Scores an answer with reasoning-gym's own rules, in a separate process that may be killed."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from retrain.extras import load
from retrain.rewards import UnscoredError
from retrain.rewards.boxed import last_boxed
from retrain.rollouts import Prompt

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

_library = load("reasoning_gym", "reasoning-gym", "reasoning_gym")


def check(completion: str, prompt: Prompt) -> float:
    """Return reasoning-gym's score of the final answer, 0 to 1.

    Raises:
        UnscoredError: the prompt does not identify an entry.
    """
    try:
        pointer = json.loads(prompt.answer)
        source = json.dumps([pointer["dataset"], pointer["config"]])
        entry = _dataset(source)[pointer["index"]]
    except (ValueError, LookupError, TypeError) as error:
        raise UnscoredError(f"prompt {prompt.id} names no entry of reasoning-gym: {error!r}") from error
    return float(_dataset(source).score_answer(final_answer(completion), entry))


def final_answer(completion: str) -> str:
    r"""Return the content of the last `\boxed{...}`, else of the last `<answer>`, else the whole text."""
    tagged = TAGGED.findall(completion)
    boxed = last_boxed(completion)
    if boxed is not None:
        return boxed
    return str(tagged[-1]).strip() if tagged else completion.strip()


@cache
def _dataset(source: str) -> Any:
    name, config = json.loads(source)
    return _library.create_dataset(name, **config)
