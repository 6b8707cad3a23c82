"""The buffer between production and training: which sample is read next, and whether it stays.

Neither thread-safe nor blocking: `Flow` checks before it acts, and the source's monitor waits. The state of
the seeded random generator is part of the checkpoint; samples are not (see `AsyncSource.state_dict`).

Source of the three kinds: Meyer et al., "High Throughput Training of Deep Surrogates from Large
Ensemble Runs", SC 2023, arXiv:2309.16743.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from retrain.config.flow import FlowSettings
from retrain.control.rules import StateDict

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class VersionedItem(Generic[Item]):
    """An item with the policy version that sampled it."""

    item: Item
    version: int


class Buffer(Generic[Item]):
    """Samples until they are read, or longer.

    A fifo reads each once, in order of arrival. A firo reads each once, in random order, and leaves at least
    `threshold` to draw from later. A reservoir reads at random and keeps what it reads; when it is full, it
    makes room by evicting a sample that was already read. The samples of one batch differ.
    """

    def __init__(self, settings: FlowSettings, seed: int = 0) -> None:
        self._capacity, self._threshold = settings.capacity, settings.threshold
        self._is_random, self._keeps = settings.buffer != "fifo", settings.buffer == "reservoir"
        self._rng = np.random.default_rng(seed)
        self._unseen: list[VersionedItem[Item]] = []
        self._seen: list[VersionedItem[Item]] = []

    def __len__(self) -> int:
        return len(self._unseen) + len(self._seen)

    @property
    def unseen(self) -> int:
        """How many samples were never read."""
        return len(self._unseen)

    def versions(self) -> list[int]:
        """Return the policy versions of the samples that were never read."""
        return [sample.version for sample in self._unseen]

    @property
    def has_room(self) -> bool:
        """Whether it can take in one more sample."""
        return len(self._unseen) < self._capacity

    def needed(self, batch_size: int) -> int:
        """Return how many samples it must hold before a batch may be read."""
        return batch_size + self._threshold

    def put(self, sample: VersionedItem[Item]) -> None:
        """Take in a sample; there must be room."""
        if not self.has_room:
            raise OverflowError("the buffer is full; ask has_room before putting a sample")
        if len(self) >= self._capacity:
            self._pop_random(self._seen)
        self._unseen.append(sample)

    def take(self, batch_size: int, *, oldest: int = 0) -> list[VersionedItem[Item]]:
        """Read a batch of different samples.

        `oldest` is how many of the oldest unread samples it must hold: they would be stale for the next.
        """
        in_order = oldest if self._is_random else batch_size
        if self._is_random and oldest:
            self._unseen.sort(key=lambda sample: sample.version)
        taken, self._unseen = self._unseen[:in_order], self._unseen[in_order:]
        taken += [self._draw() for _ in range(batch_size - len(taken))]
        if self._keeps:
            self._seen += taken
        return taken

    def drop_older_than(self, version: int) -> list[VersionedItem[Item]]:
        """Remove samples of earlier policy versions; return those of them that were never read."""
        dropped = [sample for sample in self._unseen if sample.version < version]
        self._unseen = [sample for sample in self._unseen if sample.version >= version]
        self._seen = [sample for sample in self._seen if sample.version >= version]
        return dropped

    def state_dict(self) -> StateDict:
        """Return the random generator's state, JSON-able."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self._rng.bit_generator.state = state["rng"]

    def _draw(self) -> VersionedItem[Item]:
        is_unseen = not self._keeps or self._rng.integers(len(self)) < len(self._unseen)
        return self._pop_random(self._unseen if is_unseen else self._seen)

    def _pop_random(self, samples: list[VersionedItem[Item]]) -> VersionedItem[Item]:
        """Remove one at random in constant time: the last one takes its place."""
        i = int(self._rng.integers(len(samples)))
        samples[i], samples[-1] = samples[-1], samples[i]
        return samples.pop()
