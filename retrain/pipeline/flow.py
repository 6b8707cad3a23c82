"""What may happen next between production and training: pure, so that every order can be tried.

`Flow` joins pace (`RateAccount`), buffer and policy versions. A producer asks `may_start`, starts a
unit, samples, reports its `arrive`, and asks `may_put` for each sample. The trainer asks for a batch
(`ask`), waits for `may_take`, takes it, updates the policy and publishes its version.

Nobody waits for ever: with a batch asked for, production is never held back while the buffer cannot
serve it, and a batch is never held back while nothing can come in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

from retrain.config.flow import FlowSettings
from retrain.controllers.rate import RateAccount
from retrain.pipeline.buffers import Buffer, Item, Sample


class Flow(Generic[Item]):
    """The state shared by producers and trainer.

    Raises:
        ValueError: the settings could deadlock or never hold their pace; says which and why.
    """

    def __init__(self, settings: FlowSettings, buffer: Buffer[Item]) -> None:
        if problems := settings.problems():
            raise ValueError("\n".join(problems))
        self.settings = settings
        self.buffer = buffer
        self.account = RateAccount(settings.samples_per_batch, settings.watermark)
        self.version = 0  # of the policy, as last published
        self.asked = settings.batch_size  # samples of the batch asked for last
        self.is_training = False  # between a batch and its update
        self.in_flight = 0  # samples being produced or waiting to come in
        self.units = 0  # production units that arrived
        self.batches = 0
        self.stale = 0  # samples dropped for their age
        self.just_dropped: list[Item] = []  # of those, the ones since the last batch
        self.lost = 0  # samples dropped because their process ended

    @property
    def ahead(self) -> int:
        """Samples that nobody trained on yet, in the buffer or on their way."""
        return self.buffer.unseen + self.in_flight

    def may_start(self) -> bool:
        """Say whether another unit, started now, would be fresh when its turn comes (or is needed now).

        The bound is that of AReaL, arXiv:2505.24298, section 5.1, counted in samples.
        """
        staleness = self.settings.max_staleness
        if staleness is None:
            return True
        batches_in_time = staleness + 1 - self.is_training
        is_fresh = self.ahead + self.settings.unit_size <= self.asked * batches_in_time
        return is_fresh or (not self.is_training and self._is_short())

    def start(self) -> None:
        """Count a unit's expected samples as on their way."""
        self.in_flight += self.settings.unit_size

    def arrive(self, samples: int) -> None:
        """Replace a unit's expected samples by those it yielded."""
        self.in_flight += samples - self.settings.unit_size
        self.units += 1

    def abandon(self) -> None:
        """Take back a unit that yields nothing because its producer ends."""
        self.in_flight -= self.settings.unit_size

    def may_put(self, version: int) -> bool:
        """Say whether a sample of this policy version may come in (a stale one always may: it is dropped)."""
        if self._is_stale(version):
            return True
        share = self.asked / self.settings.batch_size
        return self.buffer.has_room and self.account.may_produce(asked=share, starved=not self._can_serve())

    def put(self, item: Item, version: int) -> None:
        """Take a sample in, or drop it if it is stale."""
        self.in_flight -= 1
        self.account.add(1)
        if self._is_stale(version):
            self._drop([item])
        else:
            self.buffer.put(Sample(item, version))

    def ask(self, samples: int, version: int) -> None:
        """Ask for a batch for the policy of this version; what is stale for it is dropped.

        A batch that is not of the nominal size counts in proportion for the pace.

        Raises:
            ValueError: the buffer can never hold such a batch.
        """
        largest = self.settings.capacity - self.settings.threshold
        if not 1 <= samples <= largest:
            raise ValueError(f"a batch of {samples} samples: needs 1 to capacity - threshold = {largest}")
        self.asked = samples
        self.publish(version)
        if self.settings.max_staleness is not None:
            old = self.buffer.drop_older_than(self.version - self.settings.max_staleness)
            self._drop([sample.item for sample in old])

    def may_take(self) -> bool:
        """Say whether the batch asked for is there and due; once production ended, anything is."""
        if self.account.finished:
            return len(self.buffer) > 0
        share = self.asked / self.settings.batch_size
        return self._can_serve() and self.account.may_consume(share, full=not self.buffer.has_room)

    def take(self) -> list[Sample[Item]]:
        """Read the batch asked for; the last ones of an ended production may be smaller."""
        samples = min(self.asked, len(self.buffer))
        self.account.take(samples / self.settings.batch_size)
        self.batches += 1
        self.is_training = True
        return self.buffer.take(samples, draining=self.account.finished)

    def take_dropped(self) -> list[Item]:
        """Give the stale items that were dropped since the last time."""
        dropped, self.just_dropped = self.just_dropped, []
        return dropped

    def publish(self, version: int) -> None:
        """Say which version the policy has; the batch taken is done with."""
        self.version = max(self.version, version)
        self.is_training = False

    def finish(self) -> None:
        """Say that nothing more comes in."""
        self.account.finished = True

    def state_dict(self) -> dict[str, Any]:
        """Give counts and generators, JSON-able. Samples under way are counted as lost, not saved."""
        return {
            "account": self.account.state_dict(),
            "buffer": self.buffer.state_dict(),
            "version": self.version,
            "units": self.units,
            "batches": self.batches,
            "stale": self.stale,
            "lost": self.lost + self.ahead,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, with an empty buffer: the watermark is waited for again."""
        self.account.load_state_dict(state["account"])
        self.account.restart()
        self.buffer.load_state_dict(state["buffer"])
        for key in ("version", "units", "batches", "stale", "lost"):
            setattr(self, key, state[key])

    def _is_short(self) -> bool:
        """Say whether a waiting trainer would wait for ever (or needlessly long) without another unit."""
        needed = max(self.buffer.needed(self.asked), 0 if self.account.started else self.settings.watermark)
        idle = self.in_flight == 0 and not self.may_take()
        return idle or len(self.buffer) + self.in_flight < needed

    def _can_serve(self) -> bool:
        return len(self.buffer) >= self.buffer.needed(self.asked)

    def _is_stale(self, version: int) -> bool:
        oldest = self.settings.max_staleness
        return oldest is not None and self.version - version > oldest

    def _drop(self, items: list[Item]) -> None:
        self.stale += len(items)
        self.just_dropped += items
        self.account.discard(len(items))
