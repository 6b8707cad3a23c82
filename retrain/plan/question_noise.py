"""What is worth more in an `[[eval]]`, more seeds or more questions; and how many questions decide."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations, islice

import numpy as np

from retrain.base.rollouts import CORRECT, Floats
from retrain.control.rules.crossed import variance_components
from retrain.plan.matrix import ENOUGH_SEEDS
from retrain.records.decision import LAST_PART, QuestionNoise, Questions, evaluation_of, evaluations_over
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.samples import read_outcomes
from retrain.records.windows import Window


def question_means(
    files: RunFiles, metric: str, first: int | None = None, window: Window = LAST_PART
) -> dict[int, float]:
    """Return each question's mean over a run's evaluations; {} if no record of questions tells it.

    Args:
        first: of how many questions, in the order in which they are asked; None: of all.
        window: whose evaluations count; by default the last one.
    """
    if not (name := evaluation_of(metric)):
        return {}
    outcomes = readable(read_outcomes, files.evals / f"{name}.jsonl") or {}
    steps = [max(outcomes)] if outcomes else []
    if window != LAST_PART:
        steps = evaluations_over(readable(read_metrics, files.directory) or (), outcomes, window)
    means: dict[int, list[float]] = {}
    for step in steps:
        for question, rewards in islice(outcomes[step].items(), first):
            if scored := [reward for reward in rewards if reward is not None]:
                values = scored if metric.endswith("_reward") else [reward >= CORRECT for reward in scored]
                means.setdefault(question, []).append(statistics.fmean(values))
    return {question: statistics.fmean(values) for question, values in means.items()}


def paired_gains(means: Mapping[tuple[str, str, int], Mapping[int, float]], reference: str) -> Floats | None:
    """Return differences from the reference, (seeds, questions), of the condition with the most pairs.

    Args:
        means: each question's mean, by campaign, condition and seed.
        reference: the condition that others are compared with.

    Returns:
        None below two seeds, or two questions that all their runs answered.
    """
    groups: dict[tuple[str, str], list[dict[int, float]]] = {}
    for (campaign, condition, seed), by_question in means.items():
        if condition != reference and (base := means.get((campaign, reference, seed))):
            common = by_question.keys() & base.keys()
            groups.setdefault((campaign, condition), []).append({q: by_question[q] - base[q] for q in common})
    most = max(groups.values(), key=len, default=[])
    questions = sorted(set.intersection(*map(set, most))) if most else []
    if len(most) < 2 or len(questions) < 2:
        return None
    return np.array([[gains[question] for question in questions] for gains in most])


def question_noise(gains: Floats | None) -> QuestionNoise | None:
    """Return what more questions and more seeds would remove; None below six seeds, or without variance."""
    if gains is None or len(gains) < ENOUGH_SEEDS:
        return None
    seeds, questions = gains.shape
    parts = variance_components(gains)
    of_seeds, of_questions, of_both = (
        parts.seeds / seeds,
        parts.questions / questions,
        parts.rest / gains.size,
    )
    variance = of_seeds + of_questions + of_both
    if variance <= (1e-12 * float(np.abs(gains).max())) ** 2:
        return None
    return QuestionNoise(
        seeds, questions, (of_seeds + of_both) / variance / 2, (of_questions + of_both) / variance / 2
    )


def chosen_questions(
    evaluation: str, seeds: Sequence[Sequence[Mapping[int, float]]], asked: int, most: int
) -> Questions:
    """Return how many questions are asked from now on, by the seeds that a campaign began with.

    Of a seed's difference d between two conditions, with its questions' differences d_q, the square of the
    mean has the expectation variance / questions + rest: the first part comes from the number of questions,
    the second from the seed, and from the true difference. Where the first is more than half of the whole, as
    many questions are asked as make it as small as the rest, with its estimates averaged over seeds and over
    all pairs of conditions.

    The test of a difference still errs with the same probability, whatever its distribution. If two
    conditions are equal, both orders of their values of a seed are equally likely, of all questions that it
    may ever be asked. The choice rests on the squares and variances of differences between all pairs: these
    are the same in either order, to the last bit. So among campaigns with the same choice both orders are
    equally likely too, and that is all that a test by signs assumes. What was asked before decides nothing
    else: values of different numbers of questions are never compared.

    Args:
        evaluation: its name.
        seeds: of each, the mean of each question, by condition.
        asked: how many questions there were.
        most: how many there may be.

    Returns:
        As many as before below six seeds at which all conditions have two questions in common.
    """
    squares, variances, counts = list[float](), list[float](), list[int]()
    for conditions in seeds:
        common = sorted(set.intersection(*map(set, conditions)))
        if len(common) < 2:
            continue
        means = np.array([[condition[question] for question in common] for condition in conditions])
        counts.append(len(common))
        for one, other in combinations(means, 2):
            gains = one - other
            squares.append(float(gains.mean()) ** 2)
            variances.append(float(gains.var(ddof=1)))
    if len(counts) < ENOUGH_SEEDS:
        return Questions(evaluation, asked, asked, None)
    square, variance = math.fsum(squares) / len(squares), math.fsum(variances) / len(variances)
    by_number = variance / statistics.fmean(counts)
    share = min(1.0, by_number / square) if square else float(variance > 0)
    count = asked
    if share > 0.5:
        rest = square - by_number
        count = max(asked, min(most, math.ceil(variance / rest)) if rest * most > variance else most)
    return Questions(evaluation, count, asked, share)
