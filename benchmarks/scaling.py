"""Learning-rate scaling when the batch grows eightfold in the middle of a run.

Noisy Rosenbrock: plain SGD along a curved valley at a learning rate near the largest stable one.
Numpy policy: the embedded backend (Adam) learns to sort digits. Each rule continues the same
small-batch run with batches eight times as large; "small" keeps the small batch. Rules are compared
at equal samples seen, so a perfect rule would stay with "small" while taking an eighth of the steps.
Progress counts steps at the small batch that the steps were worth.

    python -m benchmarks.scaling [--full] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from retrain.advantages import grpo
from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import NumpyBackend, connect
from retrain.controllers.scaling import (
    AdamScaleRule,
    AdaScaleRule,
    Facts,
    LearningRateScaling,
    LinearRule,
    ScalingDecision,
    ScalingRule,
    SqrtRule,
)
from retrain.losses import ppo
from retrain.rewards import partial as partial_credit
from retrain.rollouts import Group, Loss, Prompt, TrainingSample
from retrain.tasks import Task, sort

GROWTH = 8
PROMPTS = 8  # of the small batch
PARTS = 4  # micro-batches of whole prompt groups, whose gradients tell noise from signal
LARGEST_LOSS = 1e6  # past this a run has diverged
PPO = Loss("ppo", ppo.evaluate)


class NoRule(ScalingRule):
    """The learning rate of the initial batch, whatever the batch."""

    def _factor(self, facts: Facts) -> float:
        return 1.0


RULES: dict[str, tuple[ScalingRule, int]] = {
    "small": (NoRule(), 1),
    "none": (NoRule(), GROWTH),
    "sqrt": (SqrtRule(), GROWTH),
    "linear": (LinearRule(), GROWTH),
    "adascale": (AdaScaleRule(), GROWTH),
    "adamscale": (AdamScaleRule(), GROWTH),
}


@dataclass(frozen=True)
class Point:
    """A run after some step."""

    samples: int
    progress: float
    lr_factor: float
    score: float  # loss, or held-out reward


@dataclass(frozen=True)
class Row:
    """A rule's result over seeds: medians."""

    problem: str
    rule: str
    after_quarter: float  # score a quarter of the large-batch samples after the change
    after_half: float
    at_end: float
    samples_to_target: float  # infinite if the target was not reached
    progress_to_target: float
    mean_lr_factor: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--full", action="store_true", help="more seeds and samples: 20 minutes instead of one"
    )
    arguments = parser.parse_args()
    rows = rosenbrock_rows(seeds=16 if arguments.full else 3)
    rows += policy_rows(seeds=5, total=9_600) if arguments.full else policy_rows(seeds=1, total=4_800)
    if arguments.json:
        finite = [{k: None if v == math.inf else v for k, v in asdict(row).items()} for row in rows]
        print(json.dumps(finite))
        return
    columns = ["problem", "rule", "at 1/4", "at 1/2", "at end", "samples to", "progress to", "lr factor"]
    print("".join(f"{column:>12}" for column in columns))
    for row in rows:
        numbers = list(asdict(row).values())[2:]
        print(f"{row.problem:>12}{row.rule:>12}" + "".join(f"{number:>12.4g}" for number in numbers))
    print("target: Rosenbrock's loss at most 0.5; the policy's held-out reward at least 0.5")


def summary(
    problem: str, rule: str, runs: Sequence[Sequence[Point]], reached: Callable[[float], bool], change: int
) -> Row:
    """Compare runs of one rule at fixed numbers of samples seen."""
    end = max(run[-1].samples for run in runs)

    def score_at(share: float) -> float:
        samples = change + share * (end - change)
        return float(np.median([[p.score for p in run if p.samples <= samples][-1] for run in runs]))

    firsts = [next((p for p in run if p.samples > change and reached(p.score)), None) for run in runs]
    to_target = np.median([p.samples if p else math.inf for p in firsts])
    progress = np.median([p.progress if p else math.inf for p in firsts])
    factor = np.mean([p.lr_factor for run in runs for p in run if p.samples > change])
    return Row(
        problem,
        rule,
        after_quarter=score_at(0.25),
        after_half=score_at(0.5),
        at_end=score_at(1.0),
        samples_to_target=float(to_target),
        progress_to_target=float(progress),
        mean_lr_factor=float(factor),
    )


