"""Overlaps sampling and training: producer threads fill a buffer from which the trainer takes batches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic

from retrain.config.flow import FlowSettings
from retrain.controllers import StateDict
from retrain.pipeline import ClosedError, Monitor
from retrain.pipeline.buffers import Item, build
from retrain.pipeline.flow import Flow
from retrain.records.step_row import PipelineStats


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """The samples of one step."""

    items: tuple[Item, ...]
    ages: tuple[int, ...]  # policy versions between sampling and training, one per item
    stale: tuple[Item, ...]  # dropped because of their age since the previous batch


class RolloutPipeline(Generic[Item]):
    """Producer threads on one side, the training loop on the other.

    Every item carries the policy version published when its sampling started; `Flow` decides what happens
    when. Items that become stale, because batches shrank, are dropped and counted.

    Args:
        produce: takes the policy version and returns one unit of items; called by `workers` threads at once.
        settings: buffer, pace and age limit.
        workers: producer threads.
        seed: for the buffer's random reads.
        exclusive: returns a context that is held around every call of `produce`. If sampling and updating
            must not overlap (shared weights), return a lock and hold it around the update and `publish` too.
        begin: returns further arguments of `produce` for the next unit; called under the pipeline's lock in
            starting order, so a unit's contents do not depend on which thread is faster.

    Raises:
        ValueError: the settings could deadlock or never keep their pace; names the keys.
    """

    def __init__(
        self,
        produce: Callable[..., Sequence[Item]],
        settings: FlowSettings,
        *,
        workers: int = 1,
        seed: int = 0,
        exclusive: Callable[[], AbstractContextManager[object]] = nullcontext,
        begin: Callable[[], tuple[Any, ...]] = tuple,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers: got {workers}; needs at least 1")
        self._flow: Flow[Item] = Flow(settings, build(settings, seed))
        self._produce = produce
        self._begin = begin
        self._exclusive = exclusive
        self._monitor = Monitor()
        self._started_s = time.monotonic()
        self._producer_wait_s = 0.0
        self._consumer_wait_s = 0.0
        self._ages: tuple[int, ...] = ()  # of the latest batch
        self._failure: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"producer-{i}", daemon=True) for i in range(workers)
        ]

    def start(self) -> None:
        """Start the producers; entering the context does so too."""
        self._started_s = time.monotonic()
        for thread in self._threads:
            thread.start()

    def next_batch(self, samples: int, version: int, timeout_s: float | None = None) -> Batch[Item]:
        """Wait for a batch of `samples` items for the policy of this version, none older than allowed.

        Raises:
            ValueError: the buffer can never hold such a batch.
            ClosedError: the pipeline was closed.
            TimeoutError: no batch within `timeout_s`.
            BaseException: a producer's error, with its own traceback.
        """
        with self._monitor:
            self._flow.ask(samples, version)
            self._monitor.notify_all()
            self._consumer_wait_s += self._monitor.wait_until(
                lambda: self._failure is not None or self._flow.may_take(), timeout_s, "samples to train on"
            )
            if self._failure is not None:
                raise self._failure
            taken = self._flow.take()
            self._ages = tuple(self._flow.version - sample.version for sample in taken)
            items, stale = tuple(sample.item for sample in taken), tuple(self._flow.take_dropped())
            self._monitor.notify_all()
            return Batch(items, self._ages, stale)

    def publish(self, version: int) -> None:
        """Announce that the policy was updated to this version."""
        with self._monitor:
            self._flow.publish(version)
            self._monitor.notify_all()

    def hold(self, is_held: bool) -> None:
        """Whether to start nothing but what a batch that is waited for needs."""
        with self._monitor:
            self._flow.is_held = is_held
            self._monitor.notify_all()

    def end_at(self, steps: int) -> None:
        """Start nothing for batches after so many policy versions, unless they are asked for."""
        with self._monitor:
            self._flow.steps = steps
            self._monitor.notify_all()

    def most_started(self, batches: int, *, held: bool) -> float:
        """Return how many samples can at most come in until so many more batches (0 or 1) are trained on."""
        with self._monitor:
            return self._flow.most_started(batches, held=held)

    def close(self, timeout_s: float = 5.0) -> bool:
        """Wake and end all threads, and wait for the producers; return whether all ended in time.

        A thread stuck in `produce` is abandoned; as a daemon thread it does not keep the process alive.
        """
        with self._monitor:
            self._monitor.close()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def stats(self) -> PipelineStats:
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
            )

    def state_dict(self) -> StateDict:
        """Return counts and the buffer's random generator, JSON-able.

        Items are not saved: after a resume they would be stale. They count as lost. Each `Batch` tells which
        items were handed out or dropped, so that the caller can produce the others again.
        """
        with self._monitor:
            return self._flow.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; call it before `start`."""
        with self._monitor:
            self._flow.load_state_dict(state)

    def __enter__(self) -> RolloutPipeline[Item]:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _work(self) -> None:
        """Produce until the pipeline is closed; pass errors to the trainer's thread."""
        try:
            while True:
                self._produce_unit()
        except ClosedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again in the trainer's thread
            with self._monitor:
                self._failure = self._failure or error
                self._monitor.notify_all()

    def _produce_unit(self) -> None:
        with self._monitor:
            self._producer_wait_s += self._monitor.wait_until(
                self._flow.may_start, None, "a unit to be needed"
            )
            unit, arguments = self._flow.start(), self._begin()
        with self._exclusive():
            version = self._flow.version  # read inside it, where an update publishes before it leaves
            items = self._produce(version, *arguments)
        with self._monitor:
            self._flow.arrive(unit, items, version)
            self._monitor.notify_all()
