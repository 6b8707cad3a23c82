"""A penalty for long completions, in tokens: a part of `weighted` beside one that tells right from wrong.

```toml
[reward.params.parts]
math = 1.0

[reward.params.parts.length]
weight = 0.5
params = { max_tokens = 1024, cache = 256 }
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain.base.registry import Count
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, score_with

RANGE = (-1.0, 0.0)
PURE = True


def open_scorer(*, max_tokens: Count, cache: Count) -> BatchScorer:
    """Score 0 up to max_tokens - cache tokens, then fall evenly to -1 at max_tokens, and -1 beyond.

    Args:
        max_tokens: at most that of [training], or nothing reaches it. The tokens of an episode are those of
            all turns, and what the policy read between them.
        cache: number of tokens over which the penalty grows.

    Source: soft overlong punishment of DAPO, arXiv:2503.14476.
    """
    return LengthScorer(max_tokens, cache)


score = score_with(open_scorer)


def check_params(params: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the parameters."""
    if params["cache"] > params["max_tokens"]:
        yield f"cache: got {params['cache']}; needs at most max_tokens, {params['max_tokens']}"


class LengthScorer(BatchScorer):
    """Counts tokens."""

    def __init__(self, max_tokens: int, cache: int) -> None:
        self._max_tokens, self._cache = max_tokens, cache

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> Score:
        if answer.completion and not answer.tokens:
            return Score(None, Outcome.ERROR, "its tokens are not known", is_unjudged=True)
        spare = self._max_tokens - len(answer.tokens)
        return Score(min(0.0, max(-1.0, spare / self._cache - 1.0)))
