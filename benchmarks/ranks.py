"""Steps of one policy on one and on several ranks, each with one thread of this machine's cores.

A step samples groups and trains on all of them, with random advantages. `fixed` has as many groups on any
number of ranks, `growing` as many for each. Rows have the median time of a step, and what part of it rank 0
did not sample or train: `exchanged` for messages and tensors, on one rank what the code for several costs it;
`waited` for other ranks. Numbers of ranks take turns, so that a machine's load meets each. `speed-up` is the
work per second relative to one rank; `by processor` the same per second of rank 0 on a processor, which other
processes of the machine do not change. With `--shard`, several ranks also take turns with layers in pieces.
`weights` are the bytes of a rank's weights and pieces, `memory` the resident bytes of the largest rank after
a step, of which several hundred MB are libraries; ranks do not share weights then. On a machine with several
GPUs, ranks are one on each, of a larger model; `memory` is then that of rank 0's GPU.

    python -m benchmarks.ranks [--ranks 1 2] [--steps N] [--model DIRECTORY] [--groups N] [--shard]
        [--all-weights] [--nodes N] [--json]

With `--nodes N`, ranks on as many nodes of a Slurm job, one on each, also take turns. Outside of a job, it is
one of the Slurm of this project's tests, whose nodes are all on this machine and share its cores.
With `--all-weights`, these are trained, and not adapters. With `--kills N`, a run on two ranks loses any of
them N times, at random moments of its starts and steps. Its rows are compared with those of a run that loses
none.
"""

from __future__ import annotations

import json
import math
import os
import random
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.suite import script_parser
from retrain.control.machine.nvidia import gpu_count
from tests.cluster.waiting import await_that

# of a step, rank 0's on a processor, exchanged, waited; and bytes of weights, resident bytes
Times = tuple[float, float, float, float, int, int]
Kind = tuple[int, int, bool]  # ranks, nodes, whether layers are in pieces
STARTING_S, STEP_S = 8.0, 0.1  # for ranks to load the model, about; longer than a step
GROUPS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 8, 8, 16, 32


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1, 2, and as many as GPUs")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", type=Path, help="default: a small one with random weights")
    parser.add_argument("--groups", type=int, default=GROUPS)
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--all-weights", action="store_true")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kills", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.nodes > 1 and "SLURM_JOB_ID" not in os.environ:
        print(said_in_a_job(arguments.nodes))
        return
    with tempfile.TemporaryDirectory() as directory:
        if arguments.kills:
            more = ", shard = true" * arguments.shard + ", lora = false" * arguments.all_weights
            print(json.dumps(kill_ranks(Path(directory), arguments.kills, more), indent=2))
            return
        gpus = gpu_count()
        device = "cuda" if gpus > 1 else "cpu"
        model = arguments.model or make_model(Path(directory), device)
        rows = measure(
            model,
            arguments.ranks or sorted({1, 2, *([gpus] if gpus > 1 else [])}),
            arguments.steps,
            groups=arguments.groups,
            shard=arguments.shard,
            lora=not arguments.all_weights,
            device=device,
            nodes=arguments.nodes,
        )
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))


