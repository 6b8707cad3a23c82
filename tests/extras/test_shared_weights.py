"""Runs on one machine's CPU map the same frozen weights, with the same numbers as alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrain.backends import Optimization
from retrain.backends.local import policy as policy_module
from retrain.backends.local.shared_weights import share
from retrain.errors import ConfigError
from tests.extras.local_policies import as_samples, draw, loss_named, open_backend
from tests.extras.tiny_models import save_tiny_model
from tests.full_disk import files_of_at_most

HOW = Optimization(lr=1e-2, temperature=0.8)
USER = """
import sys
from transformers import AutoModelForCausalLM
from retrain.backends.local.shared_weights import share
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).requires_grad_(False)
shared = share(model)
print(shared and shared.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(policy_module, "TINY_PARAMETERS", 1)
    return tmp_path / f"retrain-weights-{os.getuid()}"


def trained(backend) -> list[torch.Tensor]:
    """Train two steps; return the adapters and what was sampled."""
    found = []
    for _ in range(2):
        samples = as_samples(draw(backend))
        backend.update(samples, loss_named("ppo"), HOW)
        found += [torch.tensor(sample.rollout.tokens) for sample in samples]
    return found + [p.detach().clone() for p in backend.policy.trainable().values()]


def test_shared_weights_give_the_numbers_of_a_run_alone_and_outlive_no_user(model, folder):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", USER, model], text=True, **pipes) as user:
        assert user.stdout.readline().strip().startswith(str(folder))
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
        user.kill()
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
