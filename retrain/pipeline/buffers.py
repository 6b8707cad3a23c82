"""Buffers between production and training: which sample is read next, and whether it stays.

Neither thread-safe nor blocking: `Flow` checks before it acts, and the source's monitor waits. The state of
the seeded random generator is part of the checkpoint; samples are not (see `AsyncSource.state_dict`).

Source of the three kinds: Meyer et al., "High Throughput Training of Deep Surrogates from Large
Ensemble Runs", SC 2023, arXiv:2309.16743.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from retrain.config.flow import FlowSettings
from retrain.controllers import StateDict

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class VersionedItem(Generic[Item]):
    """An item with the policy version that sampled it."""

    item: Item
    version: int


class Fifo(Generic[Item]):
    """Each sample is read once, in order of arrival; other kinds read others, or keep what they read."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._unseen: list[VersionedItem[Item]] = []

    def __len__(self) -> int:
        return self.unseen

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
        return len(self._unseen) < self.capacity

    def needed(self, batch_size: int) -> int:
        """Return how many samples it must hold before a batch may be read."""
        return batch_size

    def put(self, sample: VersionedItem[Item]) -> None:
        """Take in a sample; there must be room."""
        if not self.has_room:
            raise OverflowError("the buffer is full; ask has_room before putting a sample")
        self._unseen.append(sample)

    def take(self, batch_size: int, *, oldest: int = 0) -> list[VersionedItem[Item]]:
        """Read a batch of different samples.

        `oldest` is how many of the oldest unread samples it must hold: they would be stale for the next.
        """
        taken, self._unseen = self._unseen[:batch_size], self._unseen[batch_size:]
        return taken

    def drop_older_than(self, version: int) -> list[VersionedItem[Item]]:
        """Remove samples of earlier policy versions; return those of them that were never read."""
        dropped = [s for s in self._unseen if s.version < version]
        self._unseen = [s for s in self._unseen if s.version >= version]
        return dropped

    def state_dict(self) -> StateDict:
        """Return the random generator's state, JSON-able."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the random generator's state."""


class Firo(Fifo[Item]):
    """Each sample is read once, in random order; at least `threshold` samples stay to draw from later."""

    def __init__(self, capacity: int, threshold: int = 0, seed: int = 0) -> None:
        super().__init__(capacity)
        self._threshold = threshold
        self._rng = np.random.default_rng(seed)

    def needed(self, batch_size: int) -> int:
        return batch_size + self._threshold

    def take(self, batch_size: int, *, oldest: int = 0) -> list[VersionedItem[Item]]:
        if oldest:
            self._unseen.sort(key=lambda sample: sample.version)
        taken, self._unseen = self._unseen[:oldest], self._unseen[oldest:]
        return taken + [self._draw() for _ in range(batch_size - len(taken))]

    def state_dict(self) -> StateDict:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: StateDict) -> None:
        self._rng.bit_generator.state = state["rng"]

    def _draw(self) -> VersionedItem[Item]:
        return self._pop_random(self._unseen)

    def _pop_random(self, samples: list[VersionedItem[Item]]) -> VersionedItem[Item]:
        """Remove one at random in constant time: the last one takes its place."""
        i = int(self._rng.integers(len(samples)))
        samples[i], samples[-1] = samples[-1], samples[i]
        return samples.pop()


class Reservoir(Firo[Item]):
    """Samples are read at random and stay; a full reservoir makes room by evicting one already read.

    The samples of one batch differ; the next batch may hold them again.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        super().__init__(capacity, seed=seed)
        self._seen: list[VersionedItem[Item]] = []

    def __len__(self) -> int:
        return len(self._unseen) + len(self._seen)

    def put(self, sample: VersionedItem[Item]) -> None:
        if self.has_room and len(self) >= self.capacity:
            self._pop_random(self._seen)
        super().put(sample)

    def take(self, batch_size: int, *, oldest: int = 0) -> list[VersionedItem[Item]]:
        taken = super().take(batch_size, oldest=oldest)
        self._seen.extend(taken)
        return taken

    def drop_older_than(self, version: int) -> list[VersionedItem[Item]]:
        self._seen = [s for s in self._seen if s.version >= version]
        return super().drop_older_than(version)

    def _draw(self) -> VersionedItem[Item]:
        is_unseen = self._rng.integers(len(self)) < len(self._unseen)
        return self._pop_random(self._unseen if is_unseen else self._seen)


def build(settings: FlowSettings, seed: int = 0) -> Fifo[Any]:
    """Return the buffer that the settings name."""
    if settings.buffer == "fifo":
        return Fifo(settings.capacity)
    if settings.buffer == "firo":
        return Firo(settings.capacity, settings.threshold, seed)
    return Reservoir(settings.capacity, seed)
