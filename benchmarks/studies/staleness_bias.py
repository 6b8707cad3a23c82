"""Is what is sampled beside training trained on, slow or not?

`python -m benchmarks.studies.staleness_bias [--full] [--json]`

Real threads sample prompts whose latency is their
length: one in ten takes 13 times as long (two speeds), or lengths are log-normal (by length). Each
cell takes steps with so many workers and so large a `max_staleness`, in three orders:

- ours: units come in in the order of their starts, so training waits for a slow one.
- arrival: units come in as they arrive, and what got stale meanwhile is dropped.
- deadline: units come in as they arrive, and training waits only when one would get stale: the least
  that loses nothing. It is the reference for what waiting costs; batches still begin with what is quick.

Reported of each: prompts sampled, and of those whose fate is known how many were lost; the share of the
slowest tenth that was lost; the mean latency of what was sampled and of what was trained on; the largest
distance between the distributions of latency (Kolmogorov-Smirnov) of the prompts trained on and of as
many prompts from the start of the stream, which a loop in turn would have trained on; batches a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice, product

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.suite import script_parser
from retrain.base.rollouts import Group, Prompt
from retrain.config.flow import FlowSettings
from retrain.config.schema import SourceSection
from retrain.plugins.curricula import Curriculum
from retrain.trainer.pipeline import Flow, Item, Unit, VersionedItem
from retrain.trainer.prompts import Draw, Lane, PromptStream
from retrain.trainer.source import AsyncSource

BATCH_SIZE = 4
TRAIN_S = 0.002
FAST_S = 0.0015
Latencies = NDArray[np.float64]


class ByArrival(Flow[Item]):
    """The order that is compared with: who is sampled first comes in first."""

    def arrive(self, unit: Unit[Item], items: Iterable[Item], version: int) -> None:
        self.under_way.remove(unit)
        self.under_way.insert(sum(other.items is not None for other in self.under_way), unit)
        super().arrive(unit, items, version)


class ByDeadline(ByArrival[Item]):
    """The least waiting that loses nothing: only what is under way is waited for that would get stale."""

    def may_take(self) -> bool:
        versions = sorted(unit.version for unit in self.under_way if unit.items is None)
        left = [version + (self.settings.max_staleness or 0) - self.version for version in versions]
        is_safe = all(number <= self.asked * max(0, age) for number, age in enumerate(left, start=1))
        return is_safe and super().may_take()

    def take(self) -> list[VersionedItem[Item]]:
        self.buffer._unseen.sort(key=lambda sample: sample.version)
        return super().take()


class InOrder(Curriculum):
    """Prompts as they are given."""

    def __init__(self) -> None:
        self._rest = count()

    def choose(self, count: int) -> list[int]:
        return list(islice(self._rest, count))


class Forgetful(PromptStream):
    """What is put back is lost, and not drawn again."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        super().__init__(prompts, [Lane(SourceSection(), 0, len(prompts), InOrder(), "in_order")], seed=0)
        self.lost: list[int] = []

    def put_back(self, draws: Iterable[Draw]) -> None:
        self.lost += [draw.position for draw in draws]


ORDERS: dict[str, type[Flow[tuple[Draw, Group]]]] = {
    "ours": Flow,
    "arrival": ByArrival,
    "deadline": ByDeadline,
}


@dataclass(frozen=True, slots=True)
class Row:
    latency: str
    order: str
    workers: int
    staleness: int
    sampled: int
    trained: int
    lost: int
    slowest_lost_percent: float
    sampled_mean_ms: float
    trained_mean_ms: float
    distance: float
    batches_per_s: float


def two_speeds(count: int) -> Latencies:
    slow = np.random.default_rng(0).random(count) < 0.1
    return np.where(slow, 13 * FAST_S, FAST_S)


def by_length(count: int) -> Latencies:
    return FAST_S * np.random.default_rng(0).lognormal(0.0, 1.0, count)


def distance(ones: Latencies, others: Latencies) -> float:
    """Return the largest difference of the two empirical distribution functions."""
    places = np.sort(np.concatenate([ones, others]))
    shares = [np.searchsorted(np.sort(some), places, side="right") / len(some) for some in (ones, others)]
    return float(np.max(np.abs(shares[0] - shares[1])))


def measure(latency: str, order: str, workers: int, staleness: int, steps: int) -> Row:
    latencies = KINDS[latency](steps * BATCH_SIZE * 4 + 1000)
    sampled: list[int] = []

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        for prompt in prompts:
            time.sleep(latencies[prompt.id])
            sampled.append(prompt.id)
        return [Group(prompt, ()) for prompt in prompts]

    settings = FlowSettings(BATCH_SIZE, capacity=BATCH_SIZE * (staleness + 1), max_staleness=staleness)
    stream = Forgetful([Prompt(number, "", "") for number in range(len(latencies))])
    source = AsyncSource(stream, sample, settings, workers=workers, seed=0, overlaps=True)
    source._flow = ORDERS[order](settings)
    trained: list[int] = []
    started_s = time.monotonic()
    for version in range(steps):
        trained += [group.prompt.id for group in source.next_groups(BATCH_SIZE, BATCH_SIZE, version)]
        with source.updating(version + 1):
            time.sleep(TRAIN_S)
    elapsed_s = time.monotonic() - started_s
    source.close()
    lost = stream.lost
    settled = np.array(trained + lost)
    is_slow = latencies[settled] > SLOW_S[latency]
    was_lost = np.arange(len(settled)) >= len(trained)
    return Row(
        latency=latency,
        order=order,
        workers=workers,
        staleness=staleness,
        sampled=len(sampled),
        trained=len(trained),
        lost=len(lost),
        slowest_lost_percent=100 * float(was_lost[is_slow].mean()) if is_slow.any() else 0.0,
        sampled_mean_ms=1000 * float(latencies[sampled].mean()),
        trained_mean_ms=1000 * float(latencies[trained].mean()),
        distance=distance(latencies[trained], latencies[: len(trained)]),
        batches_per_s=steps / elapsed_s,
    )


SLOW_S = {"two speeds": FAST_S, "by length": FAST_S * float(np.exp(1.2816))}  # about one in ten is slower
KINDS: dict[str, Callable[[int], Latencies]] = {"two speeds": two_speeds, "by length": by_length}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--full", action="store_true", help="more workers, ages and steps")
    arguments = parser.parse_args()
    workers, ages = ((1, 2, 4, 8, 16), (1, 2, 4, 8)) if arguments.full else ((1, 4, 16), (1, 2, 8))
    steps = 200 if arguments.full else 80
    cells = product(KINDS, workers, ages, ORDERS)
    rows = [measure(latency, order, count, age, steps) for latency, count, age, order in cells]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table(title=f"{steps} steps of {BATCH_SIZE} prompts, training {1000 * TRAIN_S:g} ms")
    for name in asdict(rows[0]):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in asdict(row).values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
