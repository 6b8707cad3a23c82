"""Buffers between production and training: which sample is read next, and whether it stays.

Not thread-safe and never blocking: `Flow` asks before it acts, the pipeline's monitor does the
waiting. Randomness comes from a seeded numpy generator whose state is in the checkpoint; samples
are not (see `RolloutPipeline.state_dict`).

Source of the three kinds: Meyer et al., "High Throughput Training of Deep Surrogates from Large
Ensemble Runs", SC 2023, arXiv:2309.16743.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from retrain.config.flow import FlowSettings

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Sample(Generic[Item]):
    """An item with the version of the policy that it was sampled with."""

    item: Item
    version: int


class Buffer(Protocol[Item]):
    """What `Flow` needs of a buffer."""

    def __len__(self) -> int: ...

    @property
    def unseen(self) -> int:
        """How many samples were never read."""
        ...

    def versions(self) -> list[int]:
        """Return the policy versions of the samples that were never read."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether one more sample may come in."""
        ...

    def needed(self, batch_size: int) -> int:
        """How many samples must be there before a batch may be read."""
        ...

    def put(self, sample: Sample[Item]) -> None:
        """Take a sample in; there must be room."""
        ...

    def take(self, batch_size: int, *, oldest: int = 0, draining: bool = False) -> list[Sample[Item]]:
        """Read a batch of different samples; all of them are removed when draining.

        So many of the oldest that were never read are among them: they would be stale for the next.
        """
        ...

    def drop_older_than(self, version: int) -> list[Sample[Item]]:
        """Remove samples of earlier policy versions; return those of them that were never read."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state, JSON-able."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the generator's state."""
        ...


class Fifo(Generic[Item]):
    """Each sample is read once, in the order of arrival."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._samples: list[Sample[Item]] = []

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def unseen(self) -> int:
        return len(self._samples)

    def versions(self) -> list[int]:
        return [sample.version for sample in self._samples]

    @property
    def has_room(self) -> bool:
        return len(self._samples) < self.capacity

    def needed(self, batch_size: int) -> int:
        return batch_size

    def put(self, sample: Sample[Item]) -> None:
        _check_room(self.has_room)
        self._samples.append(sample)

    def take(self, batch_size: int, *, oldest: int = 0, draining: bool = False) -> list[Sample[Item]]:
        taken, self._samples = self._samples[:batch_size], self._samples[batch_size:]
        return taken

    def drop_older_than(self, version: int) -> list[Sample[Item]]:
        dropped = [s for s in self._samples if s.version < version]
        self._samples = [s for s in self._samples if s.version >= version]
        return dropped

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Firo(Fifo[Item]):
    """Each sample is read once, in random order, with at least `threshold` left to draw from later."""

    def __init__(self, capacity: int, threshold: int = 0, seed: int = 0) -> None:
        super().__init__(capacity)
        self.threshold = threshold
        self._rng = np.random.default_rng(seed)

    def needed(self, batch_size: int) -> int:
        return batch_size + self.threshold

    def take(self, batch_size: int, *, oldest: int = 0, draining: bool = False) -> list[Sample[Item]]:
        taken = _pop_oldest(self._samples, oldest)
        return taken + [_swap_pop(self._samples, self._rng) for _ in range(batch_size - len(taken))]

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]


class Reservoir(Generic[Item]):
    """Samples are read at random and stay; a full reservoir makes room by evicting one already seen.

    A batch holds different samples; the next may hold them again. When draining, samples leave as
    they are read.
    """

    def __init__(self, capacity: int, seed: int = 0) -> None:
        self.capacity = capacity
        self._unseen: list[Sample[Item]] = []
        self._seen: list[Sample[Item]] = []
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._unseen) + len(self._seen)

    @property
    def unseen(self) -> int:
        return len(self._unseen)

    def versions(self) -> list[int]:
        return [sample.version for sample in self._unseen]

    @property
    def has_room(self) -> bool:
        return len(self._unseen) < self.capacity

    def needed(self, batch_size: int) -> int:
        return batch_size

    def put(self, sample: Sample[Item]) -> None:
        _check_room(self.has_room)
        if len(self) >= self.capacity:
            _swap_pop(self._seen, self._rng)
        self._unseen.append(sample)

    def take(self, batch_size: int, *, oldest: int = 0, draining: bool = False) -> list[Sample[Item]]:
        taken = _pop_oldest(self._unseen, oldest)
        taken += [self._draw() for _ in range(batch_size - len(taken))]
        if not draining:
            self._seen.extend(taken)
        return taken

    def drop_older_than(self, version: int) -> list[Sample[Item]]:
        dropped = [s for s in self._unseen if s.version < version]
        self._unseen = [s for s in self._unseen if s.version >= version]
        self._seen = [s for s in self._seen if s.version >= version]
        return dropped

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rng.bit_generator.state = state["rng"]

    def _draw(self) -> Sample[Item]:
        is_unseen = self._rng.integers(len(self)) < len(self._unseen)
        return _swap_pop(self._unseen if is_unseen else self._seen, self._rng)


def build(settings: FlowSettings, seed: int = 0) -> Buffer[Any]:
    """Build the buffer that the settings name."""
    if settings.buffer == "fifo":
        return Fifo(settings.capacity)
    if settings.buffer == "firo":
        return Firo(settings.capacity, settings.threshold, seed)
    return Reservoir(settings.capacity, seed)


def _check_room(has_room: bool) -> None:
    if not has_room:
        raise OverflowError("the buffer is full; ask has_room before putting a sample")


def _pop_oldest(samples: list[Sample[Item]], count: int) -> list[Sample[Item]]:
    """Remove those of the earliest policy versions."""
    if count == 0:
        return []
    samples.sort(key=lambda sample: sample.version)
    taken = samples[:count]
    del samples[:count]
    return taken


def _swap_pop(samples: list[Sample[Item]], rng: np.random.Generator) -> Sample[Item]:
    """Remove one at random in constant time: the last one takes its place."""
    i = int(rng.integers(len(samples)))
    samples[i], samples[-1] = samples[-1], samples[i]
    return samples.pop()
