"""Where a step's rollouts come from: prompts that a curriculum chose, sampled in turn or meanwhile."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import count

import numpy as np

from retrain.backends import BackendInfo, Sampling
from retrain.base.errors import BackendMemoryError
from retrain.base.rollouts import Group, Prompt
from retrain.config.flow import FlowSettings, flow_settings
from retrain.config.resolve import plays_episodes
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.plugins.tasks import Task
from retrain.records.step_row import CurriculumSummary, PipelineStats, StepRow
from retrain.trainer.batch import SampleGroups
from retrain.trainer.budget import Ledger
from retrain.trainer.part import Loop, Part, TakenStep
from retrain.trainer.pipeline import ClosedError, Flow, Monitor
from retrain.trainer.prompts import Draw, PromptStream, open_stream
from retrain.trainer.refill import AtOnce, InTurn, Refill

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
        self._has_seeds = is_determined and plays_episodes(config)
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
    """Samples when asked: the synchronous loop. `AsyncSource` samples while the trainer trains.

    What `refill` scores is what the curriculum learns from; without one, it learns nothing.
    """

    name = "source"
    _samples_by_source = True  # whether it can be asked for groups of a source

    def __init__(
        self,
        prompts: PromptStream,
        sample: Sampler,
        refill: Refill | None = None,
        *,
        spare_fraction: float = 0.0,
        overlaps: bool = False,
    ) -> None:
        """Prepare.

        Args:
            spare_fraction: share of a step's prompts that are sampled besides; the slowest are left over.
            overlaps: whether `sample` may be called several times at once.
        """
        self._prompts = prompts
        self._sample = sample
        self._refill = refill
        self._spare_fraction, self._overlaps = spare_fraction, overlaps
        self._step: dict[Draw, Group | None] = {}  # draws of the step that is taken; None: not sampled yet
        self._rates: CurriculumSummary | None = None  # of the last step's prompts

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return `count` groups for the policy after `version` steps, sampled `at_a_time` prompts at once."""

        def sample(further: int, shares: Mapping[str, int] | None = None) -> list[Group]:
            return self._next_groups(further, at_a_time, version, shares)

        if self._refill is None:
            return sample(count)
        by_source = self._samples_by_source
        if not (self._refill.most and self._overlaps and at_a_time >= count):
            return self._refill.fill(InTurn(sample), count, version, by_source=by_source)

        def begin(further: int, shares: Mapping[str, int] | None) -> list[Callable[[], Group]]:
            return list(map(self._begun, self._prompts.draw(further, version + 1, shares)))

        with closing(AtOnce(begin, count)) as sampling:
            return self._refill.fill(sampling, count, version, by_source=by_source)

    def _begun(self, draw: Draw) -> Callable[[], Group]:
        """Return what samples the group of a draw, in any thread."""
        self._step[draw] = None

        def sample() -> Group:
            (group,) = self._sample([self._prompts.at(draw)])
            self._step[draw] = group
            return group

        return sample

    def _next_groups(
        self, count: int, at_a_time: int, version: int, shares: Mapping[str, int] | None
    ) -> list[Group]:
        """Return groups; `shares` are the prompts of each source, where the weights do not decide."""
        if at_a_time >= count and (spare := math.ceil(count * self._spare_fraction)):
            due = min(count, self._prompts.due)
            draws = self._prompts.draw(count + spare)
            self._step |= dict.fromkeys(draws)
            groups = self._sample([self._prompts.at(draw) for draw in draws], enough=count, due=due)[:count]
            done = deque(groups)  # in the prompts' order; the others are due in the next step
            for draw in draws:
                if done and done[0].prompt is self._prompts.at(draw):
                    self._step[draw] = done.popleft()
                else:
                    self._prompts.put_back([draw])
                    del self._step[draw]
            return groups
        draws = self._prompts.draw(count, version + 1, shares)
        self._step |= dict.fromkeys(draws)
        for start in range(0, count, at_a_time):
            chunk = draws[start : start + at_a_time]
            groups = self._sample([self._prompts.at(draw) for draw in chunk])
            self._step |= zip(chunk, groups, strict=True)
        return [group for draw in draws if (group := self._step[draw])]

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        self._prompts.name_if_slow(taken.number, taken.timing.step_time_s)
        return replace(row, curriculum=self._rates)

    def end_at(self, step: int) -> None:
        """Sample nothing for steps after this one until they are taken, or it is told anew."""

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Return a context in which the policy is updated to this version, which ends the step."""
        yield
        self._end_step()

    def _end_step(self) -> None:
        """Forget the step's draws, and tell the curriculum of their rewards."""
        step, self._step = self._step, {}
        sampled = {draw: group for draw, group in step.items() if group}
        rewards = self._refill.rewards_of([*sampled.values()]) if self._refill else None
        self._rates = None if rewards is None else self._prompts.observe([*sampled], rewards)

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is sampled, for evaluation and checkpoints."""
        return nullcontext()

    def exclusively(self, sample: SampleGroups, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        """Sample for another purpose, while nothing is sampled to train on."""
        with self.exclusive():
            return sample(prompts, how)

    def put_back(self, *, is_too_large: bool = True) -> None:
        """Sample the step's prompts again: it did not fit in memory, or failed."""
        self._prompts.put_back(self._step)
        self._step = {}

    def state_dict(self) -> StateDict:
        """Return the order of prompts, to which those of a step that was not finished are put back."""
        return {"prompts": self._prompts.state_dict(self._step)}

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

    _samples_by_source = False

    def __init__(
        self,
        prompts: PromptStream,
        sample: Sampler,
        settings: FlowSettings,
        refill: Refill | None = None,
        *,
        workers: int,
        seed: int,
        overlaps: bool,
    ) -> None:
        """Prepare; the first step starts the producers. A ValueError names settings that could deadlock."""
        super().__init__(prompts, sample, refill)
        self._flow: Flow[tuple[Draw, Group]] = Flow(settings, seed)
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
        self._batch_size = settings.batch_size  # of the step that is taken, without further groups
        self._under_way: set[Draw] = set()  # not in a batch yet

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        self._batch_size = count
        return super().next_groups(count, at_a_time, version)

    def _next_groups(
        self, count: int, at_a_time: int, version: int, shares: Mapping[str, int] | None
    ) -> list[Group]:
        """Return sampled groups, in production units of their own size; wait until there are enough.

        Each unit has the sources' shares; a batch, of the units that came first, has nearly the same.

        Raises:
            BaseException: a producer's error, with its own traceback.
        """
        with self._monitor.changing():
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
            self._flow.asked = self._batch_size  # the next step's, however few further groups these are
            self._ages = [self._flow.version - sample.version for sample in taken]
            stale = {draw for draw, _ in self._flow.just_dropped}
            self._flow.just_dropped.clear()
            under_way = self._under_way  # a reservoir's others were trained on before
            first = {draw: group for draw, group in (sample.item for sample in taken) if draw in under_way}
            self._step |= first
            self._under_way = under_way - first.keys() - stale
            self._prompts.put_back(stale)
            return [sample.item[1] for sample in taken]

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Keep producers from sampling with half-updated weights, then publish the new version."""
        with self._policy_lock:
            yield
            with self._monitor.changing():
                self._flow.publish(version)
                self._end_step()

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
            if not (self._is_started or steps):
                return 0
            further, unit_size = 0, self._flow.settings.unit_size
            if self._refill and steps:
                further = unit_size * math.ceil(self._refill.most * self._flow.asked / unit_size)
            return self._flow.most_started(steps, held=held) + further

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        return replace(super().after_step(loop, taken, row), pipeline=self.stats())

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
            self._flow.load_state_dict(counts | {"lost": counts["lost"] + len(self._step)})
            self._at_a_time = max(1, self._at_a_time // 2) if is_too_large else self._at_a_time
            self._prompts.put_back(self._under_way | self._step.keys())
            self._under_way, self._step, self._failure = set(), {}, None

    def state_dict(self) -> StateDict:
        """Return counts and the data cursor, to which prompts under way are put back.

        What was sampled is not saved: after a resume it would be stale.
        """
        with self._monitor:
            prompts = self._prompts.state_dict(self._under_way | self._step.keys())
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
        """Sample the next prompts again and again; an error stops all until the step is put back."""
        flow = self._flow
        with suppress(ClosedError):
            while True:
                with self._monitor.changing():
                    wait_s = self._monitor.wait_until(
                        lambda: self._failure is None and flow.may_start(), None, "a unit to be needed"
                    )
                    self._producer_wait_s += wait_s  # only now: others have added theirs meanwhile
                    unit = flow.start()
                    draws = self._prompts.draw(flow.settings.unit_size, flow.version + 1)  # or a later step
                    self._under_way.update(draws)
                    prompts = [self._prompts.at(draw) for draw in draws]
                try:
                    with self._policy_lock:
                        self._monitor.check_open("the policy")
                        version = flow.version  # read inside it, where an update publishes before it leaves
                        groups = self._in_parts(prompts)
                except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
                    with self._monitor.changing():
                        self._failure = self._failure or error
                    continue
                with self._monitor.changing():
                    flow.arrive(unit, zip(draws, groups, strict=True), version)

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


def open_source(config: Config, info: BackendInfo, task: Task, sample: Sampler, refill: Refill) -> Source:
    """Return the source that a configuration asks for."""
    data = config.data
    seed = config.training.seed
    prompts = open_stream(task.train, data.curriculum, data.curriculum_params, seed, data.source)
    settings = flow_settings(config)
    overlaps = info.remote or info.overlaps
    if settings is None:
        # the slowest prompts are left over, which may be those of one source
        has_spare = config.environment.is_single_turn and not data.source
        spare = info.spare_fraction if has_spare else 0.0
        return Source(prompts, sample, refill, spare_fraction=spare, overlaps=overlaps)
    workers = config.rate_limiter.workers
    return AsyncSource(prompts, sample, settings, refill, workers=workers, seed=seed, overlaps=overlaps)
