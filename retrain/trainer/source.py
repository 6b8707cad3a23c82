"""Where a step's rollouts come from: prompts in order, sampled in turn with training, or meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import count
from typing import Generic, TypeVar

import numpy as np

from retrain.backends import BackendInfo, Sampling
from retrain.base.errors import BackendMemoryError, InterruptedRunError
from retrain.base.rollouts import Group, Prompt
from retrain.config.flow import FlowSettings, flow_settings
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.plugins.tasks import Task
from retrain.records.step_row import PipelineStats, StepRow
from retrain.trainer.batch import SampleGroups
from retrain.trainer.budget import Ledger
from retrain.trainer.part import Loop, Part, TakenStep
from retrain.trainer.pipeline import ClosedError, Flow, Monitor

T = TypeVar("T")


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


Sampler = Callable[..., list[Group]]  # of prompts; `enough` and `due` as in `retrain.backends.Sampling`
PLAYS = 0x706C6179  # keeps the random numbers of episodes apart from all others of the run
CLOSING_S = 5.0  # a producer that samples for longer is abandoned


class TrainingSampler:
    """Samples the groups of steps, and learns what a rollout costs.

    Where a seed determines the backend's samples, each play of episodes has one of its own: a play that a
    stop interrupts is the same when it is repeated.
    """

    def __init__(self, config: Config, info: BackendInfo, sample: SampleGroups, ledger: Ledger) -> None:
        self._table, self._sample, self._ledger = config.training, sample, ledger
        is_determined = (info.deterministic or info.answers_turns) and self._table.seed >= 0
        self._has_seeds = is_determined and not config.environment.is_single_turn
        self._place = (0, count())  # one value, because threads of their own may sample

    def begin(self, step: int) -> None:
        """Begin the step after `step` complete ones, or begin it again."""
        self._place = (step, count())

    def __call__(self, prompts: Sequence[Prompt], enough: int = 0, due: int = 0) -> list[Group]:
        table, seed = self._table, None  # None: the backend's own generator decides
        if self._has_seeds:
            step, plays = self._place
            seed = int(np.random.SeedSequence([PLAYS, table.seed, step, next(plays)]).generate_state(1)[0])
        how = Sampling(table.group_size, table.max_tokens, table.temperature, seed, enough, due)
        with self._ledger.sampling(len(prompts) * table.group_size):
            return self._sample(prompts, how)


class Source(Part):
    """Samples when asked: the synchronous loop. `AsyncSource` samples while the trainer trains."""

    name = "source"

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

    def exclusively(self, sample: SampleGroups, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        """Sample for another purpose, while nothing is sampled to train on."""
        with self.exclusive():
            return sample(prompts, how)

    def put_back(self, *, is_too_large: bool = True) -> None:
        """Sample the last step's prompts again: the step did not fit in memory, or failed."""
        self._prompts.load_state_dict(self._before)

    def state_dict(self) -> StateDict:
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: StateDict) -> None:
        self._prompts.load_state_dict(state["prompts"])

    def stop(self) -> None:
        """Begin to sample no more prompts."""


