"""Connections of ranks between nodes; that Slurm starts them is tested in tests/cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from retrain.backends.local.nodes import INTERFACE, Nodes
from retrain.base.errors import ConfigError, InfrastructureError
from tests.slurm_pieces import command

RANK = """
import os, socket
from retrain.backends.local import nodes
port = int(os.environ[nodes.PORT])
silent = socket.create_connection(("127.0.0.1", port))
with socket.create_connection(("127.0.0.1", port)) as stranger:
    stranger.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
key = os.environ[nodes.KEY]
try:
    os.environ[nodes.KEY] = "00" * 32
    nodes.connect()
    raise SystemExit("a wrong key is taken")
except (nodes.AuthenticationError, OSError, EOFError):
    os.environ[nodes.KEY] = key
rank = nodes.connect()
rank.connection.send((nodes.KEY in os.environ, os.environ[nodes.INTERFACE]))
try:
    rank.connection.recv()
except EOFError:
    raise SystemExit(3)
"""


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a job on two nodes."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    monkeypatch.setenv(INTERFACE, "")  # is set, and restored after the test
    monkeypatch.delenv(INTERFACE)


def srun(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setenv("PATH", f"{command(directory, 'srun', script)}:{os.environ['PATH']}")


def test_only_a_rank_that_has_the_key_is_taken(tmp_path, monkeypatch):
    (tmp_path / "rank.py").write_text(RANK)
    srun(tmp_path, monkeypatch, f"exec {sys.executable} {tmp_path}/rank.py")
    monkeypatch.setattr("retrain.backends.local.nodes.PROOF_S", 1.0)
    nodes = Nodes(nodes=2, devices=1)
    try:
        (remote,) = nodes.remotes.values()
        assert remote.connection.recv() == (False, "lo")
        assert os.environ[INTERFACE] == "lo"
    finally:
        nodes.close()
    assert nodes.process.returncode == 3


def test_ranks_that_cannot_be_started_are_told_at_once(tmp_path, monkeypatch):
    srun(tmp_path, monkeypatch, "exit 7")
    with pytest.raises(InfrastructureError, match="srun exited with code 7"):
        Nodes(nodes=2, devices=1)
    with pytest.raises(ConfigError, match=r"\[backend.options\].nodes: got 3, and this job has 2"):
        Nodes(nodes=3, devices=1)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"\[backend.options\].nodes: srun, .* is not on the PATH"):
        Nodes(nodes=2, devices=1)
