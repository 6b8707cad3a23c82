"""The numpy backend: tokens per second, and how fast a policy learns to sort three digits.

Run `python -m benchmarks.numpy_backend`, with `--full` for five seeds, `--json` for the rows. Times are
processor seconds of this process on one thread, so that neighbours on the machine do not count.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # before numpy is imported

import numpy as np

from benchmarks.suite import script_parser
from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import connect
from retrain.backends.numpy.policy import NumpyBackend
from retrain.base.rollouts import Group, Loss, Prompt, TrainingSample
from retrain.plugins.advantages import grpo, maxrl
from retrain.plugins.losses import ppo
from retrain.plugins.rewards import partial
from retrain.plugins.tasks import sort

BATCH, GROUP, MAX_TOKENS = 16, 16, 8
STEP = Optimization(lr=5e-3, max_grad_norm=0.1, entropy_bonus=0.01)
ESTIMATES: dict[str, Callable[..., Any]] = {"grpo": grpo.estimate, "maxrl": maxrl.estimate}
SHOWN = (0, 50, 100, 200, 300, 400, 600, 800)
WINDOW = 10  # steps that a shown reward is averaged over; the first step stands alone


@dataclass
class Learning:
    """One run, filled while it trains."""

    advantage: str
    seed: int
    rewards: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sample_s: float = 0.0
    update_s: float = 0.0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    held_out_accuracy: float = 0.0

    def reward_at(self, step: int) -> float:
        return float(np.mean(self.rewards[max(step - WINDOW, 0) : max(step, 1)]))


def learn(advantage: str, seed: int, steps: int) -> Learning:
    task = sort.build(length=3, seed=0)
    backend = connect(BackendSpec(seed=seed, alphabet=task.alphabet))
    order = np.random.default_rng(seed)
    run = Learning(advantage, seed)
    start = time.process_time()
    for _ in range(steps):
        prompts = [task.train[i] for i in order.choice(len(task.train), BATCH, replace=False)]
        take_step(backend, prompts, run)
        run.cpu_s.append(time.process_time() - start)
    answers = backend.sample(task.held_out, Sampling(1, MAX_TOKENS, temperature=0))
    run.held_out_accuracy = float(np.mean([g.rollouts[0].text == g.prompt.answer for g in answers]))
    return run


def take_step(backend: NumpyBackend, prompts: list[Prompt], run: Learning) -> None:
    begin = time.process_time()
    groups = backend.sample(prompts, Sampling(GROUP, MAX_TOKENS, temperature=1.0))
    run.sample_s += time.process_time() - begin
    run.sampled_tokens += sum(len(r.tokens) for g in groups for r in g.rollouts)
    rewards = np.array([[partial.score(r.text, g.prompt) for r in g.rollouts] for g in groups])
    run.rewards.append(float(rewards.mean()))
    samples = weighted(groups, ESTIMATES[run.advantage](rewards))
    if not samples:
        return
    begin = time.process_time()
    backend.update(samples, Loss("ppo", ppo.evaluate), STEP)
    run.update_s += time.process_time() - begin
    run.trained_tokens += sum(len(sample.rollout.tokens) for sample in samples)


def weighted(groups: list[Group], advantages: np.ndarray) -> list[TrainingSample]:
    """Return the samples of groups with signal, every token weighing the same."""
    chosen = [
        (rollout, advantages[g, i], g)
        for g in np.flatnonzero((advantages != 0).any(axis=1)).tolist()
        for i, rollout in enumerate(groups[g].rollouts)
    ]
    tokens = sum(len(rollout.tokens) for rollout, _, _ in chosen)
    return [TrainingSample(r, np.full(len(r.tokens), a), 1 / tokens, g) for r, a, g in chosen]


def print_tables(runs: list[Learning], steps: int) -> None:
    shown = [step for step in SHOWN if step <= steps]
    print(f"sort three digits, partial credit; {BATCH} prompts x {GROUP} rollouts, lr {STEP.lr:g},")
    print(f"mean reward after so many steps (mean of {WINDOW}), then held-out greedy accuracy\n")
    print(
        f"{'advantage':<10}{'seed':>5}"
        + "".join(f"{step:>8}" for step in shown)
        + f"{'held-out':>10}{'cpu s':>8}"
    )
    for run in runs:
        curve = "".join(f"{run.reward_at(step):>8.3f}" for step in shown)
        print(f"{run.advantage:<10}{run.seed:>5}{curve}{run.held_out_accuracy:>10.3f}{run.cpu_s[-1]:>8.2f}")
    print(f"\n{'advantage':<10}{'seed':>5}{'sampled tok/s':>15}{'trained tok/s':>15}{'ms/step':>9}")
    for run in runs:
        sampled, trained = run.sampled_tokens / run.sample_s, run.trained_tokens / run.update_s
        pace = 1000 * run.cpu_s[-1] / steps
        print(f"{run.advantage:<10}{run.seed:>5}{sampled:>15,.0f}{trained:>15,.0f}{pace:>9.2f}")


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the runs, every step of them, as JSON")
    parser.add_argument("--full", action="store_true", help="five seeds instead of two")
    parser.add_argument("--steps", type=int, default=800)
    arguments = parser.parse_args()
    seeds = range(5 if arguments.full else 2)
    runs = [learn(advantage, seed, arguments.steps) for advantage in ESTIMATES for seed in seeds]
    if arguments.json:
        print(json.dumps([asdict(run) for run in runs]))
    else:
        print_tables(runs, arguments.steps)


if __name__ == "__main__":
    main()
