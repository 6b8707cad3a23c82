"""Ranks that end, and ranks whose rank 0 ends: none is left, and the attempt ends at once."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat

import psutil
import pytest
import torch

from retrain.backends.local.ranks import COLLECTIVE_S
from retrain.base.errors import ConfigError, InfrastructureError
from retrain.trainer.scoring import Scorer
from tests.extras.local_policies import draw, open_backend
from tests.extras.tiny_models import save_tiny_model

pytestmark = [pytest.mark.extras, pytest.mark.timeout(600)]  # each rank takes seconds to start
ENDED_S = 60.0  # a busy machine may take long to end a process


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


def children() -> list[psutil.Process]:
    alive = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if "rank_process" in " ".join(child.cmdline())]


def assert_ended(processes: Sequence[psutil.Process]) -> None:
    until_s = time.monotonic() + ENDED_S
    while left := [one for one in processes if is_alive(one)]:
        assert time.monotonic() < until_s, left
        time.sleep(0.01)


def is_alive(process: psutil.Process) -> bool:
    """Whether a process computes; it is not reaped, which is its parent's to do."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_rank_that_dies_ends_whatever_rank_0_is_doing_at_once(model):
    backend = open_backend(model, devices=3)
    ranks = children()
    assert len(ranks) == 2
    groups = draw(backend)
    scorer = Scorer("tests.plugins.pure.score", {"wait_s": 300.0})
    scorer.use_ranks(backend)
    timer = threading.Timer(0.5, ranks[1].kill)
    timer.start()
    began_s = time.monotonic()
    ended = r"rank 2 \(process \d+\) was ended by SIGKILL \(the machine may be out of memory\); all ranks"
    with pytest.raises(InfrastructureError, match=ended):
        scorer.score(groups)
    assert time.monotonic() - began_s < ENDED_S
    torch.set_grad_enabled(False)  # as left by an error that interrupts the end of `no_grad`
    backend.close()
    assert torch.is_grad_enabled()  # for what this process runs next
    assert_ended(ranks)


def test_a_rank_that_dies_is_noticed_in_another_thread_too(model):
    """Where no signal interrupts: by the end of its pipe."""
    with ThreadPoolExecutor(1) as elsewhere:
        backend = elsewhere.submit(open_backend, model, devices=2).result()
        ranks = children()
        ranks[0].kill()
        with pytest.raises(InfrastructureError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
            elsewhere.submit(draw, backend).result()
    backend.close()
    assert_ended(ranks)


def test_a_rank_that_dies_while_others_wait_for_its_piece_ends_the_attempt(model):
    backend = open_backend(model, devices=2, shard=True)
    (rank,) = children()
    timer = threading.Timer(0.3, rank.kill)
    timer.start()
    with pytest.raises(InfrastructureError, match=r"rank 1 .* was ended by SIGKILL|the ranks have lost each"):
        all(map(draw, repeat(backend)))
    backend.close()
    assert_ended([rank])


DISTURBED = """
import sys
import pytest
from retrain.backends.local.nodes import INTERFACE
from retrain.backends.local.ranks import Link, Ranks
from tests.extras.local_policies import open_backend
from tests.extras.test_rank_ends import children
start, connect = Link.start, Ranks._connect

def start_without_network(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(INTERFACE, "nothing0")
        return start(rank)

def kill(*arguments):
    children()[0].kill()
    connect(*arguments)

if sys.argv[2] == "network":
    Link.start = start_without_network
else:
    Ranks._connect = kill
open_backend(sys.argv[1], devices=2)
"""


@pytest.mark.parametrize(
    ("lost", "said"),
    [("network", "rank 1: .*nothing0"), ("rank", r"rank 1 \(process \d+\) was ended by SIGKILL")],
)
def test_a_rank_that_cannot_connect_is_not_waited_for(model, lost, said):
    """Rank 0 has begun to wait for it in torch.distributed, which it would for five minutes."""
    command = [sys.executable, "-c", DISTURBED, model, lost]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COLLECTIVE_S / 2)
    assert ended.returncode == 1  # and no rank holds its output
    assert re.search(said, ended.stderr), ended.stderr


ALONE = """
import sys, time
from tests.extras.local_policies import open_backend
backend = open_backend(sys.argv[1], devices=2)
print("ready", flush=True)
time.sleep(600)
"""


TASK = "import sys; from retrain.campaign.launchers.ray.task import work; work(*sys.argv[1:])"


def test_a_rank_does_not_outlive_rank_0_which_does_not_outlive_its_ray_task(model, tmp_path):
    script, output = tmp_path / "job.sh", tmp_path / "output.log"
    script.write_text(f"exec {shlex.join([sys.executable, '-c', ALONE, model])}\n")
    with subprocess.Popen([sys.executable, "-c", TASK, script, tmp_path, tmp_path / "stop"]) as task:
        while not output.exists() or "ready" not in output.read_text():
            assert task.poll() is None
            time.sleep(0.05)
        (rank_0,) = psutil.Process(task.pid).children()
        (rank,) = rank_0.children()
        rank.terminate()  # as a cluster does with all processes of a job; rank 0 decides
        rank.suspend()
        assert rank_0.is_running()
        task.kill()
    assert_ended([rank_0, rank])


def test_a_model_that_cannot_be_loaded_leaves_no_rank(tmp_path):
    with pytest.raises(ConfigError, match=r"\[model\].model"):
        open_backend(tmp_path / "none", devices=2)
    assert_ended(children())
