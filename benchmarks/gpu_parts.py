"""The measurements of `benchmarks.gpu`, each a function that yields lines; run one by its name.

python -m benchmarks.gpu_parts FUNCTION --device cuda --size 0.6 --directory DIRECTORY [--peaks GFLOPS GB]
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch

from benchmarks.gpu_model import SIZES, Setup, Size, save_model
from benchmarks.gpu_runs import Campaign, measured_campaign
from benchmarks.suite import Line, script_parser
from retrain.backends import Optimization, Sampling
from retrain.backends.metering import Work
from retrain.base import registry
from retrain.base.rollouts import Loss, Prompt, TrainingSample
from retrain.config.schema import BackPressureSection
from retrain.control.machine.nvidia import gpus, taken_by_others
from retrain.control.machine.throttle import LoadMeter, Scope
from retrain.control.rules.throttle import LEVELS, ThrottleRule, decide
from retrain.trainer.step_meter import classify

if TYPE_CHECKING:
    from retrain.backends.local.policy import LocalBackend

REPEATS = 3
DECODE_GOAL, TRAIN_GOAL = 40.0, 40.0  # % of the measured peak
SHARING_GOAL = 2.8  # the most runs at a time, against one after another


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--runs", type=int, nargs="*", default=[])
    parser.add_argument("--peaks", type=float, nargs=2, default=())
    parser.add_argument("--json", action="store_true", help="the only form of output")
    options = parser.parse_args()
    setup = Setup(options.device, SIZES[options.size], options.directory, options.runs, options.peaks)
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} sees no GPU; use --device cpu --small")
    print(json.dumps([asdict(line) for line in PARTS[options.part](setup)]))


def peaks(setup: Setup) -> Iterator[Line]:
    """Make the model; measure a multiplication of matrices in the type that training uses, and a copy."""
    yield Line("parameters", save_model(setup) / 1e9, "billion")
    n, device = setup.size.matrix, setup.device
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    seconds = best_time(lambda: torch.mm(a, b, out=product), device)
    yield Line(f"multiplication, {str(dtype).removeprefix('torch.')}", 2 * n**3 / seconds / 1e9, "GFLOP/s")
    source = torch.ones(setup.size.copied_mb << 18, device=device)  # four bytes each
    target = torch.empty_like(source)
    seconds = best_time(lambda: target.copy_(source), device)
    yield Line("copy, read and written", 2 * source.nbytes / seconds / 1e9, "GB/s")


def best_time(work: Any, device: str) -> float:
    """Return the seconds of the fastest of several calls, after two that warm up."""
    found = []
    for _ in range(12):
        synchronize(device)
        began_s = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began_s)
    return min(found[2:])


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def phases(setup: Setup) -> Iterator[Line]:
    """Measure tokens per second, MFU and MBU of each phase, and the peak of memory."""
    backend, prompts = setup.connected(), setup.prompts()
    found: dict[str, list[Work]] = {"prefill": [], "decode": [], "train": []}
    for _ in range(1 + REPEATS):
        samples = sampled(backend, prompts, setup.size)
        drawn = backend.take_sampling_work()
        trained = backend.update(samples, ppo(), Optimization(lr=1e-5)).work
        assert trained is not None
        for phase, work in (("prefill", drawn.prefill), ("decode", drawn.decode), ("train", trained)):
            found[phase].append(work)
    goals = {"decode": ("bandwidth", DECODE_GOAL), "train": ("arithmetic", TRAIN_GOAL)}
    for phase, works in found.items():
        best = max(works[1:], key=lambda work: work.tokens / work.time_s)  # the first one warms up
        rows = f", {setup.size.rows} rows" if phase == "decode" else ""
        yield Line(f"{phase}{rows}", best.tokens / best.time_s, "tokens/s")
        if setup.peaks:
            flops, bandwidth = setup.peaks
            hint = classify(BackPressureSection(peak_gflops=flops, peak_bw_gb_s=bandwidth), best)
            for kind, share in (("arithmetic", hint.mfu), ("bandwidth", hint.mbu)):
                aim = goals.get(phase, ("", -math.inf))
                least = aim[1] if setup.has_goals and aim[0] == kind else -math.inf
                yield Line(f"{phase}: {kind}, of the peak", 100 * (share or 0.0), "%", at_least=least)
    yield memory_line(setup)


def sampled(backend: LocalBackend, prompts: Sequence[Prompt], size: Size) -> list[TrainingSample]:
    """Return sampled rollouts with weights that differ within each group."""
    groups = backend.sample(prompts, Sampling(size.group, size.tokens, 1.0))
    return [
        TrainingSample(one, np.full(len(one.tokens), place / size.group - 0.5), 1 / size.rows, number)
        for number, group in enumerate(groups)
        for place, one in enumerate(group.rollouts)
    ]


def ppo() -> Loss:
    return Loss("ppo", registry.find_plugin("losses", "ppo"), {})


def memory_line(setup: Setup) -> Line:
    """Return the peak of this process on the device, beside the product's own estimate."""
    if setup.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    else:
        peak = torch.cuda.max_memory_reserved(setup.device)
    return Line("memory, peak", peak / 1e6, "MB", setup.estimated().peak / 1e6, "estimate")