class AsyncSource(Source):
    """Samples in its own threads while the trainer trains; `Flow` decides what happens when.

    Each prompt of an epoch is trained on exactly once, in whatever order workers finish (a reservoir trains
    on some more than once). Prompts under way when a run ends are sampled again after a resume; prompts
    whose samples became stale because the batch shrank are sampled again before any others. Groups carry the
    policy version published when their sampling started.

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
        """Prepare; the first step starts the producers. A ValueError names settings that could deadlock."""
        super().__init__(prompts, sample)
        self._flow: Flow[tuple[int, Group]] = Flow(settings, seed)
        self._policy_lock = nullcontext() if overlaps else threading.Lock()
        self._threads = [
            threading.Thread(target=self._work, name=f"producer-{number}", daemon=True)
            for number in range(workers if overlaps else 1)
        ]
        self._monitor = Monitor()  # guards all that follows, the flow and the order of prompts
        self._is_started = False
        self._started_s = time.monotonic()
        self._producer_wait_s = self._consumer_wait_s = 0.0
        self._ages: list[int] = []  # of the latest batch, in policy versions
        self._failure: BaseException | None = None  # of a producer
        self._at_a_time = settings.unit_size  # prompts
        self._under_way: set[int] = set()  # positions not yet trained on
        self._last: set[int] = set()  # positions that the last batch trained on for the first time

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return sampled groups, in production units of their own size; wait until there are enough.

        Raises:
            BaseException: a producer's error, with its own traceback.
        """
        with self._monitor.changing():
            self._last = set()  # that step is done: what fails from now on puts none of it back
            self._flow.ask(count, version)
            if not self._is_started:
                self._is_started, self._started_s = True, time.monotonic()
                for thread in self._threads:
                    thread.start()
            self._monitor.notify_all()
            self._consumer_wait_s += self._monitor.wait_until(
                lambda: self._failure is not None or self._flow.may_take(), None, "samples to train on"
            )
            if self._failure is not None:
                raise self._failure
            taken = self._flow.take()
            self._ages = [self._flow.version - sample.version for sample in taken]
            stale = {position for position, _ in self._flow.just_dropped}
            self._flow.just_dropped.clear()
            self._last = self._under_way & {sample.item[0] for sample in taken}
            self._under_way -= self._last | stale
            self._prompts.put_back(stale)
            return [sample.item[1] for sample in taken]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Keep producers from sampling with half-updated weights, then publish the new version."""
        with self._policy_lock:
            yield
            with self._monitor.changing():
                self._flow.publish(version)

    def exclusive(self) -> AbstractContextManager[object]:
        """Return the lock that keeps producers out; none if the backend takes concurrent calls."""
        return self._policy_lock

    def end_at(self, step: int) -> None:
        with self._monitor.changing():
            self._flow.steps = step

    def hold(self, is_held: bool) -> None:
        """Whether to sample nothing ahead of the step that is taken."""
        with self._monitor.changing():
            self._flow.is_held = is_held

    def most_groups(self, steps: int, *, held: bool) -> float:
        """Return how many groups may at most be sampled until so many more steps (0 or 1) are taken."""
        with self._monitor:
            return self._flow.most_started(steps, held=held) if self._is_started or steps else 0

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        return replace(row, pipeline=self.stats())

    def stats(self) -> PipelineStats:
        """Return counts of the run so far, and the waits of this attempt."""
        with self._monitor:
            flow, ages = self._flow, self._ages
            elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
            return PipelineStats(
                ratio=flow.account.ratio,
                producer_wait_s=self._producer_wait_s,
                consumer_wait_s=self._consumer_wait_s,
                producer_idle_fraction=min(1.0, self._producer_wait_s / (elapsed_s * len(self._threads))),
                consumer_idle_fraction=min(1.0, self._consumer_wait_s / elapsed_s),
                sample_age_mean=sum(ages) / len(ages) if ages else 0.0,
                sample_age_max=max(ages, default=0),
                dropped=flow.stale,
                lost=flow.lost,
                outstanding=flow.ahead,
                produced=flow.account.produced,
                units=flow.units,
                batches=flow.batches,
                batches_per_unit=flow.batches / flow.units if flow.units else None,
                prompts_at_a_time=self._at_a_time,
            )

    def put_back(self, *, is_too_large: bool = True) -> None:
        """Sample again all that was, and the last batch; if too large, half as many prompts at a time."""
        with self._monitor.changing():
            counts = self._flow.state_dict()
            self._flow.load_state_dict(counts | {"lost": counts["lost"] + len(self._last)})
            self._at_a_time = max(1, self._at_a_time // 2) if is_too_large else self._at_a_time
            self._prompts.put_back(self._under_way | self._last)
            self._under_way, self._last, self._failure = set(), set(), None

    def state_dict(self) -> StateDict:
        """Return counts and the data cursor, to which prompts under way are put back.

        What was sampled is not saved: after a resume it would be stale.
        """
        with self._monitor:
            cursor = self._prompts.state_dict()
            prompts = cursor | {"again": sorted({*cursor["again"], *self._under_way})}
            return {"prompts": prompts, "pipeline": self._flow.state_dict(), "at_a_time": self._at_a_time}

    def load_state_dict(self, state: StateDict) -> None:
        super().load_state_dict(state)
        if "pipeline" in state:  # not after a change of the configuration to asynchronous sampling
            self._at_a_time = state["at_a_time"]
            self._flow.load_state_dict(state["pipeline"])

    def stop(self) -> None:
        with self._monitor:
            self._monitor.close()

    def close(self) -> None:
        """Stop, and wait for all threads; one that is stuck in sampling is abandoned, a daemon."""
        self.stop()
        ends_at = time.monotonic() + CLOSING_S
        for thread in self._threads:
            if thread.ident is not None:  # a machine without room for more threads starts some only
                thread.join(max(0.0, ends_at - time.monotonic()))

    def _work(self) -> None:
        with suppress(ClosedError):
            while True:
                self._produce_unit()

    def _produce_unit(self) -> None:
        """Sample the next prompts; an error stops all producers until the step is put back."""
        flow = self._flow
        with self._monitor.changing():
            wait_s = self._monitor.wait_until(
                lambda: self._failure is None and flow.may_start(), None, "a unit to be needed"
            )
            self._producer_wait_s += wait_s  # only now: other producers have added theirs meanwhile
            unit, positions = flow.start(), self._prompts.take_positions(flow.settings.unit_size)
            self._under_way.update(positions)
            prompts = [self._prompts.at(position) for position in positions]
        try:
            with self._policy_lock:
                self._monitor.check_open("the policy")
                version = flow.version  # read inside it, where an update publishes before it leaves
                groups = self._in_parts(prompts)
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
            with self._monitor.changing():
                self._failure = self._failure or error
            return
        with self._monitor.changing():
            flow.arrive(unit, zip(positions, groups, strict=True), version)

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
                with self._monitor:
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
