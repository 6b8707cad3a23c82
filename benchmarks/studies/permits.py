"""Do adaptive permits stay just below what an API bears, and how often does it have to refuse?

`python -m benchmarks.studies.permits [--seconds N] [--live] [--json]`

An API refuses requests beyond six at once.
Reported: mean permits, refusals, and the shortest time between two of them.

1. simulated: twelve callers without pauses, calls of 0.25 s (log-normal), refused ones tried again with
   backoff; the same with a limit that rises to ten, and one that falls from ten, in the middle.
2. `--live`: the tinker backend, through the SDK, with a server on the loopback (`tests.tinker_api`).
"""

from __future__ import annotations

import heapq
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.suite import script_parser
from retrain.control.rules.concurrency_limit import WAITED_S, CallFacts, ConcurrencyLimit

LIMIT, OTHER_LIMIT, CALLERS = 6, 10, 12
CALL_S, FIRST_RETRY_S = 0.25, 1.0
SETTLED_S = 10.0  # the limit is found by then


@dataclass(frozen=True, slots=True)
class Row:
    world: str
    limit: str
    seconds: float
    mean_permits: float  # from SETTLED_S on
    refusals: int
    refusals_once_known: int  # from SETTLED_S on
    shortest_gap_s: float | None  # between refusals from SETTLED_S on


@dataclass
class Record:
    """Permits over time, and when calls were refused."""

    changes: list[tuple[float, int]] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)

    def row(self, world: str, limit: str, seconds: float) -> Row:
        known = [at for at in self.refused_s if at >= SETTLED_S]
        spans = pairwise([*self.changes, (seconds, 0)])
        held = sum(n * max(0.0, end - max(since, SETTLED_S)) for (since, n), (end, _) in spans)
        gaps = [later - sooner for sooner, later in pairwise(known)]
        mean = held / (seconds - SETTLED_S)
        return Row(world, limit, seconds, mean, len(self.refused_s), len(known), min(gaps, default=None))


class Simulation:
    """Callers in a loop, an API with a limit, and the controller between them."""

    def __init__(self, limit: Callable[[float], int], seed: int) -> None:
        self._limit, self._random = limit, random.Random(seed)
        self._controller, self._record = ConcurrencyLimit(4), Record()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()
        self._waiting = [0.0] * CALLERS  # since when
        self._held = self._in_flight = 0

    def run(self, seconds: float) -> Record:
        self._record.changes.append((0.0, self._controller.permits))
        self._admit(0.0)
        while self._events[0][0] < seconds:
            now_s, _, act = heapq.heappop(self._events)
            act(now_s)
            self._admit(now_s)
        return self._record

    def _later(self, at_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._number), act))

    def _admit(self, now_s: float) -> None:
        while self._waiting and self._held < self._controller.permits:
            waited = now_s - self._waiting.pop(0) > WAITED_S
            self._held += 1
            self._send(now_s, CallFacts("sample", now_s, waited=waited), 0)

    def _send(self, now_s: float, call: CallFacts, retries: int) -> None:
        """Send a call; its `latency_s` is the time of its start until it ends."""
        if self._in_flight >= self._limit(now_s):
            self._record.refused_s.append(now_s)
            self._observe(now_s, replace(call, latency_s=now_s - call.latency_s, overloaded=True))
            pause_s = FIRST_RETRY_S * 2**retries * self._random.uniform(0.5, 1.0)
            self._later(now_s + pause_s, lambda at_s: self._send(at_s, call, retries + 1))
            return
        self._in_flight += 1
        took_s = CALL_S * self._random.lognormvariate(0, 0.3)
        self._later(now_s + took_s, lambda at_s: self._end(at_s, call, retries))

    def _end(self, now_s: float, call: CallFacts, retries: int) -> None:
        self._in_flight -= 1
        self._held -= 1
        self._waiting.append(now_s)
        if not retries:
            self._observe(now_s, replace(call, latency_s=now_s - call.latency_s))

    def _observe(self, now_s: float, call: CallFacts) -> None:
        decision = self._controller.observe(now_s, call)
        if decision.changed:
            self._record.changes.append((now_s, decision.permits))


def simulated(seconds: float, seeds: int) -> list[Row]:
    """Return the row of the worst seed, by its mean, for each kind of limit."""
    half_s = seconds / 2
    limits: dict[str, Callable[[float], int]] = {
        f"{LIMIT}": lambda _: LIMIT,
        f"{LIMIT}, then {OTHER_LIMIT}": lambda now_s: LIMIT if now_s < half_s else OTHER_LIMIT,
        f"{OTHER_LIMIT}, then {LIMIT}": lambda now_s: OTHER_LIMIT if now_s < half_s else LIMIT,
    }
    rows = []
    for name, limit in limits.items():
        found = [
            Simulation(limit, seed).run(seconds).row("simulated", name, seconds) for seed in range(seeds)
        ]
        rows.append(min(found, key=lambda row: row.mean_permits))
    return rows


def live(seconds: float) -> Row:
    """Sample through the SDK from a server that refuses; permits as a campaign's workers share them."""
    from retrain.backends import BackendSpec, Sampling
    from retrain.backends.tinker import connect
    from retrain.base.rollouts import Prompt
    from retrain.control.semaphore import FileSemaphore
    from retrain.control.semaphore.adaptive import SharedLimit
    from tests.tinker_api.running import KEY, MODEL, RunningServer, write_tokenizer

    os.environ["TINKER_API_KEY"] = KEY
    with tempfile.TemporaryDirectory() as directory:
        place, alphabet, record = Path(directory), "01234=", Record()
        tokenizer = write_tokenizer(place / "tokenizer", alphabet)
        server = RunningServer(place, alphabet, "--latency", f"{CALL_S / 2}", "--capacity", f"{LIMIT}")
        semaphore = FileSemaphore(place / "permits", 4)
        shared = SharedLimit(place / "permits", semaphore, "benchmark")
        began_s = time.monotonic()
        record.changes.append((0.0, semaphore.permits))

        def observe(call: CallFacts) -> None:
            now_s = time.monotonic() - began_s
            shared.observe(call)
            if call.overloaded:
                record.refused_s.append(now_s)
            if semaphore.permits != record.changes[-1][1]:
                record.changes.append((now_s, semaphore.permits))

        options = {"tokenizer": str(tokenizer), "requests_at_once": CALLERS, "probe": False}
        spec = BackendSpec(
            seed=1, model=MODEL, base_url=server.url, options=options,
            permit=lambda: semaphore, observe_call=observe,
        )  # fmt: skip

        backend, how = connect(spec), Sampling(1, 3, 1.0)
        prompts = [Prompt(n, f"{n % 5}=", "") for n in range(CALLERS)]
        try:
            while time.monotonic() < began_s + seconds:
                backend.sample(prompts, how)
            backend.close()
        finally:
            server.end()
        return record.row("tinker backend", f"{LIMIT}", time.monotonic() - began_s)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--live", action="store_true", help="the tinker backend too, for as many seconds")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = simulated(options.seconds, options.seeds)
    if options.live:
        rows.append(live(options.seconds))
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    table = Table("world", "limit", "seconds", "permits, mean", "refusals", "once known", "shortest gap")
    for row in rows:
        gap = "-" if row.shortest_gap_s is None else f"{row.shortest_gap_s:.1f} s"
        table.add_row(
            row.world, row.limit, f"{row.seconds:.0f}", f"{row.mean_permits:.2f}",
            str(row.refusals), str(row.refusals_once_known), gap,
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
