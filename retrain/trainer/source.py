"""Where a step's rollouts come from: the order of prompts, sampled in turn with training or meanwhile."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Generic, TypeVar

import numpy as np

from retrain.backends import BackendInfo
from retrain.config.flow import FlowSettings, flow_settings
from retrain.config.schema import Config
from retrain.controllers import StateDict
from retrain.errors import BackendMemoryError, InterruptedRunError
from retrain.pipeline.rollout_pipeline import RolloutPipeline
from retrain.records.step_row import PipelineStats
from retrain.rollouts import Group, Prompt
from retrain.tasks import Task

T = TypeVar("T")
Sampler = Callable[..., list[Group]]  # of prompts; `enough` and `due` as in `retrain.backends.Sampling`


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

    @property
    def due(self) -> int:
        """How many positions were put back, which are taken before any others."""
        return len(self._again)

    def at(self, position: int) -> T:
        epoch, number = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._prompts[self._order[number]]

    def state_dict(self) -> StateDict:
        return {"taken": self._taken, "again": list(self._again)}

    def load_state_dict(self, state: StateDict) -> None:
        self._taken, self._again = int(state["taken"]), list(state["again"])

    def _shuffled(self, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()
        return order


class Source:
    """Samples when asked: the synchronous loop. `AsyncSource` samples while the trainer trains."""

    def __init__(self, prompts: PromptStream[Prompt], sample: Sampler, spare_fraction: float = 0.0) -> None:
        """`spare_fraction` of prompts beyond a step's are sampled, and the slowest left to the next step."""
        self._prompts = prompts
        self._sample = sample
        self._spare_fraction = spare_fraction
        self._before = prompts.state_dict()

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return `count` groups for the policy after `version` steps, sampled `at_a_time` prompts at once."""
        self._before = self._prompts.state_dict()
        try:
            if at_a_time >= count and (spare := math.ceil(count * self._spare_fraction)):
                return self._first_groups(count, spare)
            prompts = self._prompts.take(count)
            chunks = [prompts[start : start + at_a_time] for start in range(0, count, at_a_time)]
            return [group for chunk in chunks for group in self._sample(chunk)]
        except InterruptedRunError:
            self.put_back()
            raise

    def _first_groups(self, count: int, spare: int) -> list[Group]:
        """Return the groups that are sampled first; the other prompts are due in the next step."""
        due = min(count, self._prompts.due)
        positions = self._prompts.take_positions(count + spare)
        groups = self._sample([self._prompts.at(p) for p in positions], enough=count, due=due)[:count]
        done = deque(groups)  # in the prompts' order
        for position in positions:
            if done and done[0].prompt is self._prompts.at(position):
                done.popleft()
            else:
                self._prompts.put_back([position])
        return groups

    def end_at(self, step: int) -> None:
        """Sample nothing for steps after this one until they are taken, or it is told anew."""

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

    def state_dict(self) -> StateDict:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self._prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        """Stop sampling."""


class AsyncSource(Source):
    """Samples in its own threads while the trainer trains.

    Each prompt of an epoch is trained on exactly once, in whatever order workers finish (a reservoir trains
    on some more than once). Prompts under way when a run ends are sampled again after a resume; prompts
    whose samples became stale because the batch shrank are sampled again before any others.

    A unit that does not fit in memory is sampled in halves, and so are later units.
    """

    def __init__(
        self,
        prompts: PromptStream[Prompt],
        sample: Sampler,
        settings: FlowSettings,
        *,
        workers: int,
        seed: int,
        overlaps: bool,
    ) -> None:
        super().__init__(prompts, sample)
        self._settings = settings
        self._workers = workers if overlaps else 1
        self._seed = seed
        self._policy = nullcontext() if overlaps else threading.Lock()
        self._order = threading.Lock()
        self._is_held = False
        self._pipeline = self._open()
        self._is_started = False
        self._at_a_time = settings.unit_size  # prompts
        self._under_way: set[int] = set()  # positions not yet trained on
        self._last: set[int] = set()  # positions that the last batch trained on for the first time

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return sampled groups, in production units of their own size; wait until there are enough."""
        if not self._is_started:
            self._pipeline.publish(version)
            self._pipeline.start()
            self._is_started = True
        batch = self._pipeline.next_batch(count, version)
        stale = {position for position, _ in batch.stale}
        with self._order:
            self._last = self._under_way & {position for position, _ in batch.items}
            self._under_way -= self._last | stale
            self._prompts.put_back(stale)
        return [group for _, group in batch.items]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Keep producers from sampling with half-updated weights, then publish the new version."""
        with self._policy:
            yield
            self._pipeline.publish(version)

    def exclusive(self) -> AbstractContextManager[object]:
        """Return the lock that keeps producers out; none if the backend takes concurrent calls."""
        return self._policy

    def end_at(self, step: int) -> None:
        self._settings = replace(self._settings, steps=step)  # of a pipeline that is opened later, too
        self._pipeline.end_at(step)

    def hold(self, is_held: bool) -> None:
        """Whether to sample nothing ahead of the step that is taken."""
        self._is_held = is_held
        self._pipeline.hold(is_held)

    def most_groups(self, steps: int, *, held: bool) -> float:
        """Return how many groups may at most be sampled until so many more steps (0 or 1) are taken."""
        return self._pipeline.most_started(steps, held=held) if self._is_started or steps else 0

    def stats(self) -> PipelineStats:
        return replace(self._pipeline.stats(), prompts_at_a_time=self._at_a_time)

    def put_back(self) -> None:
        """Restart with half as many prompts at a time; the last batch is sampled again."""
        counts = self._pipeline.state_dict()
        counts["lost"] += len(self._last)
        self.close()
        with self._order:
            self._at_a_time = max(1, self._at_a_time // 2)
            self._prompts.put_back(self._under_way | self._last)
            self._under_way, self._last = set(), set()
        self._pipeline, self._is_started = self._open(), False
        self._pipeline.load_state_dict(counts)

    def state_dict(self) -> StateDict:
        """Return counts and the data cursor, to which prompts under way are put back."""
        pipeline = self._pipeline.state_dict()  # before the cursor: its lock is the outer one
        with self._order:
            cursor = self._prompts.state_dict()
            again = sorted({*cursor["again"], *self._under_way})
            prompts = {**cursor, "again": again}
            return {"prompts": prompts, "pipeline": pipeline, "at_a_time": self._at_a_time}

    def load_state_dict(self, state: StateDict) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._at_a_time = state.get("at_a_time", self._at_a_time)
        if "pipeline" in state:
            self._pipeline.load_state_dict(state["pipeline"])

    def close(self) -> None:
        self._pipeline.close()

    def _open(self) -> RolloutPipeline[tuple[int, Group]]:
        pipeline = RolloutPipeline(
            lambda _, positions, prompts: list(zip(positions, self._in_parts(prompts), strict=True)),
            self._settings,
            workers=self._workers,
            seed=self._seed,
            exclusive=lambda: self._policy,
            begin=self._next_prompts,
        )
        pipeline.hold(self._is_held)
        return pipeline

    def _next_prompts(self) -> tuple[list[int], list[Prompt]]:
        with self._order:
            positions = self._prompts.take_positions(self._settings.unit_size)
            self._under_way.update(positions)
            return positions, [self._prompts.at(position) for position in positions]

    def _in_parts(self, prompts: Sequence[Prompt]) -> list[Group]:
        """Sample as many prompts at a time as fit in memory."""
        at_a_time = min(self._at_a_time, len(prompts))
        groups: list[Group] = []
        while len(groups) < len(prompts):
            try:
                groups += self._sample(prompts[len(groups) : len(groups) + at_a_time])
            except BackendMemoryError:
                if at_a_time == 1:
                    raise
                at_a_time //= 2
                with self._order:
                    self._at_a_time = min(self._at_a_time, at_a_time)
        return groups


def open_source(config: Config, info: BackendInfo, task: Task, sample: Sampler) -> Source:
    """Return the source that a configuration asks for."""
    prompts = PromptStream(task.train, config.training.seed)
    settings = flow_settings(config)
    if settings is None:
        spare = info.spare_fraction if config.environment.is_single_turn else 0.0
        return Source(prompts, sample, spare)
    workers, seed = config.rate_limiter.workers, config.training.seed
    overlaps = info.remote or info.overlaps
    return AsyncSource(prompts, sample, settings, workers=workers, seed=seed, overlaps=overlaps)