def out_of_memory(setup: Setup) -> Iterator[Line]:
    """Train with a third of the memory that all sequences at once need; then again with all of it."""
    setup = replace(setup, options={"tokens_per_micro_batch": 10**8})
    backend = setup.connected()
    samples = sampled(backend, setup.prompts(), setup.size)
    share = limit_memory(setup.device, setup.estimated().training // 3)
    began_s = time.monotonic()
    limited = backend.update(samples, ppo(), Optimization(lr=1e-5, gpu_fraction=share))
    took_s = time.monotonic() - began_s
    backend.save(setup.directory)
    fits = json.loads((setup.directory / "local.json").read_text())["tokens_at_a_time"]["train"]
    unlimit_memory()
    del backend
    again = setup.connected().update(samples, ppo(), Optimization(lr=1e-5))
    yield Line("tokens at a time that fit", fits, "", 10**8, "asked for", at_most=10**8 - 1)
    whole_s = again.work.time_s if again.work else math.nan
    yield Line("the step, failed attempts included", took_s, "s", whole_s, "without the limit")
    yield Line("its loss, apart from the other's", abs(limited.loss - again.loss), at_most=1e-3)


def limit_memory(device: str, more: int) -> float:
    """Allow so many bytes beside what is taken; return it as a share of a GPU's memory."""
    if device != "cpu":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        return min(1.0, float((torch.cuda.memory_allocated(device) + more) / total))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, resource.RLIM_INFINITY))
    return 1.0


def unlimit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(1.0)


def several_runs(setup: Setup) -> Iterator[Line]:
    """Run as many runs at a time as asked for, and the most of them one after another."""
    size, most = setup.size, max(setup.runs)
    texts = [prompt.text for prompt in setup.prompts()]

    def campaign(runs: int, workers: int) -> Campaign:
        sizes = {"group": size.group, "tokens": size.tokens, "steps": size.steps}
        directory = setup.directory / f"{runs}_runs_{workers}_at_a_time"
        return measured_campaign(
            directory, setup.model, setup.device, texts, sizes | {"runs": runs, "workers": workers}
        )

    alone = campaign(most, 1)
    yield Line(f"{most} runs, one after another", alone.wall_s, "s")
    yield Line("one run: memory", alone.memory_mb, "MB")
    for runs in setup.runs:
        if runs == 1:
            continue
        found, share = campaign(runs, runs), runs / most
        goal = SHARING_GOAL if setup.has_goals and runs == most else -math.inf
        what = f"{runs} at a time"
        yield Line(f"{what}: sooner", share * alone.wall_s / found.wall_s, "x", at_least=goal)
        yield Line(f"{what}: sooner, start-up left out", share * alone.steps_s / found.steps_s, "x")
        yield Line(f"{what}: tokens in steps", found.tokens / found.steps_s, "tokens/s")
        yield Line(f"{what}: memory", found.memory_mb, "MB", runs * alone.memory_mb, f"{runs} x one")
        same = sum(rewards == alone.rewards[name] for name, rewards in found.rewards.items())
        exact = runs if setup.device == "cpu" else 0  # on a GPU, sums are in no fixed order
        yield Line(f"{what}: runs with the same rewards as alone", same, at_least=exact)


# ends with its standard input, so that it cannot outlive the benchmark
LOAD = """
import os, sys, threading, torch
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()
a = torch.randn(2048, 2048, device=sys.argv[1])
print("ready", flush=True)
while True:
    a = (a @ a).clamp(-1, 1)
"""


def load(setup: Setup) -> Iterator[Line]:
    """Read the machine's load as a run's throttle does, without and with a child of ours at work."""
    meters = {scope: LoadMeter(scope, gpu=setup.device != "cpu") for scope in get_args(Scope)}
    yield from loads("idle", meters)
    command = [sys.executable, "-c", LOAD, setup.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(1.0)
            yield from loads("a child at work", meters)
        finally:
            child.kill()


def loads(situation: str, meters: Mapping[str, LoadMeter]) -> Iterator[Line]:
    """Iterate over the load of each resource: all of it, and beside it what others than us take."""
    everything, others = meters["system"].read(), meters["foreign"].read()
    for name, share in everything.parts.items():
        yield Line(f"{situation}: {name}", share, "", others.parts.get(name, math.nan), "by others")
    for problem in everything.unknown:
        yield Line(f"{situation}: not read: {problem}", math.nan)
    level = decide(everything, time.monotonic(), None, ThrottleRule())[0].level
    yield Line(f"{situation}: batch that the throttle allows", 100 * LEVELS[level].batch_multiplier, "%")


def nvml(setup: Setup) -> Iterator[Line]:
    """Read the GPUs through NVML as the product does, while this process computes."""
    a = torch.randn(8192, 8192, device=setup.device, dtype=torch.bfloat16)
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
    for gpu in gpus():
        own = gpu.process_memory_bytes.get(os.getpid(), 0) / 1e6
        yield Line(f"{gpu.name}: memory", gpu.memory_used_bytes / 1e6, "MB", own, "this process")
        yield Line(f"{gpu.name}: kernels running", 100 * read(gpu.utilization), "%", at_least=50.0)
        shares = gpu.process_utilization or {}
        yield Line(f"{gpu.name}: kernels of this process", 100 * shares.get(os.getpid(), math.nan), "%")
        foreign = taken_by_others(gpu, {os.getpid()}, lambda _: True)
        yield from (Line(f"{gpu.name}: {what} of others", share) for what, share in foreign.items())


def read(share: float | None) -> float:
    return math.nan if share is None else share


PARTS = {part.__name__: part for part in (peaks, phases, out_of_memory, several_runs, load, nvml)}

if __name__ == "__main__":
    main()
