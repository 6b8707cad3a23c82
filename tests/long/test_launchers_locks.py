"""Permits are shared between machines only if two nodes have proved that they see each other's file locks."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import LaunchError
from retrain.campaign.launchers.ray import RayLauncher, RayLockTest
from retrain.campaign.launchers.ray.client import RayJob
from retrain.campaign.launchers.ray.home import Home
from retrain.campaign.launchers.shared_permits import directories_of, read_verdict
from retrain.config.schema import RaySection
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import CampaignFiles
from tests.ray_pieces import Jobs, assignment

SHARED = RaySection(permits="shared")


def part(directory: Path, rank: int, node: str) -> subprocess.Popen[str]:
    """Start one part of a test."""
    test = [sys.executable, "-m", "retrain.campaign.launchers.shared_permits", directory / "verdict.json"]
    command = [*test, directory / "permits", str(rank), "mark", node]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("other", "problem"), [("b", ""), ("a", "both parts of the test ran on a")])
def test_two_nodes_that_see_each_others_locks_prove_it(other: str, problem: str, tmp_path: Path) -> None:
    parts = [part(tmp_path, 0, "a"), part(tmp_path, 1, other)]
    assert [one.communicate(timeout=60)[1] for one in parts] == ["", ""]
    found = read_verdict(tmp_path / "verdict.json", [tmp_path / "permits"])
    assert found is not None
    assert found.startswith(problem)
    assert bool(found) == bool(problem)
    assert list((tmp_path / "permits").iterdir()) == []


def test_a_verdict_holds_for_the_directories_that_were_tested(tmp_path: Path) -> None:
    given = assignment(tmp_path / "camp", permits=2)
    parts = [part(tmp_path, 0, "a"), part(tmp_path, 1, "b")]
    for one in parts:
        one.communicate(timeout=60)
    assert read_verdict(tmp_path / "verdict.json", [tmp_path / "permits"]) == ""
    assert read_verdict(tmp_path / "verdict.json", directories_of(given)) is None


def test_a_node_that_cannot_go_on_says_so_for_both(tmp_path: Path) -> None:
    (tmp_path / "permits").write_text("no directory")
    part(tmp_path, 0, "a").communicate(timeout=60)
    assert "permits" in (read_verdict(tmp_path / "verdict.json", [tmp_path / "permits"]) or "")


# Two jobs of Ray


class Nodes(Jobs):
    """A Ray that runs the test's jobs, here, and remembers all others."""

    def __init__(self, *addresses: str) -> None:
        super().__init__()
        self.addresses = addresses
        self.node_of = {address: f"id of {address}" for address in addresses}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def resources(self) -> list[dict[str, float]]:
        head = {"CPU": 0.0, "node:10.0.0.1": 1.0, "node:__internal_head__": 1.0}
        return [head, *({"CPU": 4.0, f"node:{address}": 1.0} for address in self.addresses)]

    def submit(self, job: str, entrypoint: str, ask: Mapping[str, Any]) -> bool:
        if ".locks." in job:
            (pin,) = ask["entrypoint_resources"]
            node = self.node_of[pin.removeprefix("node:")]
            self.all[job] = RayJob(job, "RUNNING", node=node)
            self.running[job] = subprocess.Popen(shlex.split(entrypoint), stderr=subprocess.DEVNULL)
            return True
        return super().submit(job, entrypoint, ask)

    def jobs(self) -> list[RayJob]:
        for name, process in self.running.items():
            if process.poll() is not None:
                self.becomes(name, "SUCCEEDED" if process.returncode == 0 else "FAILED", message="it ended")
        return super().jobs()

    def stop(self, job: str) -> None:
        super().stop(job)
        self.running[job].kill()
        self.running[job].wait()

    def join(self) -> None:
        """Wait for both parts: the one that writes the verdict may not be the last to end."""
        for process in self.running.values():
            process.wait()


def sharing(directory: Path, nodes: Nodes, table: RaySection = SHARED, **changes: Any) -> RayLauncher:
    """Return a launcher of five runs that are to share two permits."""
    return RayLauncher(assignment(directory, 5, permits=2, workers=3, **changes), table, nodes)


