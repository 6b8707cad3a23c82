"""What a worker weighs while benchmarks run: its memory, and its GPU memory as the driver tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest

from retrain.base.errors import InfrastructureError
from retrain.campaign.calibrate import benchmarks
from retrain.control.machine import nvidia, process_tree
from retrain.control.machine.nvidia import Gpu

GIB = 1 << 30


def gpu(memory: dict[int, int]) -> Gpu:
    return Gpu(0, "GPU-1", "H200", 100 * GIB, sum(memory.values()), None, memory, None)


def test_a_worker_on_several_gpus_weighs_their_sum_and_strangers_nothing():
    two = [gpu({1: 5 * GIB, 2: 4 * GIB, 9: 60 * GIB}), gpu({2: 3 * GIB})]
    assert benchmarks.heaviest_on(two, {1, 2, 3}) == 7 * GIB
    assert benchmarks.heaviest_on([], {1}) == 0


@pytest.fixture
def gpus_are(monkeypatch):
    """Set what a look at the GPUs finds."""
    return partial(monkeypatch.setattr, nvidia, "gpus")


@pytest.fixture
def worker():
    """A process of ours that waits."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.communicate(b"\n", timeout=60)


def test_what_a_worker_holds_on_a_gpu_is_seen_while_it_runs(worker, gpus_are):
    gpus_are(lambda: [gpu(dict.fromkeys(process_tree(os.getpid()), 3 * GIB) | {1: 50 * GIB})])
    with benchmarks.WorkerMemory() as memory:
        while not (memory.most_on_gpus and memory.most):
            os.sched_yield()
    assert (memory.most_on_gpus, memory.most > 1e6) == (3 * GIB, True)


def test_a_gpu_that_cannot_be_read_is_none(gpus_are):
    def refuse() -> list[Gpu]:
        raise InfrastructureError("needs nvidia-ml-py")

    gpus_are(refuse)
    assert nvidia.known_gpus() == []
