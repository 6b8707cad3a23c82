"""The difference of two conditions in an `[[eval]]`, question by question.

All runs answer the same questions, so a difference has noise of three kinds: of seeds (another training run),
of questions (another sample of them), and of both, such as sampling. A difference per seed and question,
averaged over both, is a crossed layout with random effects; its mean squares give each variance.

Sources: Miller 2024, arXiv:2411.00640, for pairing and clustering by question; Searle, Casella and McCulloch
1992, Variance Components, for the two-way layout; Satterthwaite 1946, doi:10.2307/3002019, for the degrees of
freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from retrain.base.rollouts import CORRECT, Floats
from retrain.control.rules.crossed import variance_components
from retrain.control.rules.student import t_quantile
from retrain.records.decision import HELD_OUT, MEASURE
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.samples import read_outcomes
from retrain.records.windows import Window
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Side, is_counted
from retrain.results.report.statistics import LEVEL

FEWEST = 2  # seeds and questions: one has no spread
MOST = 10**6  # seeds or questions; more are as good as never


@dataclass(frozen=True)
class ByQuestion:
    """A difference over new seeds and new questions; second condition minus first."""

    seeds: int  # pairs
    questions: int  # that every run answered
    difference: float
    low: float  # 95 % interval
    high: float
    of_seeds: float  # share of the variance that more seeds alone would reduce
    of_questions: float  # share that more questions alone would reduce; more of either reduces the rest
    more_seeds: int | None  # that would halve the interval; None: no number does
    more_questions: int | None


def by_question(first: Side, second: Side, metric: str, window: Window) -> ByQuestion | None:
    """Return what the questions tell, of runs with outcomes; None unless most seeds are paired."""
    evaluated = MEASURE.search(metric) if metric.startswith(HELD_OUT) else None
    measure = evaluated[0] if evaluated else ""
    name = metric.removeprefix(HELD_OUT).removesuffix(measure) if measure else ""
    pairs = _pairs(first, second, window) if name else []
    if len(pairs) < FEWEST:
        return None
    questions, *others = (_questions(run, name) for pair in pairs for run in pair)
    if not questions or any(other != questions for other in others):
        return None
    by_pair = [[_values(run, name, measure, window) for run in pair] for pair in pairs]
    outcomes = [pair for pair in by_pair if all(pair)]
    if len(outcomes) < FEWEST:
        return None
    common = sorted(set.intersection(*map(set, chain.from_iterable(outcomes))))
    gains = [[after[q] - before[q] for q in common] for before, after in outcomes]
    return summarize(np.array(gains)) if len(common) >= FEWEST else None


def _pairs(first: Side, second: Side, window: Window) -> list[tuple[RunHistory, RunHistory]]:
    """Return the runs of the two conditions seed by seed; none unless most seeds have both."""
    before, after = (
        {run.seed: run for run in side.runs if is_counted(run, window)} for side in (first, second)
    )
    pairs = [(run, after[seed]) for seed, run in before.items() if seed is not None and seed in after]
    return pairs if 2 * len(pairs) > max(len(before), len(after)) else []


def summarize(gains: Floats) -> ByQuestion | None:
    """Summarize differences of shape (seeds, questions), at least two each; None if all are equal."""
    seeds, questions = gains.shape
    mean, components = float(gains.mean()), variance_components(gains)
    rest = components.rest
    squares = {"seeds": components.square_of_seeds, "questions": components.square_of_questions, "rest": rest}
    parts = components.seeds / seeds, components.questions / questions, rest / gains.size
    variance = sum(parts)
    if variance <= (1e-12 * float(np.abs(gains).max())) ** 2:
        return None
    half = math.sqrt(variance) * _t(squares, seeds, questions)
    goal = variance / 4
    return ByQuestion(
        seeds=seeds,
        questions=questions,
        difference=mean,
        low=mean - half,
        high=mean + half,
        of_seeds=parts[0] / variance,
        of_questions=parts[1] / variance,
        more_seeds=_more(components.of_a_seed(questions), goal - parts[1], seeds),
        more_questions=_more(components.questions + rest / seeds, goal - parts[0], questions),
    )


def _more(variance: float, goal: float, have: int) -> int | None:
    """Return how many more make the variance of one, over their number, as small as the goal."""
    needed = math.ceil(variance / goal) if goal > 0 else MOST
    return max(0, needed - have) if needed < MOST else None


def _t(squares: Mapping[str, float], seeds: int, questions: int) -> float:
    """Return Student's quantile with Satterthwaite's degrees of freedom, of the mean squares that count."""
    rest = (seeds - 1) * (questions - 1)
    terms = [(squares["seeds"], seeds - 1), (squares["questions"], questions - 1)]
    counted = [(square, freedom) for square, freedom in terms if square > squares["rest"]]
    if len(counted) != 1:
        counted.append((-squares["rest"] if counted else squares["rest"], rest))
    total = sum(square for square, _ in counted)
    freedom = total**2 / sum(square**2 / freedom for square, freedom in counted)
    if seeds == FEWEST:
        freedom = 1.0  # two seeds may be alike by chance: with more, the interval covers 83 % at worst
    return t_quantile((1 + LEVEL) / 2, freedom)


def _questions(run: RunHistory, name: str) -> tuple[Any, ...]:
    """Return what decides which questions an evaluation asks; empty if a run has none of this name."""
    tables: Sequence[Any] = run.config.get("eval", {}).get("tables", [])
    data = run.config.get("data", {})
    table = next((table for table in tables if table.get("name") == name), None)
    if table is None:
        return ()
    source = table if table.get("task") else data
    return source.get("task"), source.get("options"), data.get("seed"), table.get("prompts")


def _values(run: RunHistory, name: str, measure: str, window: Window) -> dict[int, float]:
    """Return each question's measure over a window, of those in all of its evaluations; {} without any."""
    outcomes = readable(read_outcomes, RunFiles(run.directory).evals / f"{name}.jsonl") or {}
    ends, steps = run.columns.reached(window.per), run.columns.steps.tolist()
    if ends is None:
        return {}
    values: dict[int, list[float]] = {}
    made = [row for row, step in enumerate(steps) if step in outcomes]
    counted = [steps[row] for row in window.evaluations(ends, made)]
    for question, rewards in chain.from_iterable(outcomes[step].items() for step in counted):
        scored = np.array([reward for reward in rewards if reward is not None])
        if (value := _measured(scored, measure)) is not None:
            values.setdefault(question, []).append(value)
    return {question: float(np.mean(each)) for question, each in values.items() if len(each) == len(counted)}


