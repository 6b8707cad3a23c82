"""What nodes must share: the directory, and where runs share permits, its locks, as two nodes prove."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from retrain.errors import EXIT_LAUNCH, EXIT_RUN_FAILED
from retrain.launchers.ray.home import Home
from retrain.semaphore import FileSemaphore
from tests.cluster.campaigns import Start, attempts_of, counting_runs, finish, only_campaign, results
from tests.cluster.ray_cluster import STRANGER, Cluster
from tests.cluster.test_ray_campaign import RAY_TOML, on

pytestmark = pytest.mark.usefixtures("ray_stranger")
SHARED = (
    'campaign.ray.permits="shared"',
    "backend.max_concurrent=1",
    "backend.options.api_latency_s=0.05",
)


def test_a_node_that_does_not_see_the_directory_is_named_as_the_reason(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "unseen.toml").write_text(RAY_TOML)
    there = ("campaign.ray.resources={stranger=1}", "campaign.seeds=[0]", "campaign.retries=0")
    ray.hide(tmp_path)
    code, said = finish(retrain("run", "unseen.toml", *on(ray, *there)))
    assert code == EXIT_RUN_FAILED
    assert "No such file or directory" in said, said
    assert "whether the nodes see that directory" in said
    campaign = only_campaign(tmp_path / "logs")
    assert attempts_of(campaign) == [0]
    ray.show(tmp_path)
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert attempts_of(campaign) == [1]


def nodes_of_test(ray: Cluster) -> list[str]:
    """Return Ray's ids of the nodes on which locks were tested last."""
    return [job.node for job in ray.client.jobs() if ".locks." in job.id][-2:]


def test_permits_are_shared_with_other_campaigns_after_two_nodes_proved_that_locks_are(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "shared.toml").write_text(RAY_TOML)
    together = f"backend.throttle_dir={tmp_path / 'permits'}"
    held = [0]
    with counting_runs(tmp_path / "logs") as alive:
        campaign = retrain("run", "shared.toml", *on(ray, *SHARED, together, "campaign.max_steps=40"))
        while campaign.poll() is None:
            if (tmp_path / "permits" / "permits.json").exists():
                held.append(len(FileSemaphore.inspect(tmp_path / "permits").holders))
            time.sleep(0.05)  # looking takes time from those who are looked at
    code, said = finish(campaign)
    assert code == 0, said
    assert "two nodes test whether they see each other's file locks" in said
    assert max(alive) == 2  # split, one permit would let one run go at a time
    assert max(held) == 1
    first, second = nodes_of_test(ray)
    assert first != second
    verdict = json.loads((only_campaign(tmp_path / "logs") / "ray" / "locks.json").read_text())
    assert (verdict["problem"], str(tmp_path / "permits") in verdict["directories"]) == ("", True)


def test_permits_are_refused_where_two_nodes_do_not_see_each_others_locks(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "refused.toml").write_text(RAY_TOML)
    ray.unlock(tmp_path)
    code, said = finish(retrain("run", "refused.toml", *on(ray, *SHARED)))
    assert code == EXIT_LAUNCH, said
    assert "could lock a file" in said
    assert 'permits = "split"' in said
    assert attempts_of(only_campaign(tmp_path / "logs")) == [0, 0]


def test_permits_are_refused_until_two_nodes_see_the_directory(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "seen.toml").write_text(RAY_TOML)
    ray.hide(tmp_path)
    code, said = finish(retrain("run", "seen.toml", *on(ray, *SHARED)))
    assert code == EXIT_LAUNCH, said
    assert "two nodes could not test" in said
    assert "exit code 127" in said
    assert "Do all nodes see" in said
    ray.show(tmp_path)
    code, said = finish(retrain("resume", only_campaign(tmp_path / "logs")))
    assert code == 0, said


def test_where_one_node_alone_is_large_enough_permits_are_shared_there(
    ray: Cluster, retrain: Start, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    ray.hide(hidden)
    (tmp_path / "lone.toml").write_text(RAY_TOML)
    there = "campaign.ray.resources={stranger=1}"
    code, said = finish(retrain("run", "lone.toml", *on(ray, *SHARED, there)))
    assert code == 0, said
    assert "all runs keep to it" in said
    campaign = only_campaign(tmp_path / "logs")
    assert f"node:{STRANGER}" in Home(campaign).orders().options["resources"]
    assert not any(job.id.startswith(f"{campaign.name}.locks.") for job in ray.client.jobs())
    assert (campaign / "permits" / "permits.json").exists()
    assert {state for state, _ in results(campaign).values()} == {"done"}
