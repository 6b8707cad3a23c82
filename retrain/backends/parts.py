"""A step in parts of whole prompt groups, whose gradients tell noise from signal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from retrain.rollouts import TrainingSample


def split_by_group(samples: Sequence[TrainingSample], parts: int) -> list[list[TrainingSample]]:
    """Cut samples into at most `parts` of nearly equal numbers of whole prompt groups."""
    groups: dict[int, list[TrainingSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    members = list(groups.values())
    count = min(max(parts, 1), len(members))
    cuts = [round(number * len(members) / count) for number in range(count + 1)]
    return [[sample for group in members[start:end] for sample in group] for start, end in pairwise(cuts)]


def group_counts(parts: Sequence[Sequence[TrainingSample]]) -> list[int]:
    """Return how many prompt groups each part holds."""
    return [len({sample.group for sample in part}) for part in parts]


def scale_to_step(squares: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Make squared norms of n parts, whose sum is the step's gradient, comparable with the step's.

    A part with the share w of the groups is w times its own mean gradient. Its squared norm over
    w^2 is that of the mean; times n w, a part of unequal size counts by its size, which keeps the
    estimates of `GradientNoiseScale` unbiased.

    Args:
        squares: of each part's gradient.
        counts: groups in each part.
    """
    total = len(counts) * sum(counts)
    return [square * total / count for square, count in zip(squares, counts, strict=True)]
