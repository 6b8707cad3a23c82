"""Prompts that the policy solves about as often as is wanted, by a posterior of each one's success rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.base.registry import Fraction, Positive
from retrain.base.rollouts import Floats, Prompt
from retrain.plugins.curricula import Curriculum

KNOWN_LEAST = 8  # prompts from whose rates a prior is learned; before that, any rate is as likely
# correlation of a prompt's rollouts: one group outweighs a prior, and no prior is a point
ALIKE = (1 / 9, 0.9)


class Pool(Curriculum):
    """Keeps a Beta posterior of each prompt's success rate, whose counts halve every `half_life` steps.

    The prior is that of all prompts seen so far: where most are either mastered or unsolvable, so is, most
    likely, a prompt that was not seen, or whose counts have faded. A choice draws a rate from each posterior
    and takes the prompts whose rates are nearest to the target, so that what is unknown is tried as well. A
    share of each choice goes to those that waited longest.
    """

    def __init__(self, size: int, seed: int, target: float, half_life: float, floor: float) -> None:
        self._target, self._floor = target, floor
        self._keep = 0.5 ** (1.0 / half_life)  # of a count, per step
        self._rng = np.random.default_rng([seed, size])
        self._step = 0  # observed ones
        self._counts = np.zeros((size, 2))  # successes and failures, as of the step beside
        self._updated = np.zeros(size, dtype=np.int64)
        self._choices = 0
        self._chosen_at = np.zeros(size, dtype=np.int64)  # number of the last choice; 0: never
        self._due = 0.0  # prompts that the floor has not had yet

    def choose(self, count: int) -> list[int]:
        size = len(self._counts)
        whole, count = divmod(count, size)
        positions = [position for _ in range(whole) for position in self._rng.permutation(size).tolist()]
        self._choices += 1
        self._due += self._floor * count
        waited = min(int(self._due), count)
        self._due -= waited
        drawn = self._rng.beta(*self._posterior().T)
        order = np.lexsort((self._rng.random(size), self._chosen_at))  # those that waited longest first
        longest = order[:waited]
        distance = np.abs(drawn - self._target)
        distance[longest] = np.inf
        nearest = np.argsort(distance, kind="stable")[: count - waited]
        chosen = [*nearest.tolist(), *longest.tolist()]
        self._chosen_at[chosen] = self._choices
        return positions + chosen

    def observe(self, positions: Sequence[int], rewards: Floats) -> None:
        self._step += 1
        for position, group in zip(positions, self.success(rewards), strict=True):
            scored = group[~np.isnan(group)]
            self._counts[position] = self._faded([position])[0] + [scored.sum(), (1.0 - scored).sum()]
            self._updated[position] = self._step

    def predict(self, positions: Sequence[int]) -> Floats:
        successes, failures = self._posterior(positions).T
        return np.asarray(successes / (successes + failures))

    def state_dict(self) -> dict[str, Any]:
        seen, chosen = np.flatnonzero(self._updated), np.flatnonzero(self._chosen_at)
        return {
            "step": self._step,
            "choices": self._choices,
            "due": self._due,
            "rng": self._rng.bit_generator.state,
            "seen": [seen.tolist(), self._counts[seen].tolist(), self._updated[seen].tolist()],
            "chosen": [chosen.tolist(), self._chosen_at[chosen].tolist()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._choices, self._due = state["step"], state["choices"], state["due"]
        self._rng.bit_generator.state = state["rng"]
        seen, counts, updated = state["seen"]
        if seen:
            self._counts[seen], self._updated[seen] = counts, updated
        chosen, choices = state["chosen"]
        self._chosen_at[chosen] = choices

    def _faded(self, positions: Sequence[int] | slice) -> Floats:
        """Return the counts of prompts as they are worth now."""
        ages: NDArray[np.int64] = self._step - self._updated[positions]
        return np.asarray(self._counts[positions] * (self._keep**ages)[:, None])

    def _posterior(self, positions: Sequence[int] | slice = slice(None)) -> Floats:
        return np.asarray(self._prior() + self._faded(positions))

    def _prior(self) -> Floats:
        """Return the Beta prior whose mean and spread are those of the prompts' rates, by their moments."""
        counts = self._counts[self._counts.sum(axis=1) > 0]
        if len(counts) < KNOWN_LEAST:
            return np.ones(2)
        rollouts = counts.sum(axis=1)
        rates = counts[:, 0] / rollouts
        mean = (rates.sum() + 1.0) / (len(rates) + 2.0)
        of_sampling = float(np.mean(1.0 / rollouts))  # what rates of so few rollouts vary by in any case
        alike = (rates.var() / (mean * (1.0 - mean)) - of_sampling) / (1.0 - of_sampling)
        strength = 1.0 / np.clip(alike, *ALIKE) - 1.0
        return np.asarray(np.array([mean, 1.0 - mean]) * strength)


def open_curriculum(
    prompts: Sequence[Prompt],
    *,
    seed: int,
    target: Fraction = 0.5,
    half_life: Positive = 100.0,
    floor: Fraction = 0.1,
) -> Curriculum:
    """Return a pool that prefers prompts which are solved about as often as wanted.

    A reward counts as so much of a success, at least 0 and at most 1.

    Args:
        target: the success rate that is wanted; half teaches most, since groups then rarely tie.
        half_life: steps after which an observation counts half, because the policy has moved.
        floor: share of each choice for the prompts that waited longest, so that none starves.

    Source: MoPPS, arXiv:2507.04632, which has one prior for all prompts, and fades an observation with each
    further one of its prompt.
    """
    return Pool(len(prompts), seed, target, half_life, floor)
