"""The numpy policy learns to sort two digits, two prompts a step and then sixteen.

The gradient's noise scale is about 100 prompts here, so by theory the large batch may go nearly as
far per sample as the small one. Adam divides by the gradient's running size, which shrinks with the
larger batch over about a thousand steps: until then it takes more than the square root.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.scaling_compare import Curve, Curves, continuations
from retrain.advantages import grpo
from retrain.backends import BackendSpec, GradientMoments, Optimization, Sampling
from retrain.backends.numpy import NumpyBackend, connect
from retrain.controllers.scaling import RULES, LearningRateScaling, ScalingDecision, ScalingRule
from retrain.errors import NonFiniteError
from retrain.losses import ppo
from retrain.rewards import partial as partial_credit
from retrain.rollouts import Group, Loss, Prompt, TrainingSample
from retrain.tasks import Task, sort

PROMPTS = 2  # of the small batch
CHANGE, MARK, MARKS = 800, 256, 16  # prompts before the change and between scores; scores
LR = 4e-3  # 2e-3 learns more slowly at the small batch, 1e-2 worse
PARTS = 4  # micro-batches of whole prompt groups, whose gradients tell noise from signal
UNCLIPPED = 1e9  # clipping would hide that a larger batch's gradient is smaller
SAMPLING = Sampling(group_size=8, max_tokens=3, temperature=1.0)
PPO = Loss("ppo", ppo.evaluate)


def sorting_curves(seeds: Iterable[int]) -> Curves:
    rules = continuations("none", "sqrt", "linear", "adascale", "adamscale")
    curves: dict[str, list[Curve]] = {name: [] for name in rules}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            start = SmallBatchRun(seed, Path(folder))
            for name, (rule, growth) in rules.items():
                curves[name].append(start.go_on(rule, growth))
    return curves


class SmallBatchRun:
    """A run up to the change, kept so that every rule goes on from the same weights and Adam."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._task, self._folder = sort.build(length=2, held_out=0.3, seed=seed), folder
        self._order = np.random.default_rng(seed)
        options = {"hidden": 32, "embedding": 16}
        self._policy = connect(BackendSpec(seed=seed, alphabet=self._task.alphabet, options=options))
        scaling = LearningRateScaling(RULES["none"](), PROMPTS)
        for _ in range(CHANGE // PROMPTS):
            train_step(self._policy, self._draw(PROMPTS), scaling, PARTS)
        self._policy.save(folder)
        self._scaling_state, self._order_state = scaling.state_dict(), self._order.bit_generator.state

    def go_on(self, rule: ScalingRule, growth: int) -> Curve:
        """Train on batches `growth` times as large, with scores on held-out prompts."""
        self._policy.load(self._folder)
        self._order.bit_generator.state = self._order_state
        scaling = LearningRateScaling(rule, PROMPTS)
        scaling.load_state_dict(self._scaling_state)
        batch = PROMPTS * growth
        listens = isinstance(rule, RULES["adascale"])
        scores: list[float] = []
        decisions: list[ScalingDecision] = []
        progress: list[float] = []
        try:
            for step in range(MARKS * MARK // batch):
                decisions.append(
                    train_step(self._policy, self._draw(batch), scaling, PARTS if listens else 1)
                )
                if (step + 1) * batch % MARK == 0:
                    scores.append(held_out_reward(self._policy, self._task))
                    progress.append(decisions[-1].progress + decisions[-1].gain)
        except NonFiniteError:
            pass  # the policy was destroyed: it earns nothing from here on
        missing = [0.0] * (MARKS - len(scores))
        factor = float(np.mean([decision.lr_factor for decision in decisions]))
        return Curve(scores + missing, progress + missing, factor)

    def _draw(self, count: int) -> list[Prompt]:
        return [self._task.train[i] for i in self._order.integers(len(self._task.train), size=count)]


def train_step(
    policy: NumpyBackend, prompts: list[Prompt], scaling: LearningRateScaling, parts: int
) -> ScalingDecision:
    decision = scaling.decide(len(prompts))
    samples = training_samples(policy.sample(prompts, SAMPLING))
    moments: GradientMoments | None = None
    if samples:
        how = Optimization(lr=LR * decision.lr_factor, max_grad_norm=UNCLIPPED, micro_batches=parts)
        moments = policy.update(samples, PPO, how).moments
    if moments is None:
        scaling.observe(decision, None, None)
    else:
        scaling.observe(decision, moments.local_sqr_norms, moments.mean_sqr_norm)
    return decision


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
    groups = policy.sample(task.held_out, SAMPLING)
    return float(np.mean([partial_credit.score(r.text, g.prompt) for g in groups for r in g.rollouts]))