def said_in_a_job(nodes: int) -> str:
    """Return what this command writes in a job on so many nodes of a Slurm that is started for it."""
    from tests.cluster.slurm_cluster import Cluster

    with tempfile.TemporaryDirectory(prefix="slurm-") as home:
        Path(home).chmod(0o755)
        cluster, output = Cluster(Path(home)), Path(home) / "output"
        try:
            cluster.start()
            command = [sys.executable, "-m", "benchmarks.ranks", *sys.argv[1:]]
            asked = [f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=2", f"--output={output}"]
            done = cluster.run(
                "sbatch", "--parsable", *asked, f"--wrap={shlex.join(command)} 2>{output}.errors"
            )
            job = done.stdout.strip()
            await_that("the job's end", lambda: not cluster.run("squeue", "-h", "-j", job).stdout)
            return output.read_text() or Path(f"{output}.errors").read_text()
        finally:
            cluster.stop()


def make_model(directory: Path, device: str) -> Path:
    from tests.extras.tiny_models import save_tiny_model

    hidden, layers = (1024, 16) if device == "cuda" else (256, 4)
    return Path(save_tiny_model(directory, hidden=hidden, layers=layers))


@dataclass
class Clock:
    """Seconds of rank 0 in calls of its `Ranks` that are not its own sampling and training."""

    exchanged_s: float = 0.0
    waited_s: float = 0.0
    inner_s: float = field(default=0.0, repr=False)

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a call that adds its time to a sum, less that of calls within it."""

        def run(*arguments: Any, **named: Any) -> Any:
            began_s, inner_s = time.perf_counter(), self.inner_s
            try:
                return call(*arguments, **named)
            finally:
                took_s = time.perf_counter() - began_s
                own_s = took_s - (self.inner_s - inner_s)
                if name:
                    setattr(self, name, getattr(self, name) + own_s)
                self.inner_s = inner_s + took_s

        return run


def measure(
    model: Path,
    numbers: list[int],
    steps: int,
    *,
    groups: int = GROUPS,
    shard: bool = False,
    lora: bool = True,
    device: str = "cpu",
    nodes: int = 1,
) -> list[dict[str, Any]]:
    """Return a row for each number of ranks and each kind of work."""
    places = [*((count, 1) for count in numbers), *([(nodes, nodes)] if nodes > 1 else [])]
    kinds: list[Kind] = [
        (*place, cut) for place in places for cut in ((False, True) if shard and place[0] > 1 else (False,))
    ]
    times: dict[tuple[str, Kind], list[Times]] = {
        (work, kind): [] for work in ("fixed", "growing") for kind in kinds
    }
    for round_ in range(2):  # the second after all others, if the machine's load changes
        for kind in kinds:
            count, on_nodes, cut = kind
            works = {work: groups_of(work, count, groups) for work in ("fixed", "growing")}
            options: dict[str, Any] = {
                "devices": count // on_nodes,
                "nodes": on_nodes,
                "shard": cut,
                "lora": lora,
                "device": device,
                "share_weights": not shard,
            }
            for work, found in run(model, options, works, -(-steps // 2), round_).items():
                times[work, kind] += found
    rows = []
    for (work, (count, on_nodes, cut)), found in times.items():
        step_s, cpu_s, exchanged_s, waited_s, weights, memory = map(median, zip(*found, strict=True))
        rows.append(
            {
                "work": work,
                "ranks": count,
                "nodes": on_nodes,
                "layers": "pieces" if cut else "whole",
                "groups": groups_of(work, count, groups),
                "steps": len(found),
                "step_s": step_s,
                "cpu_s": cpu_s,
                "exchanged_percent": 100 * exchanged_s / step_s,
                "waited_percent": 100 * waited_s / step_s,
                "weight_bytes": weights,
                "memory_bytes": memory,
            }
        )
    alone = {row["work"]: row for row in rows if row["ranks"] == 1}
    for row in rows:
        for name, time_s in (("speed_up", "step_s"), ("speed_up_cpu", "cpu_s")):
            one = alone.get(row["work"])
            row[name] = row["groups"] / row[time_s] * one[time_s] / one["groups"] if one else math.nan
    return rows


def groups_of(work: str, count: int, groups: int) -> int:
    return groups * (count if work == "growing" else 1)


def run(
    model: Path, options: dict[str, Any], works: dict[str, int], steps: int, seed: int
) -> dict[str, list[Times]]:
    """Return the times of steps, by the kind of work, of which there are so many groups."""
    import torch

    from retrain.backends import BackendSpec, Optimization, Sampling
    from retrain.backends.local import connect
    from retrain.base import registry
    from retrain.base.rollouts import Loss, Prompt, TrainingSample

    options = {"local_files_only": True, "threads": 1, **options}
    backend = connect(BackendSpec(seed=seed, model=str(model), lora_rank=16, options=options))
    clock, ranks = Clock(), backend.ranks
    together = clock.timed(ranks.together, "exchanged_s")
    calls: dict[str, Callable[..., Any]] = {
        "together": lambda commands, own: together(commands, clock.timed(own, "")),
        "reduce": clock.timed(ranks.reduce, "exchanged_s"),
        "spread": clock.timed(ranks.spread, "exchanged_s"),
        "are_ready": clock.timed(ranks.are_ready, "waited_s"),
        "answers": clock.timed(ranks.answers, "waited_s"),
    }
    for name, call in calls.items():
        setattr(ranks, name, call)
    loss, choice = Loss("ppo", registry.find_plugin("losses", "ppo")), np.random.default_rng(seed)

    def step(groups: int) -> Times:
        clock.exchanged_s = clock.waited_s = 0.0
        began_s, cpu_s = time.perf_counter(), time.process_time()
        prompts = [Prompt(number, f"{number}=".rjust(PROMPT_TOKENS, "0"), "") for number in range(groups)]
        samples = [
            TrainingSample(
                rollout,
                np.full(len(rollout.tokens), choice.standard_normal()),
                1.0 / (groups * GROUP_SIZE * MAX_TOKENS),
                number,
            )
            for number, group in enumerate(backend.sample(prompts, Sampling(GROUP_SIZE, MAX_TOKENS, 1.0)))
            for rollout in group.rollouts
        ]
        backend.update(samples, loss, Optimization(lr=1e-5))
        took = time.perf_counter() - began_s, time.process_time() - cpu_s
        on_gpu = options["device"] == "cuda"
        memory = torch.cuda.max_memory_allocated() if on_gpu else resident_bytes()
        return (*took, clock.exchanged_s, clock.waited_s, weights, memory)

    pieces = (p.to_local() if hasattr(p, "to_local") else p for p in backend.policy.causal.parameters())
    weights = sum(piece.nbytes for piece in pieces)
    try:
        step(works["fixed"])  # allocators, caches
        return {work: [step(groups) for _ in range(steps)] for work, groups in works.items()}
    finally:
        backend.close()


def kill_ranks(directory: Path, kills: int, more: str) -> dict[str, Any]:
    """Kill ranks of a run with more options so many times; return what came of it."""
    from retrain.campaign import supervise
    from retrain.records.run_state import read_attempts
    from tests.extras.tiny_models import save_tiny_model
    from tests.long.test_ranked_campaign import rows_of, run

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    supervise.FIRST_RETRY_S, supervise.LONGEST_RETRY_S = 0.05, 0.1
    model = save_tiny_model(directory / "model", hidden=32)
    steps = 4 * kills  # more than are trained between two kills
    killer = Killer(directory / "killed" / "logs", kills)
    threading.Thread(target=killer.run, daemon=True).start()
    killed = run(directory / "killed", model, 2, "local", steps, more)
    undisturbed = run(directory / "undisturbed", model, 2, "inline", steps, more)
    attempts = read_attempts(killed / "attempts.jsonl")
    return {
        "kills": len(killer.ended_s),
        "kills_of_rank": killer.ranks,
        "kills_before_a_step": killer.early,
        "attempts": len(attempts),
        "seconds_until_all_ranks_ended": {"median": median(killer.ended_s), "longest": max(killer.ended_s)},
        "rows": len(rows_of(killed)),
        "rows_are_equal": rows_of(killed) == rows_of(undisturbed),
    }


class Killer:
    """Kills any rank of the worker that runs: at some moment of its start, or in one of its steps."""

    def __init__(self, logs: Path, kills: int) -> None:
        self.logs, self.kills = logs, kills
        self.ranks, self.early, self.ended_s = [0, 0], 0, list[float]()

    def run(self) -> None:
        """Kill until there were enough; a rank that outlives the others for a minute is an error."""
        from tests.extras.test_rank_ends import assert_ended
        from tests.long.test_ranked_campaign import ranks_of_worker

        chance = random.Random(0)
        while len(self.ended_s) < self.kills:
            before = self._rows()
            while not ranks_of_worker():
                time.sleep(0.01)
            if chance.random() < 1 / 3:
                time.sleep(chance.uniform(0, STARTING_S))
            else:
                while self._rows() == before:
                    time.sleep(0.01)
                time.sleep(chance.uniform(0, STEP_S))
            ranks = ranks_of_worker()
            if not ranks:
                continue
            self.early += self._rows() == before
            number = chance.randrange(len(ranks))
            began_s = time.perf_counter()
            ranks[number].kill()
            assert_ended(ranks)
            self.ended_s.append(time.perf_counter() - began_s)
            self.ranks[number] += 1

    def _rows(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.logs.glob("*/runs/*/metrics.jsonl"))


def resident_bytes() -> int:
    """Return the memory of the rank that has most, of this process and its children."""
    process = psutil.Process()
    return max(int(each.memory_info().rss) for each in (process, *process.children()))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "work      ranks  nodes  layers  groups   step s  speed-up  by processor  exchanged %  waited %"
        "  weights MB  memory MB"
    ]
    lines += [
        f"{row['work']:<8}{row['ranks']:>7}{row['nodes']:>7}{row['layers']:>8}{row['groups']:>8}{row['step_s']:>9.3f}"
        f"{row['speed_up']:>10.2f}{row['speed_up_cpu']:>14.2f}{row['exchanged_percent']:>13.2f}"
        f"{row['waited_percent']:>10.2f}{row['weight_bytes'] / 1e6:>12.1f}{row['memory_bytes'] / 1e6:>11.0f}"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
