"""How much of a difference's variance comes from seeds, from questions, and from both together."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.base.rollouts import Floats


@dataclass(frozen=True)
class VarianceComponents:
    """Variances of one cell of a layout of seeds x questions: by its row, its column, and what is left."""

    seeds: float
    questions: float
    rest: float
    square_of_seeds: float  # the mean squares that they are computed from
    square_of_questions: float

    def of_a_seed(self, questions: int) -> float:
        """Return the variance between seeds that all answer the same so many questions."""
        return self.seeds + self.rest / questions


def variance_components(gains: Floats) -> VarianceComponents:
    """Return the variance components of differences of shape (seeds, questions), at least two each.

    Every seed answers every question, once or as a mean over samples, and both are random draws. Estimates
    that come out below 0 are 0.

    Source: Searle, Casella and McCulloch 1992, Variance Components: the two-way layout without replication.
    """
    seeds, questions = gains.shape
    by_seed, by_question = gains.mean(axis=1), gains.mean(axis=0)
    residuals = gains - by_seed[:, None] - by_question[None, :] + gains.mean()
    rest = float((residuals**2).sum()) / ((seeds - 1) * (questions - 1))
    of_seeds = questions * float(by_seed.var(ddof=1))
    of_questions = seeds * float(by_question.var(ddof=1))
    return VarianceComponents(
        max(0.0, of_seeds - rest) / questions,
        max(0.0, of_questions - rest) / seeds,
        rest,
        of_seeds,
        of_questions,
    )