def _measured(rewards: Floats, measure: str) -> float | None:
    """Return one question's mean reward, share of right samples, or pass@k; None of too few samples."""
    is_pass_at = MEASURE.fullmatch(measure)
    k = int(is_pass_at["k"]) if is_pass_at and is_pass_at["k"] else 1
    if not 1 <= k <= len(rewards):
        return None
    if k > 1:
        from retrain.trainer.evaluation import pass_at_k  # not at the top: the report needs no trainer

        return pass_at_k(rewards[None, :] >= CORRECT, k)
    return float(np.mean(rewards if measure == "_reward" else rewards >= CORRECT))


def sentence(gap: ByQuestion) -> str:
    """Return what the questions tell of a difference."""
    shares = {f"questions ({gap.questions})": gap.of_questions, f"seeds ({gap.seeds})": gap.of_seeds}
    noise = ", ".join(f"{share:.0%} of {what}" for what, share in shares.items())
    if gap.seeds == FEWEST:
        caution = " (wide, as two seeds tell little of how seeds differ)"
        remedy = "a third seed narrows it most"
    else:
        more = {"questions": gap.more_questions, "seeds": gap.more_seeds}
        needs = [f"{count:,} more {what}" for what, count in more.items() if count is not None]
        caution, remedy = "", f"half the width needs {' or '.join(needs) or 'more of both'}"
    return (
        f"over new seeds and new questions: {gap.difference:+.3g}, 95 % interval {gap.low:+.3g} to "
        f"{gap.high:+.3g}{caution}; variance: {noise}, {1 - sum(shares.values()):.0%} of both; {remedy}"
    )
