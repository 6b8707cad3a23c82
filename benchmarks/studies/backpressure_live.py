"""Back pressure on systems whose step time truly depends on concurrency, against an exhaustive sweep.

    python -m benchmarks.studies.backpressure_live [--steps 80] [--json]

Two systems: the numpy backend sampling real completions, and a server on loopback that answers real
HTTP requests with a limited pool of workers and slows down when many wait. Every batch size of the
controller's grid is measured first; then the controller starts from the configured batch and finds
its own. Reported: the batch it settled on, and its throughput over that of the sweep's best batch, both
measured again in turns: on a shared machine the best of 24 noisy figures was lucky.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: small products on two threads are slower
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from benchmarks.suite import script_parser
from retrain.backends import BackendSpec, Sampling
from retrain.backends.numpy import connect
from retrain.control.rules.backpressure import BackPressure, StepObservation
from retrain.plugins.tasks.sort import build

GROUP = 4
TOKENS_PER_ANSWER = 50
LARGEST_BATCH = 24
SWEEP_ROUNDS = 9
PAIRED_ROUNDS = 31
CALLS_PER_STEP = 10  # a call of the small policy takes milliseconds: less than a scheduler's whim
POOL = 12  # requests that the server works on at a time
SERVICE_S = (0.01, 0.03)  # of a request alone, anything between
CROWD_S = 0.0004  # more of a request's time for each other one in the house

Step = Callable[[int], int]  # prompts -> tokens


@dataclass(frozen=True)
class Result:
    system: str
    best_batch: int
    best_tokens_per_s: float
    start_fraction: float  # of the best, at the configured batch
    settled_batch: int
    settled_fraction: float  # of the best, at the batch that was settled on
    p_star: float | None  # None: not determined
    steps: int


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = [compare("numpy backend", numpy_step(), options.steps)]
    with Server() as server:
        results.append(compare("loopback HTTP, pool of 12", server.step, options.steps))
    if options.json:
        print(json.dumps([asdict(r) for r in results], indent=2, default=str))
        return
    print(f"{'system':<28}{'best b':>7}{'tokens/s':>11}{'start':>8}{'settled b':>11}{'of best':>9}{'p*':>8}")
    for r in results:
        p_star = "-" if r.p_star is None else f"{r.p_star:.1f}"
        print(
            f"{r.system:<28}{r.best_batch:>7}{r.best_tokens_per_s:>11.0f}{r.start_fraction:>8.2f}"
            f"{r.settled_batch:>11}{r.settled_fraction:>9.2f}{p_star:>8}"
        )


def compare(system: str, step: Step, steps: int, start: int = 2) -> Result:
    """Sweep all sizes, then let the controller choose."""
    sweep = exhaustive_sweep(step)
    control = BackPressure(start, GROUP, max_batch_size=LARGEST_BATCH, throttle_margin=1.0)
    chosen: list[int] = []
    for _ in range(steps):
        batch = control.batch_size
        started = time.perf_counter()
        tokens = step(batch)
        decision = control.observe(StepObservation(batch, GROUP, tokens, time.perf_counter() - started))
        chosen.append(batch)
    settled = statistics.mode(chosen[-steps // 3 :])
    best = max(sweep, key=lambda batch: sweep[batch])
    return Result(
        system,
        best,
        sweep[best],
        measured_fraction(step, start, best),
        settled,
        measured_fraction(step, settled, best),
        decision.p_star,
        steps,
    )


def exhaustive_sweep(step: Step) -> dict[int, float]:
    """Tokens per second of every batch, the median over rounds: a busy moment hits all batches alike."""
    found: dict[int, list[float]] = {batch: [] for batch in range(1, LARGEST_BATCH + 1)}
    for _ in range(SWEEP_ROUNDS):
        for batch, rates in found.items():
            rates.append(measured_rate(step, batch))
    return {batch: statistics.median(rates) for batch, rates in found.items()}


def measured_fraction(step: Step, batch: int, best: int) -> float:
    """Throughput of a batch over that of the best one, the median over pairs of neighbouring steps."""
    return statistics.median(
        measured_rate(step, batch) / measured_rate(step, best) for _ in range(PAIRED_ROUNDS)
    )


def measured_rate(step: Step, batch: int) -> float:
    started = time.perf_counter()
    tokens = step(batch)
    return tokens / (time.perf_counter() - started)


def numpy_step() -> Step:
    """Sample real completions from the embedded policy."""
    task = build(seed=0)
    backend = connect(BackendSpec(seed=0, alphabet=task.alphabet, options={"hidden": 96}))
    how = Sampling(GROUP, max_tokens=24, temperature=1.0)

    def step(batch: int) -> int:
        calls = [backend.sample(task.train[:batch], how) for _ in range(CALLS_PER_STEP)]
        return sum(len(r.tokens) for groups in calls for group in groups for r in group.rollouts)

    return step


class Server:
    """Answers requests with a limited pool; everybody in the house makes each request slower."""

    def __enter__(self) -> Server:
        pool, house = threading.Semaphore(POOL), Count()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                with house, pool:
                    time.sleep(random.uniform(*SERVICE_S) + CROWD_S * house.now)
                body = b"x" * TOKENS_PER_ANSWER
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._clients = ThreadPoolExecutor(LARGEST_BATCH * GROUP)
        self._local = threading.local()
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.shutdown()
        self._server.shutdown()
        self._server.server_close()

    def step(self, batch: int) -> int:
        """Make batch x group requests at once."""
        return sum(self._clients.map(self._ask, range(batch * GROUP)))

    def _ask(self, _: int) -> int:
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection("127.0.0.1", self._server.server_port)
        self._local.connection.request("GET", "/")
        return len(self._local.connection.getresponse().read())


class Count:
    """How many are inside."""

    def __init__(self) -> None:
        self.now = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.now += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.now -= 1


if __name__ == "__main__":
    main()
