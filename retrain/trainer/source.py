"""Where a step's rollouts come from: the order of prompts, and sampling when training asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import numpy as np

from retrain.backends import BackendInfo
from retrain.config.flow import flow_settings
from retrain.config.schema import Config
from retrain.records.step_row import PipelineStats
from retrain.rollouts import Group, Prompt
from retrain.tasks import Task

T = TypeVar("T")
Sample = Callable[[Sequence[Prompt]], list[Group]]


class PromptStream(Generic[T]):
    """Endless shuffled epochs over the training prompts (or other rows), for any batch sizes.

    The order of an epoch depends only on the seed and the epoch's number, so a position in the stream
    identifies a prompt. The state is the next position and the positions to take again.
    """

    def __init__(self, prompts: Sequence[T], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._taken = 0
        self._again: list[int] = []
        self._epoch, self._order = 0, self._shuffled(0)

    def take(self, count: int) -> list[T]:
        """Return the next prompts; batches may span epochs."""
        return [self.at(position) for position in self.take_positions(count)]

    def take_positions(self, count: int) -> list[int]:
        """Return the positions of the next prompts, those put back first."""
        repeated, self._again = self._again[:count], self._again[count:]
        start = self._taken
        self._taken += count - len(repeated)
        return [*repeated, *range(start, self._taken)]

    def put_back(self, positions: Iterable[int]) -> None:
        """Queue prompts to be taken again before any others."""
        self._again = sorted({*self._again, *positions})

    def at(self, position: int) -> T:
        epoch, number = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._prompts[self._order[number]]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self._taken, "again": list(self._again)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._taken, self._again = int(state["taken"]), list(state["again"])

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order


class Source:
    """Samples when asked: the synchronous loop. `AsyncSource` samples while the trainer trains."""

    def __init__(self, prompts: PromptStream[Prompt], sample: Sample) -> None:
        self._prompts = prompts
        self._sample = sample
        self._before = prompts.state_dict()

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return `count` groups for the policy after `version` steps, sampled `at_a_time` prompts at once."""
        self._before = self._prompts.state_dict()
        prompts = self._prompts.take(count)
        chunks = [prompts[start : start + at_a_time] for start in range(0, count, at_a_time)]
        return [group for chunk in chunks for group in self._sample(chunk)]

    def updating(self, version: int) -> AbstractContextManager[object]:
        """Return a context in which the policy is updated to this version."""
        return nullcontext()

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is sampled, for evaluation and checkpoints."""
        return nullcontext()

    def stats(self) -> PipelineStats | None:
        """Return the source's part of a step's row; None if sampling is synchronous."""
        return None

    def put_back(self) -> None:
        """Sample the last step's prompts again: the step did not fit in memory."""
        self._prompts.load_state_dict(self._before)

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        """Stop sampling."""


def open_source(config: Config, info: BackendInfo, task: Task, sample: Sample) -> Source:
    """Return the source that a configuration asks for."""
    prompts = PromptStream(task.train, config.training.seed)
    settings = flow_settings(config)
    if settings is None:
        return Source(prompts, sample)
    from retrain.trainer.async_source import AsyncSource

    workers, seed = config.rate_limiter.workers, config.training.seed
    overlaps = info.remote or info.overlaps
    return AsyncSource(prompts, sample, settings, workers=workers, seed=seed, overlaps=overlaps)
