"""Does the limiter hold its ratio when production is rough, and does overlap pay?

`python -m benchmarks.rate_limiter [--full] [--json]`. Two questions, each answered side by side in
one run with real threads:

1. pace: producers with jitter, stalls and a threefold change of speed fill a reservoir; training
   takes batches at its own speed. Reported: the worst deviation of samples per batch from the target
   over any 100 consecutive batches, with and without the limiter.
2. overlap: sampling waits for an answer over a loopback socket as long as a training step takes.
   Reported: the plain loop's time over that of sampling meanwhile, with training that waits (a device,
   an API) and with training that computes in this process.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count

from rich.console import Console
from rich.table import Table

from benchmarks.suite import script_parser
from retrain.base.rollouts import Group, Prompt
from retrain.config.flow import FlowSettings
from retrain.trainer.prompts import open_stream
from retrain.trainer.source import AsyncSource

BATCH_SIZE = 8
PACE = 3.5  # samples per batch: each is read about twice
SAMPLE_S = 0.001  # median; with jitter and stalls about 1.65 times as long on average
TRAIN_S = PACE * 1.65 * SAMPLE_S  # training and production match until the speed changes
WINDOW = 100  # batches


@dataclass(frozen=True, slots=True)
class PaceRow:
    limiter: str
    speed: str
    batches: int
    samples_per_batch: float
    worst_percent: float  # over any WINDOW batches
    producer_idle_percent: float
    consumer_idle_percent: float
    seconds: float


@dataclass(frozen=True, slots=True)
class OverlapRow:
    training: str
    sampling_s: float  # in the plain loop
    training_s: float  # in the plain loop
    meanwhile_s: float
    speedup: float
    best_possible: float  # if the shorter of both cost nothing
    stale_dropped: int
    mean_age: float


@contextmanager
def sampling(produce: Callable[[], None], settings: FlowSettings) -> Iterator[AsyncSource]:
    """Return a source of empty groups, of which `produce` takes the time of a unit."""

    def sample(prompts: Sequence[Prompt]) -> list[Group]:
        produce()
        return [Group(prompt, ()) for prompt in prompts]

    prompts = open_stream([Prompt(number, "", "") for number in range(10_000)], "shuffle", {}, 0)
    source = AsyncSource(prompts, sample, settings, workers=1, seed=0, overlaps=True)
    try:
        yield source
    finally:
        source.close()


def rough_producer(speed_change: float, half: int) -> Callable[[], None]:
    """Return a producer with log-normal jitter, a stall now and then, and another speed after `half`."""
    rng, number = random.Random(0), count()

    def produce() -> None:
        n = next(number)
        pause_s = SAMPLE_S * rng.lognormvariate(0, 0.8)
        if n % 150 == 149:
            pause_s += 40 * SAMPLE_S
        time.sleep(pause_s / speed_change if n >= half else pause_s)

    return produce


def measure_pace(pace: float | None, speed_change: float, batches: int) -> PaceRow:
    settings = FlowSettings(
        batch_size=BATCH_SIZE, capacity=512, buffer="reservoir", watermark=16, samples_per_batch=pace
    )
    produced, start = [], time.monotonic()
    with sampling(rough_producer(speed_change, int(batches * PACE / 2)), settings) as source:
        for step in range(batches):
            source.next_groups(BATCH_SIZE, BATCH_SIZE, step)
            produced.append(source.stats().produced)
            time.sleep(TRAIN_S)
        stats = source.stats()
    ratios = [(last - first) / WINDOW for first, last in zip(produced, produced[WINDOW:], strict=False)]
    return PaceRow(
        limiter="on" if pace else "off",
        speed=f"x{speed_change:.2g} half-way",
        batches=batches,
        samples_per_batch=(produced[-1] - produced[0]) / (batches - 1),
        worst_percent=100 * max(abs(ratio / PACE - 1) for ratio in ratios),
        producer_idle_percent=100 * stats.producer_idle_fraction,
        consumer_idle_percent=100 * stats.consumer_idle_fraction,
        seconds=time.monotonic() - start,
    )


@contextmanager
def slow_server(answer_s: float) -> Iterator[Callable[[], None]]:
    """Return a `produce` that asks a server on loopback and waits `answer_s` for each batch."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            while question := connection.recv(1):
                time.sleep(answer_s)
                connection.sendall(question * BATCH_SIZE)

    server = threading.Thread(target=serve, daemon=True)
    server.start()
    with listener, socket.create_connection(listener.getsockname()) as client:

        def produce() -> None:
            client.sendall(b"?")
            client.recv(BATCH_SIZE, socket.MSG_WAITALL)

        yield produce
    server.join(timeout=5)


def computing(seconds: float) -> None:
    """Compute in this process for as long as `seconds` of its CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(200))


def measure_overlap(training: str, train: Callable[[float], None], step_s: float, steps: int) -> OverlapRow:
    sampling_s = training_s = 0.0
    with slow_server(step_s) as produce:
        for _ in range(steps):
            start = time.monotonic()
            produce()
            sampled = time.monotonic()
            train(step_s)
            sampling_s += sampled - start
            training_s += time.monotonic() - sampled
    settings = FlowSettings(
        batch_size=BATCH_SIZE, capacity=2 * BATCH_SIZE, max_staleness=1, unit_size=BATCH_SIZE
    )
    ages: list[float] = []
    with slow_server(step_s) as produce:
        start = time.monotonic()
        with sampling(produce, settings) as source:
            for version in range(steps):
                source.next_groups(BATCH_SIZE, BATCH_SIZE, version)
                ages.append(source.stats().sample_age_mean)
                with source.updating(version + 1):
                    train(step_s)
            meanwhile_s = time.monotonic() - start
        dropped = source.stats().dropped
    plain_s = sampling_s + training_s
    return OverlapRow(
        training=training,
        sampling_s=sampling_s,
        training_s=training_s,
        meanwhile_s=meanwhile_s,
        speedup=plain_s / meanwhile_s,
        best_possible=plain_s / max(sampling_s, training_s),
        stale_dropped=dropped,
        mean_age=sum(ages) / len(ages),
    )


def show(title: str, rows: list[PaceRow] | list[OverlapRow]) -> None:
    table = Table(title=title)
    for name in asdict(rows[0]):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in asdict(row).values()))
    Console(width=140).print(table)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    parser.add_argument("--full", action="store_true", help="five times as many batches and steps")
    arguments = parser.parse_args()
    scale = 5 if arguments.full else 1
    pace = [
        measure_pace(limit, speed_change, 500 * scale)
        for speed_change in (3, 1 / 3)
        for limit in (PACE, None)
    ]
    overlap = [
        measure_overlap("waits", time.sleep, 0.03, 100 * scale),
        measure_overlap("computes", computing, 0.03, 100 * scale),
    ]
    if arguments.json:
        print(
            json.dumps({"pace": [asdict(r) for r in pace], "overlap": [asdict(r) for r in overlap]}, indent=2)
        )
        return
    show(f"Samples per batch, target {PACE:g}, worst over any {WINDOW} batches", pace)
    show(
        "Sampling and training take 30 ms each; the plain loop's time over that of sampling meanwhile",
        overlap,
    )


if __name__ == "__main__":
    main()
