"""The numpy policy learns to sort two digits; half-way the batch grows eightfold.

With plain SGD, as AdaScale supposes, and with Adam, for which AdamScale is its square root. Batches are
small and groups few, so that the gradient's noise scale lies above the large batch: eight small steps
may become nearly one. Learning rates are near the best of the small batch. With SGD the run goes on
until the task is nearly learned and few groups are informative, where the same prompts make far fewer
updates: a factor of eight is then too much.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.studies.scaling_compare import Curve, continuations
from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import connect
from retrain.backends.numpy.policy import NumpyBackend
from retrain.base.errors import NonFiniteError
from retrain.base.rollouts import Group, Loss, Prompt, TrainingSample
from retrain.control.rules.scaling import RULES, LearningRateScaling, ScalingRule
from retrain.plugins.advantages import grpo
from retrain.plugins.losses import ppo
from retrain.plugins.rewards import partial as partial_credit
from retrain.plugins.tasks import Task, sort
from retrain.records.step_row import ScalingDecision

PARTS = 4  # micro-batches of whole prompt groups, whose gradients tell noise from signal
UNCLIPPED = 1e9  # clipping would hide that a larger batch's gradient is smaller
PPO = Loss("ppo", ppo.evaluate)


@dataclass(frozen=True)
class Setting:
    """How the small batch is trained, and for how long; counts are prompts."""

    optimizer: str
    rules: tuple[str, ...]
    prompts: int  # of the small batch
    group_size: int
    lr: float
    change: int  # before the batch grows
    mark: int  # between scores
    marks: int

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.group_size, max_tokens=3, temperature=1.0)


SGD = Setting("sgd", ("none", "sqrt", "linear", "adascale"), 2, 4, 0.5, 4096, 1536, 16)
ADAM = Setting("adam", ("none", "sqrt", "linear", "adamscale"), 2, 8, 4e-3, 800, 256, 16)


def sorting_curves(setting: Setting, seed: int) -> dict[str, Curve]:
    """Return each rule's curve."""
    with tempfile.TemporaryDirectory() as folder:
        start = SmallBatchRun(setting, seed, Path(folder))
        rules = continuations(*setting.rules)
        return {name: start.go_on(rule, growth) for name, (rule, growth) in rules.items()}


class SmallBatchRun:
    """A run up to the change, kept so that every rule goes on from the same weights and optimizer."""

    def __init__(self, setting: Setting, seed: int, folder: Path) -> None:
        self._task, self._folder = sort.build(length=2, held_out=0.3, seed=seed), folder
        self._setting, self._order = setting, np.random.default_rng(seed)
        options = {"hidden": 32, "embedding": 16, "optimizer": setting.optimizer}
        self._policy = connect(BackendSpec(seed=seed, alphabet=self._task.alphabet, options=options))
        scaling = LearningRateScaling(RULES["none"](), setting.prompts)
        for _ in range(setting.change // setting.prompts):
            train_step(setting, self._policy, self._draw(setting.prompts), scaling, PARTS)
        self._policy.save(folder)
        self._scaling_state, self._order_state = scaling.state_dict(), self._order.bit_generator.state

    def go_on(self, rule: ScalingRule, growth: int) -> Curve:
        """Train on batches `growth` times as large, with scores on held-out prompts."""
        setting = self._setting
        self._policy.load(self._folder)
        self._order.bit_generator.state = self._order_state
        scaling = LearningRateScaling(rule, setting.prompts)
        scaling.load_state_dict(self._scaling_state)
        batch, parts = setting.prompts * growth, PARTS if rule.rests_on_noise else 1
        scores: list[float] = []
        decisions: list[ScalingDecision] = []
        try:
            for step in range(setting.marks * setting.mark // batch):
                decisions.append(train_step(setting, self._policy, self._draw(batch), scaling, parts))
                if (step + 1) * batch % setting.mark == 0:
                    scores.append(held_out_reward(setting, self._policy, self._task))
        except NonFiniteError:
            pass  # the policy was destroyed: it earns nothing from here on
        missing = [0.0] * (setting.marks - len(scores))
        factor = float(np.mean([decision.lr_factor for decision in decisions]))
        return Curve(scores + missing, factor)

    def _draw(self, count: int) -> list[Prompt]:
        return [self._task.train[i] for i in self._order.integers(len(self._task.train), size=count)]


def train_step(
    setting: Setting,
    policy: NumpyBackend,
    prompts: list[Prompt],
    scaling: LearningRateScaling,
    parts: int,
) -> ScalingDecision:
    decision = scaling.decide(len(prompts))
    samples = training_samples(policy.sample(prompts, setting.sampling))
    informative = len({sample.group for sample in samples})
    scaling.count_groups(informative, len(prompts))
    if not samples:
        return decision
    how = Optimization(
        lr=setting.lr * decision.lr_factor,
        max_grad_norm=UNCLIPPED,
        micro_batches=parts,
        wants_moments=parts > 1,
    )
    moments = policy.update(samples, PPO, how).moments
    if moments is None:
        scaling.observe(decision, None, None)
    else:
        scaling.observe(
            decision,
            moments.local_sqr_norms,
            moments.mean_sqr_norm,
            informative=informative,
            consecutive=moments.consecutive,
        )
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


def held_out_reward(setting: Setting, policy: NumpyBackend, task: Task) -> float:
    groups = policy.sample(task.held_out, setting.sampling)
    return float(np.mean([partial_credit.score(r.text, g.prompt) for g in groups for r in g.rollouts]))
