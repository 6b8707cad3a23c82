"""A Slurm and a Ray for all tests of this folder, and the command line as its users call it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.campaigns import Start
from tests.cluster.ray_cluster import STRANGER
from tests.cluster.ray_cluster import Cluster as RayCluster
from tests.cluster.slurm_cluster import Cluster

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def slurm_daemons() -> Iterator[Cluster]:
    """One cluster for the whole session; not being able to start it is a failure, never a skip."""
    home = Path(tempfile.mkdtemp(prefix="retrain-slurm-"))  # short: a socket's path has its limits
    home.chmod(0o755)
    cluster = Cluster(home, array_size=5)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def slurm(slurm_daemons: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, idle and whole before each test and after it."""
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, slurm_daemons.environment[name])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield slurm_daemons
    slurm_daemons.repair()


@pytest.fixture
def stranger(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster with its fifth node, which sees other locks and other files."""
    try:
        slurm.start_stranger()
        yield slurm
    finally:
        slurm.stop_stranger()


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[RayCluster]:
    """One cluster for the whole session; not being able to start it is a failure, never a skip."""
    home = Path(tempfile.mkdtemp(prefix="retrain-ray-"))  # short: a socket's path has its limits
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = RayCluster(home)
        try:
            yield cluster
        finally:
            cluster.stop()
            shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def ray(ray_nodes: RayCluster, monkeypatch: pytest.MonkeyPatch) -> RayCluster:
    """The cluster, idle and whole before each test."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    ray_nodes.repair()
    return ray_nodes


@pytest.fixture(scope="module")
def ray_stranger(ray_nodes: RayCluster) -> Iterator[RayCluster]:
    """The cluster with its stranger, for the tests of a file."""
    ray_nodes.repair()
    ray_nodes.start_stranger()
    yield ray_nodes
    ray_nodes.kill(STRANGER)


@pytest.fixture
def retrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the command line in an empty directory; its messages are on standard error."""
    monkeypatch.chdir(tmp_path)
    started: list[subprocess.Popen[str]] = []

    def call(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "retrain", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:  # a test that failed may have left some
        process.kill()
        process.communicate()
