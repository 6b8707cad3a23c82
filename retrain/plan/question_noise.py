"""What is worth more in an `[[eval]]`, more seeds or more questions: by the runs that are done."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import numpy as np

from retrain.base.rollouts import CORRECT, Floats
from retrain.control.rules.crossed import variance_components
from retrain.records.decision import HELD_OUT, MEASURE, QuestionNoise
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.samples import read_outcomes

ENOUGH = 6  # seeds; of three, every third shows by chance no variance of its own


def question_means(files: RunFiles, metric: str) -> dict[int, float]:
    """Return each question's mean in a run's last evaluation; {} if no record of questions tells it."""
    measure = MEASURE.search(metric) if metric.startswith(HELD_OUT) else None
    name = metric.removeprefix(HELD_OUT).removesuffix(measure[0]) if measure else ""
    if measure is None or measure["k"] or not name:
        return {}
    outcomes = readable(read_outcomes, files.evals / f"{name}.jsonl") or {}
    means = {}
    for question, rewards in outcomes[max(outcomes)].items() if outcomes else ():
        if scored := [reward for reward in rewards if reward is not None]:
            values = scored if measure[0] == "_reward" else [reward >= CORRECT for reward in scored]
            means[question] = statistics.fmean(values)
    return means


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
    if gains is None or len(gains) < ENOUGH:
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