def test_two_nodes_are_asked_once_and_then_runs_start_anywhere(tmp_path: Path) -> None:
    nodes = Nodes("10.0.0.2", "10.0.0.3", "10.0.0.4")
    made = sharing(tmp_path / "camp", nodes)
    assert made.submit(["r0", "r1"]) == ["r0", "r1"]
    assert {nodes.all[job].node for job in nodes.running} == {"id of 10.0.0.2", "id of 10.0.0.4"}
    assert set(nodes.all) - set(nodes.running) == {"camp.1"}
    assert Home(tmp_path / "camp").orders().options == {"num_cpus": 1.0}
    made.submit(["r2"])
    assert len(nodes.running) == 2
    nodes.join()


def test_where_one_node_is_large_enough_all_runs_keep_to_it(tmp_path: Path) -> None:
    said: list[str] = []
    nodes = Nodes("10.0.0.2")
    made = sharing(tmp_path / "camp", nodes, replace(SHARED, resources={"tpu": 0}), say=said.append)
    made.submit(["r0"])
    made.submit(["r1"])
    assert not nodes.running
    kept = Home(tmp_path / "camp").orders().options["resources"]
    assert kept == {"tpu": 0, "node:10.0.0.2": 0.001}
    assert said == ["only node 10.0.0.2 is large enough for a run, so all runs keep to it"]


@pytest.mark.parametrize("addresses", [(), ("10.0.0.2",)])
def test_a_cluster_that_may_grow_needs_two_nodes_at_the_start(
    addresses: tuple[str, ...], tmp_path: Path
) -> None:
    made = sharing(tmp_path / "camp", Nodes(*addresses), replace(SHARED, autoscales=True))
    with pytest.raises(LaunchError, match=f"{len(addresses)} nodes are large enough .* it takes two"):
        made.submit(["r0"])


def test_parts_that_ray_ran_on_one_node_prove_nothing_and_are_tried_again(tmp_path: Path) -> None:
    nodes = Nodes("10.0.0.2", "10.0.0.3")
    nodes.node_of["10.0.0.3"] = nodes.node_of["10.0.0.2"]
    made = sharing(tmp_path / "camp", nodes)
    with pytest.raises(LaunchError, match="Ray ran both parts on one node"):
        made.submit(["r0"])
    assert set(nodes.all) == set(nodes.running)
    nodes.node_of["10.0.0.3"] = "id of 10.0.0.3"
    assert made.submit(["r0"]) == ["r0"]
    nodes.join()


def test_a_part_that_fails_is_told_at_once_and_the_other_ended(tmp_path: Path) -> None:
    nodes = Nodes("10.0.0.2", "10.0.0.3")
    made = sharing(tmp_path / "camp", nodes, replace(SHARED, python="/nowhere/python"))
    with pytest.raises(LaunchError, match=r"Ray says FAILED of camp\.locks.*it ended"):
        made.submit(["r0"])
    assert set(nodes.stopped) == set(nodes.running)


def test_a_stop_does_not_wait_for_the_test(tmp_path: Path) -> None:
    nodes = Nodes("10.0.0.2", "10.0.0.3")
    made = sharing(tmp_path / "camp", nodes, replace(SHARED, setup=["exec sleep 600"]))
    ask_to_stop(CampaignFiles(tmp_path / "camp"), now=False)
    assert made.submit(["r0"]) == ()
    assert set(nodes.stopped) == set(nodes.running)


def test_a_signal_ends_the_wait_for_the_test(tmp_path: Path) -> None:
    nodes = Nodes("10.0.0.2", "10.0.0.3")
    given = assignment(tmp_path / "camp", 1, permits=2)
    home = Home(given.directory)
    home.prepare()
    home.script.write_text("exec sleep 600")
    test = RayLockTest(given, SHARED, home, nodes)
    assert test.node(lambda seconds: True) is None
    assert set(nodes.stopped) == set(nodes.running)
