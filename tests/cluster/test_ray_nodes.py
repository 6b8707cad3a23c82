"""What nodes must share: the directory, and where runs share permits, its locks, as two nodes prove."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_LAUNCH, EXIT_RUN_FAILED
from retrain.campaign.launchers.ray.home import Home
from retrain.control.semaphore import FileSemaphore
from tests.cluster.campaigns import Start, attempts_of, counting_runs, finish, only_campaign
from tests.cluster.ray_cluster import NODES, STRANGER, Cluster
from tests.cluster.test_ray_campaign import RAY_TOML, on

pytestmark = pytest.mark.usefixtures("ray_stranger")
SHARED = (
    'campaign.ray.permits="shared"',
    "backend.max_concurrent=1",
    "backend.options.api_latency_s=0.05",
)


def test_a_node_that_does_not_see_the_directory_is_named_and_permits_are_shared_on_it_alone(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "lone.toml").write_text(RAY_TOML)
    there = ("campaign.ray.resources={stranger=1}", "campaign.seeds=[0]", "campaign.retries=0")
    ray.hide(tmp_path)
    code, said = finish(retrain("run", "lone.toml", *on(ray, *SHARED, *there)))
    assert code == EXIT_RUN_FAILED
    assert "all runs keep to it" in said, said
    assert "No such file or directory" in said, said
    assert "whether the nodes see that directory" in said
    campaign = only_campaign(tmp_path / "logs")
    assert attempts_of(campaign) == [0]
    assert f"node:{STRANGER}" in Home(campaign).orders().options["resources"]
    ray.show(tmp_path)
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert attempts_of(campaign) == [1]
    assert not any(job.id.startswith(f"{campaign.name}.locks.") for job in ray.client.jobs())
    assert (campaign / "permits" / "permits.json").exists()


def nodes_of_tests(ray: Cluster, campaign: Path) -> list[set[str]]:
    """Return Ray's ids of the nodes that ran the parts of each test of locks of a campaign."""
    nodes = defaultdict(set)
    for job in ray.client.jobs():
        test, _, rank = job.id.rpartition("-")
        if rank and test.startswith(f"{campaign.name}.locks."):
            nodes[test].add(job.node)
    return list(nodes.values())


def test_permits_are_refused_until_two_nodes_prove_that_they_share_locks_and_a_resource_caps_runs(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    permits, gate = tmp_path / "permits", tmp_path / "gate"
    held_back = f'"tests.plugins.held"\nparams.gate = "{gate}"'
    (tmp_path / "shared.toml").write_text(RAY_TOML.replace('"tests.plugins.slow"', held_back))
    settings = (*SHARED, f"backend.throttle_dir={permits}", "campaign.ray.resources={tinker=2}")
    ray.unlock(tmp_path)
    code, said = finish(retrain("run", "shared.toml", *on(ray, *settings)))
    assert code == EXIT_LAUNCH, said
    assert "could lock a file" in said
    assert 'permits = "split"' in said
    campaign = only_campaign(tmp_path / "logs")
    ray.show(tmp_path)
    ray.hide(tmp_path)
    code, said = finish(retrain("resume", campaign))
    assert code == EXIT_LAUNCH, said
    assert "two nodes could not test" in said
    assert "exit code 127" in said
    assert "Do all nodes see" in said
    assert attempts_of(campaign) == [0, 0]
    ray.show(tmp_path)

    held = [0]
    both = [retrain("resume", campaign), retrain("run", "shared.toml", *on(ray, *settings))]
    with counting_runs(tmp_path / "logs") as alive:
        while any(one.poll() is None for one in both):
            if alive[-1:] == [NODES + 1]:  # split, one permit would be for one run
                gate.touch()
            if (permits / "permits.json").exists():
                held.append(len(FileSemaphore.inspect(permits).holders))
            time.sleep(0.2)  # looking takes time from those who are looked at
    for one in both:
        code, said = finish(one)
        assert code == 0, said
        assert "two nodes test whether they see each other's file locks" in said
    assert max(alive) == NODES + 1  # that have two of the resource, for four runs
    assert max(held) == 1
    assert [len(nodes) for nodes in nodes_of_tests(ray, campaign)] == [2, 2, 2]
    verdict = json.loads((campaign / "ray" / "locks.json").read_text())
    assert (verdict["problem"], str(permits) in verdict["directories"]) == ("", True)
