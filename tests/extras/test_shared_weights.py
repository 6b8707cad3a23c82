"""Runs on one machine's CPU map the same frozen weights, with the same numbers as alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from retrain.backends import Optimization
from retrain.backends.engines.openai import LONGEST_WHOLE
from retrain.backends.local import policy as policy_module
from retrain.backends.local.loading import share
from retrain.base.errors import ConfigError
from tests.extras.completions_server import CompletionsServer, serve
from tests.extras.local_policies import as_samples, draw, loss_named, open_backend
from tests.extras.test_engine_streams import run_on
from tests.extras.tiny_models import save_tiny_model
from tests.full_disk import files_of_at_most
from tests.semaphore_processes import wait_until

HOW = Optimization(lr=1e-2, temperature=0.8)
REALLY_LONG = LONGEST_WHOLE + 1  # tokens, which are streamed
WORKER = """
import runpy
from retrain.backends.local import policy
policy.TINY_PARAMETERS = 1
runpy.run_module("retrain.trainer.worker", run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=128)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[CompletionsServer]:
    """A server, in this process, whose own weights are too few to be shared."""
    with serve(model) as running:
        yield running


@pytest.fixture
def folder(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(policy_module, "TINY_PARAMETERS", 1)
    return temporary / f"retrain-weights-{os.getuid()}"


def trained(backend) -> list[torch.Tensor]:
    """Train two steps; return the adapters and what was sampled."""
    found = []
    for _ in range(2):
        samples = as_samples(draw(backend))
        backend.update(samples, loss_named("ppo"), HOW)
        found += [torch.tensor(sample.rollout.tokens) for sample in samples]
    return found + [p.detach().clone() for p in backend.policy.trainable().values()]


@contextmanager
def held_worker(server: CompletionsServer, model: str, directory: Path) -> Iterator[None]:
    """Run a worker that waits for its samples; kill it at the end, when it frees its places on the server."""
    server.is_held = lambda body: True
    files = run_on(server, model, directory, max_tokens=REALLY_LONG)
    command = [sys.executable, "-c", WORKER, str(files.directory)]
    with (directory / "printed").open("w") as printed:
        worker = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=printed, stderr=printed)
    try:
        wait_until(lambda: server.running == 1)
        yield
    finally:
        worker.kill()
        worker.wait()
    wait_until(lambda: server.running == 0)
    assert (directory / "printed").read_text() == ""


def test_shared_weights_give_the_numbers_of_a_run_alone_and_outlive_no_user(server, model, folder, tmp_path):
    with held_worker(server, model, tmp_path / "run"):
        assert len(list(folder.glob("*.bin"))) == 1
        alone, sharing = open_backend(model, share_weights=False), open_backend(model)
        assert len(list(folder.glob("*.bin"))) == 1  # the other process's file
        before = [p.clone() for p in sharing.policy.causal.parameters() if not p.requires_grad]
        for ours, theirs in zip(trained(sharing), trained(alone), strict=True):
            assert torch.equal(ours, theirs)
        after = [p for p in sharing.policy.causal.parameters() if not p.requires_grad]
        assert all(map(torch.equal, before, after))
        mapped = {p.untyped_storage().data_ptr() for p in after}
        assert len(mapped) == 1
        sharing.close()
        assert len(list(folder.glob("*.bin"))) == 1
    assert len(list(folder.glob("*.bin"))) == 1
    backend = open_backend(model, rank=8)
    assert len(list(folder.glob("*.bin"))) == 1
    backend.close()
    assert {path.name for path in folder.iterdir()} == {"folder.lock"}


def test_a_write_to_shared_weights_stays_in_its_process(model, folder):
    first, second = (open_backend(model).policy.causal for _ in range(2))
    one, other = (next(p for p in m.parameters() if not p.requires_grad) for m in (first, second))
    assert torch.equal(one, other)
    kept = other.detach().clone()
    one.detach().add_(1.0)
    assert torch.equal(other, kept)


def test_a_folder_that_cannot_be_used_is_named_and_a_full_disk_costs_nothing(model, folder):
    frozen = open_backend(model, share_weights=False).policy.causal
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        share(frozen)
    folder.rmdir()
    folder.mkdir(mode=0o700)
    with files_of_at_most(4096):
        assert share(frozen) is None
    assert not list(folder.glob("*.bin"))
