"""GTPO, then more credit for planning tokens (what to do next) than for execution tokens (doing it).

A token is planning if its text overlaps a planning phrase; only the completion's text counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from retrain.base.registry import NotNegative
from retrain.base.rollouts import Floats, Rollout
from retrain.plugins.transforms import gtpo

# Phrases that open a step of reasoning, change its direction or review it.
PHRASES = tuple(
    "let me, let's, first, next, then, finally, wait, but, however, instead, alternatively, check, verify, "
    "therefore, so, because, suppose, consider, notice that, we need to".split(", ")
)


def reweigh(
    rollout: Rollout,
    advantage: float,
    progress: float,
    *,
    alpha: NotNegative = 0.2,
    beta: NotNegative = 0.1,
    planning_phrases: Sequence[str] = PHRASES,
) -> Floats:
    """Weigh as `gtpo` does, then give planning tokens A + alpha |A|.

    Amplifies the reward of a planning token and dampens its penalty, which keeps exploring plans.

    Args:
        alpha: extra credit of planning tokens, 0 or more; above 1, penalties become rewards.
        beta: as in `gtpo`.
        planning_phrases: phrases that mark planning tokens; whole words, any case.

    Source: hierarchy-aware credit assignment (HICRA), arXiv:2509.03646.
    """
    weighted = gtpo.reweigh(rollout, advantage, progress, beta=beta)
    planning = planning_mask(rollout, planning_phrases)
    return np.where(planning, weighted + alpha * np.abs(weighted), weighted)


def planning_mask(rollout: Rollout, phrases: Sequence[str]) -> NDArray[np.bool_]:
    """Return which tokens overlap a planning phrase: shape (tokens,).

    Matching ignores case and the kind and amount of white space between words; a phrase matches whole
    words only. A token without text (end of sequence) is not planning.
    """
    turns, pattern, offset = rollout.turns, _pattern(tuple(phrases)), 0
    covered = np.zeros(sum(map(len, turns)), dtype=np.int64)
    for text in turns:  # a phrase does not go on in another turn
        for match in pattern.finditer(text):
            start, end = match.span(1)
            covered[offset + start : offset + end] = 1
        offset += len(text)
    so_far = np.concatenate([[0], np.cumsum(covered)])
    ends = np.cumsum([len(piece) for piece in rollout.pieces], dtype=np.int64)
    starts = np.concatenate([[0], ends])[: ends.size]
    overlaps: NDArray[np.bool_] = so_far[ends] > so_far[starts]
    return overlaps


@lru_cache(maxsize=16)
def _pattern(phrases: tuple[str, ...]) -> re.Pattern[str]:
    """Match nothing at each word that starts a phrase; the longest such phrase is group 1.

    Matching the phrase itself would skip phrases that start inside it, such as "check" in "let me check".
    """
    longest_first = sorted(phrases, key=len, reverse=True)
    either = "|".join(r"\s+".join(map(re.escape, phrase.split())) for phrase in longest_first)
    return re.compile(rf"(?<!\w)(?=({either})(?!\w))" if phrases else r"(?!)()", re.IGNORECASE)
