"""Learning rate and batch size: scaling rules, the gradient noise scale, and goodput.

Goodput, useful samples per second, is for choosing a batch that is fast and sample-efficient. It is computed
from a throughput model and the gradient noise scale; nothing is measured here.

Source: Pollux, arXiv:2008.12260.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from retrain.base.rollouts import Floats

Numbers: TypeAlias = Floats | float  # arguments that broadcast

TINY = 1e-8  # seconds; stands for a time that was never measured
ROUNDING = 1e-8  # geomspace may end a hair above a whole number
CANDIDATES = 50  # total batch sizes evaluated, log-spaced: neighbours differ by a few percent


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Throughput model: seconds per step as a function of replicas and samples."""

    alpha_c: float  # s, constant compute time of one pass
    beta_c: float  # s per sample, compute time of one pass on one replica
    alpha_n: float  # s, network between nodes
    beta_n: float  # s per replica beyond two, between nodes
    alpha_r: float  # s, network within a node
    beta_r: float  # s per replica beyond two, within a node
    gamma: float  # 1 (no overlap of compute and network) to 10 (nearly full)

    def pass_s(self, atomic_batch: Numbers) -> Floats:
        """Return the seconds of one forward and backward pass of `atomic_batch` samples on each replica."""
        return self.alpha_c + self.beta_c * np.asarray(atomic_batch, dtype=np.float64)

    def network_s(self, nodes: Numbers, replicas: Numbers) -> Floats:
        """Return the seconds to average gradients over `replicas` on `nodes`."""
        where = [np.greater(nodes, 1), np.greater(replicas, 1)]
        base = np.select(where, [self.alpha_n, self.alpha_r], TINY)
        each = np.select(where, [self.beta_n, self.beta_r], TINY)
        return np.asarray(base + each * np.maximum(np.subtract(replicas, 2), TINY))

    def last_pass_s(self, nodes: Numbers, replicas: Numbers, atomic_batch: Numbers) -> Floats:
        """Return the seconds of a step's last pass, whose network time overlaps its compute."""
        compute, network = self.pass_s(atomic_batch), self.network_s(nodes, replicas)
        longest = np.maximum(compute, network)  # factored out, because large powers underflow
        parts = (compute / longest) ** self.gamma + (network / longest) ** self.gamma
        return np.asarray(longest * parts ** (1 / self.gamma))

    def throughput(
        self, nodes: Numbers, replicas: Numbers, atomic_batch: Numbers, accumulation_steps: Numbers
    ) -> Floats:
        """Return samples per second; `accumulation_steps` passes without network precede the last."""
        samples = np.multiply(replicas, atomic_batch) * np.add(accumulation_steps, 1)
        before = accumulation_steps * self.pass_s(atomic_batch)
        return np.asarray(samples / (before + self.last_pass_s(nodes, replicas, atomic_batch)))


def efficiency(batch_size: Numbers, *, phi: float, init_batch_size: float) -> Floats:
    """Return progress per sample at `batch_size`, relative to the initial batch: (phi + M0) / (phi + M)."""
    sizes = np.asarray(batch_size, dtype=np.float64)
    return np.ones_like(sizes) if math.isinf(phi) else (phi + init_batch_size) / (phi + sizes)


@dataclass(frozen=True, slots=True)
class BatchSuggestion:
    """The suggested batch of each replica, and its expected goodput."""

    atomic_batch: int  # samples of one pass on one replica
    accumulation_steps: int  # passes before the last
    goodput: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """Throughput times efficiency."""

    times: StepTimes
    phi: float  # gradient noise scale, samples
    init_batch_size: int

    def evaluate(
        self, nodes: Numbers, replicas: Numbers, atomic_batch: Numbers, accumulation_steps: Numbers
    ) -> Floats:
        """Return useful samples per second; arguments broadcast."""
        batch = np.multiply(replicas, atomic_batch) * np.add(accumulation_steps, 1)
        gained = efficiency(batch, phi=self.phi, init_batch_size=self.init_batch_size)
        return self.times.throughput(nodes, replicas, atomic_batch, accumulation_steps) * gained

    def suggest(
        self,
        nodes: int,
        replicas: int,
        *,
        max_batch_size: int | None = None,
        atomic_limits: tuple[int, int] | None = None,
        accumulation: bool = False,
    ) -> BatchSuggestion:
        """Return the batch with the highest goodput, at least the initial batch.

        A single replica needs two passes to separate noise from signal: beyond the initial batch it
        accumulates, and without `accumulation` it stays at the initial batch.

        Args:
            max_batch_size: total samples of a step, rounded up to whole samples per replica;
                default the initial batch.
            atomic_limits: fewest and most samples of one pass; default 1 and `max_batch_size`.
            accumulation: whether a step may take several passes.

        Raises:
            ValueError: no batch fits the limits.
        """
        most = self.init_batch_size if max_batch_size is None else max_batch_size
        lowest, highest = atomic_limits or (1, most)
        least = max(self.init_batch_size, lowest * replicas)
        reach = most if accumulation else min(most, highest * replicas)
        if not (1 <= lowest <= highest and 1 <= nodes <= replicas and least <= reach):
            raise ValueError(
                f"max_batch_size={most}, atomic_limits=({lowest}, {highest}), replicas={replicas}, "
                f"nodes={nodes}, accumulation={accumulation}: no batch fits; a step needs at least {least} "
                "samples and each node a replica"
            )
        share = np.geomspace(least, most, CANDIDATES) / replicas
        atomic, passes = np.ceil(share - ROUNDING), np.ones_like(share)
        if accumulation:
            passes = np.ceil(share / highest - ROUNDING)
            if replicas == 1:
                is_larger = share > self.init_batch_size + ROUNDING
                passes = np.where(is_larger, np.maximum(passes, 2), passes)
            atomic = np.ceil(share / passes - ROUNDING)
        elif replicas == 1:
            atomic = np.full_like(share, self.init_batch_size)
        atomic = np.clip(atomic, lowest, highest)
        useful = self.evaluate(nodes, replicas, atomic, passes - 1)
        best = int(np.argmax(useful))
        return BatchSuggestion(int(atomic[best]), int(passes[best]) - 1, float(useful[best]))