def rosenbrock_rows(seeds: int) -> list[Row]:
    change = 5_000
    return [
        summary(
            "rosenbrock",
            name,
            [rosenbrock(rule, growth, seed, change) for seed in range(seeds)],
            lambda loss: loss <= 0.5,
            change,
        )
        for name, (rule, growth) in RULES.items()
        if name != "adamscale"  # for Adam only
    ]


def rosenbrock(rule: ScalingRule, growth: int, seed: int, change: int) -> list[Point]:
    """Descend from (-1.2, 1.44) with noise of deviation 28 in each sample's gradient."""
    rng, scaling, position = np.random.default_rng(seed), LearningRateScaling(rule, 8), np.array([-1.2, 1.44])
    points: list[Point] = []
    samples = 0
    while samples < 40_000 and np.square(position).sum() < LARGEST_LOSS:
        x, y = position
        batch = 8 if samples < change else 8 * growth
        true = np.array([-2 * (1 - x) - 400 * x * (y - x * x), 200 * (y - x * x)])
        parts = true + rng.normal(0, 28 / math.sqrt(batch / 8), size=(8, 2))
        decision, mean = scaling.decide(batch), parts.mean(axis=0)
        position = position - 8e-4 * decision.lr_factor * mean
        scaling.observe(decision, np.square(parts).sum(axis=1, keepdims=True), np.array([mean @ mean]))
        samples += batch
        loss = (1 - position[0]) ** 2 + 100 * (position[1] - position[0] ** 2) ** 2
        points.append(Point(samples, decision.progress, decision.lr_factor, min(loss, LARGEST_LOSS)))
    return points


def policy_rows(seeds: int, total: int) -> list[Row]:
    change = 1_200
    return [
        summary(
            "sort",
            name,
            [learn_to_sort(rule, growth, seed, change, total) for seed in range(seeds)],
            lambda reward: reward >= 0.5,
            change,
        )
        for name, (rule, growth) in RULES.items()
    ]


def learn_to_sort(rule: ScalingRule, growth: int, seed: int, change: int, total: int) -> list[Point]:
    """Train on 8 prompts a step, then `growth` times as many; scored on held-out prompts."""
    task = sort.build(seed=seed)
    policy = connect(BackendSpec(seed=seed, alphabet=task.alphabet))
    rng, scaling = np.random.default_rng(seed), LearningRateScaling(rule, PROMPTS)
    points: list[Point] = []
    seen, next_score = 0, 0
    while seen < total:
        decision = scaling.decide(PROMPTS * (growth if seen >= change else 1))
        batch = round(decision.scale * PROMPTS)
        train_step(
            policy, [task.train[i] for i in rng.integers(len(task.train), size=batch)], scaling, decision
        )
        seen += batch
        if seen >= next_score:
            points.append(Point(seen, decision.progress, decision.lr_factor, held_out_reward(policy, task)))
            next_score += 300
    return points


def train_step(
    policy: NumpyBackend, prompts: list[Prompt], scaling: LearningRateScaling, decision: ScalingDecision
) -> None:
    groups = policy.sample(prompts, Sampling(group_size=16, max_tokens=4, temperature=1.0))
    samples = training_samples(groups)
    if not samples:
        scaling.observe(decision, None, None)
        return
    stats = policy.update(samples, PPO, Optimization(lr=5e-3 * decision.lr_factor, micro_batches=PARTS))
    if stats.moments is None:
        scaling.observe(decision, None, None)
    else:
        scaling.observe(decision, stats.moments.local_sqr_norms, stats.moments.mean_sqr_norm)


def training_samples(groups: Sequence[Group]) -> list[TrainingSample]:
    """Score and centre; groups of equal rewards are left out."""
    rewards = np.array([[partial_credit.score(r.text, g.prompt) for r in g.rollouts] for g in groups])
    advantages = grpo.estimate(rewards)
    informative = np.flatnonzero(advantages.any(axis=1)).tolist()
    chosen = [
        (rollout, advantages[g, i], number)
        for number, g in enumerate(informative)
        for i, rollout in enumerate(groups[g].rollouts)
    ]
    weight = 1.0 / max(1, sum(len(rollout.tokens) for rollout, _, _ in chosen))
    return [TrainingSample(r, np.full(len(r.tokens), a), weight, number) for r, a, number in chosen]


def held_out_reward(policy: NumpyBackend, task: Task) -> float:
    groups = policy.sample(task.held_out, Sampling(group_size=1, max_tokens=4, temperature=0.0))
    return float(np.mean([partial_credit.score(g.rollouts[0].text, g.prompt) for g in groups]))


if __name__ == "__main__":
    main()
