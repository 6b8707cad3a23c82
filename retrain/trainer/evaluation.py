"""What an evaluation says about a policy: the chance that at least one of k tries is right."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def pass_at_k(correct: NDArray[np.bool_], k: int) -> float:
    """Estimate, without bias, the chance that at least one of k completions of a prompt is right.

    Args:
        correct: shape (prompts, samples), whether each completion is right.
        k: tries, from 1 to the number of samples.

    Returns:
        The mean over prompts of 1 - C(n - c, k) / C(n, k), for c right ones of n samples.

    Raises:
        ValueError: there are no prompts, or fewer samples than k.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1; the product keeps large n from overflowing.
    """
    prompts, samples = correct.shape
    if prompts == 0 or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} of {prompts} prompts with {samples} samples each; needs 1 <= k <= samples"
        )
    wrong = samples - np.count_nonzero(correct, axis=1)
    drawn = np.arange(k)  # the chance that k draws without replacement are all wrong
    all_wrong = np.prod(np.clip(wrong[:, None] - drawn, 0, None) / (samples - drawn), axis=1)
    return float(np.mean(1.0 - all_wrong))
