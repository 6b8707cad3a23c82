"""What records cost a run: rows, status, checkpoints, beside steps of 50 ms.

    python -m benchmarks.journal_overhead [--steps 200] [--step-ms 50] [--directory DIR] [--json]

The step itself is a sleep, so that status.json is rewritten as often as in a real run (at most five
times a second). Side by side: the same steps without a journal, with it, and with a checkpoint of a
small policy every 20 steps on top (which is dominated by the disk's syncs).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.suite import script_parser
from retrain.base.clock import utc_now
from retrain.base.rollouts import Group, Prompt, Rollout
from retrain.records.files import make_directory
from retrain.records.layout import RunFiles
from retrain.records.row_parts import PermitUse
from retrain.records.step_row import (
    BackPressureDecision,
    ControlSummary,
    Identity,
    StepRow,
    Timing,
    UpdateSummary,
)
from retrain.trainer import checkpoint
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.journal import Journal, choose

PHASES = ("sample", "reward", "train")
SAVE_EVERY = 20
WEIGHTS = bytes(200_000)
COMPLETION = "So 17 * 24 = 408; therefore the answer is 408.\n" * 200  # 9,400 characters


def batch() -> ScoredBatch:
    """Return a step of 8 prompts x 16 rollouts."""
    prompts = [Prompt(number, "What is 17 * 24?\n" * 20, "408") for number in range(8)]
    rollout = [Rollout(prompt, COMPLETION, (1,) * 10, np.zeros(10), ("a",) * 10, False) for prompt in prompts]
    groups = [Group(prompt, (one,) * 16) for prompt, one in zip(prompts, rollout, strict=True)]
    return ScoredBatch(groups, np.random.default_rng(0).integers(0, 2, (8, 16)).astype(float))


BATCH, ADVANTAGES = batch(), np.full((8, 16), 0.25)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    step_s = options.step_ms / 1000
    with tempfile.TemporaryDirectory(dir=options.directory) as place:
        rows = [
            measure("no records", Path(place, "a"), options.steps, step_s, journals=False),
            measure("rows and status", Path(place, "b"), options.steps, step_s),
            measure("and samples", Path(place, "s"), options.steps, step_s, shows=True),
            measure("and checkpoints", Path(place, "c"), options.steps, step_s, shows=True, saves=True),
        ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':<18}{'ms a step':>10}{'% of a step':>12}{'CPU ms a step':>15}{'worst ms':>10}")
    for row in rows:
        print(
            f"{row['what']:<18}{row['ms']:>10.3f}{row['percent']:>12.2f}{row['cpu_ms']:>15.3f}{row['worst_ms']:>10.2f}"
        )


def measure(
    what: str,
    directory: Path,
    steps: int,
    step_s: float,
    *,
    journals: bool = True,
    shows: bool = False,
    saves: bool = False,
) -> dict[str, object]:
    make_directory(directory)
    files = RunFiles(directory)
    journal = Journal(files, 1, steps)
    spent, cpu = [], 0.0
    for step in range(1, steps + 1):
        records_s = 0.0
        for phase in PHASES:
            records_s += timed(journal.phase, phase, step) if journals else 0.0
            time.sleep(step_s / len(PHASES))
        before = time.thread_time()
        if journals:
            records_s += timed(journal.row, row_of(step))
        if shows:
            records_s += timed(show, journal, step)
        if saves and step % SAVE_EVERY == 0:
            records_s += timed(save, files, journal, step)
        cpu += time.thread_time() - before
        spent.append(records_s)
    journal.close()
    mean_s = sum(spent) / steps
    return {
        "what": what,
        "steps": steps,
        "ms": 1000 * mean_s,
        "percent": 100 * mean_s / step_s,
        "cpu_ms": 1000 * cpu / steps,
        "worst_ms": 1000 * max(spent),
    }


def timed(call: Callable[..., object], *arguments: object) -> float:
    started = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - started


def row_of(step: int) -> StepRow:
    """Return a row with back pressure on."""
    x = step / 3
    return StepRow(
        identity=Identity(step=step, run="r_s0", condition="r", seed=0, attempt=1, timestamp=utc_now()),
        timing=Timing(step_time_s=x, sample_time_s=x, reward_time_s=x, train_time_s=x),
        cost=None,
        permits=PermitUse(wait_s=x, held_s=x, permits=None),
        rollouts=BATCH.summary(ADVANTAGES, x),
        episodes=None,
        update=UpdateSummary(
            updates=1,
            loss=x,
            lr=x,
            grad_norm=x,
            clip_fraction=x,
            approx_kl=x,
            entropy=x,
            update_entropy=None,
            reference_kl=x,
        ),
        control=ControlSummary(lr_factor=x, prompts_at_a_time=8, out_of_memory_at=None),
        back_pressure=BackPressureDecision(
            action="hold",
            regime="optimal",
            batch_size=8,
            p_star=x,
            sigma=x,
            kappa=x,
            utilization=x,
            throughput=x,
            reason="near the peak of the fitted curve",
        ),
        throttle=None,
        scaling=None,
        roofline=None,
        engine=None,
        pipeline=None,
        evaluation=None,
    )


def show(journal: Journal, step: int) -> None:
    chosen = choose(BATCH, ADVANTAGES, 4)
    journal.samples(step, chosen)


def save(files: RunFiles, journal: Journal, step: int) -> None:
    journal.sync()
    checkpoint.save(files.checkpoints, step, {}, lambda at: (at / "weights").write_bytes(WEIGHTS), keep=2)


if __name__ == "__main__":
    main()
