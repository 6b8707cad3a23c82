"""What a user is told when Ray is not there or refuses; clusters that cap runs, or are started here."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_RUN_FAILED, ClusterDownError, LaunchError
from retrain.base.locks import is_held
from retrain.campaign.launchers.ray.client import JobsClient
from retrain.campaign.run import start
from tests.cluster.campaigns import (
    Start,
    finish,
    only_campaign,
    results,
)
from tests.cluster.ray_cluster import FAIR, Cluster
from tests.cluster.test_ray_campaign import RAY_TOML, on, sets, settings_for
from tests.cluster.waiting import PATIENCE_S, await_that


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "campaign.toml"
    path.write_text(RAY_TOML)
    return path


def option(text: str) -> tuple[str, str]:
    return "--set", f"campaign.ray.{text}"


def states(directory: Path) -> set[str]:
    return {state for state, _ in results(directory).values()}


def test_what_ray_cannot_give_is_said_before_anything_exists(ray: Cluster, file: Path) -> None:
    wrong = {
        "campaign.ray.address=http://127.0.0.1:9": "no Ray cluster answers at http://127.0.0.1:9",
        "campaign.ray.resources={unheard=1}": "has unheard = 1 (the most is 0)",
        "campaign.ray.resources={tinker=9}": "has tinker = 9 (the most is 2)",
        "campaign.ray.gpus=1": "has GPU = 1 (the most is 0)",
        "campaign.ray.runtime_env={pip=3}": "[campaign.ray].runtime_env: Ray refuses it",
    }
    for setting, message in wrong.items():
        with pytest.raises(LaunchError, match=re.escape(message)):
            start(file, settings_for(ray, setting))
    assert not (file.parent / "logs").exists()


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("2.7.1", "the cluster has Ray 2.7.1; retrain needs 2.8 or later"),
        ("2.99.0", "install ray==2.99.0 here"),
    ],
)
def test_a_cluster_of_another_version_is_told_before_anything_exists(
    version: str, problem: str, file: Path
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"ray_version": version}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever).start()
        there = f"address=http://127.0.0.1:{server.server_port}"
        with pytest.raises(LaunchError, match=re.escape(problem)):
            start(file, ['campaign.launcher="ray"', f"campaign.ray.{there}"])
        server.shutdown()
    assert not (file.parent / "logs").exists()


def test_a_python_that_nodes_do_not_have_is_found_in_the_logs(
    ray: Cluster, retrain: Start, file: Path
) -> None:
    nowhere = (*option("python=/nowhere/python"), "--set", "campaign.retries=0")
    code, said = finish(retrain("run", file, *on(ray), *nowhere))
    assert code == EXIT_RUN_FAILED
    assert "before its worker wrote anything" in said
    shown = retrain("logs", only_campaign(file.parent / "logs"), "maxrl_s0")
    out, _ = shown.communicate(timeout=PATIENCE_S)
    assert "/nowhere/python" in out


def test_a_cluster_of_this_machine_is_started_and_ended(
    retrain: Start, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = ("--set", 'campaign.launcher="ray"', *option("address=local"))
    monkeypatch.setenv("HOME", str(file.parent))
    for name, value in FAIR.items():
        monkeypatch.setenv(name, value)
    code, said = finish(retrain("run", file, *local, "--set", "campaign.max_workers=2"))
    assert code == 0, said
    assert "starting a Ray cluster on this machine" in said
    directory = only_campaign(file.parent / "logs")
    assert states(directory) == {"done"}
    await_that("its end", lambda: not is_held(directory / "ray" / "local.lock"))
    assert not (file.parent / ".ray").exists()  # a token there would shut the user out of other clusters


def test_a_run_that_is_too_large_for_this_machine_is_told(
    retrain: Start, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(file.parent))
    large = ("address=local", "resources={unheard=1}")
    settings = ('campaign.launcher="ray"', "campaign.retries=0", *(f"campaign.ray.{one}" for one in large))
    code, said = finish(retrain("run", file, *sets(*settings)))
    assert code == EXIT_RUN_FAILED
    assert "this machine does not have unheard = 1 (the most is 0)" in said


def test_several_clusters_on_a_machine_are_named_with_what_to_type() -> None:
    several = (
        "Found multiple active Ray instances: {'10.0.0.1:6379', '10.0.0.2:6379'}. Please specify the one to"
    )

    class Unsure(JobsClient):
        def connect(self, library: object) -> object:
            raise ConnectionError(several)

    with pytest.raises(ClusterDownError) as told:
        Unsure().jobs()
    assert str(told.value) == (
        "several Ray clusters run on this machine (10.0.0.1:6379, 10.0.0.2:6379): name one by the address of "
        'its dashboard, such as --set campaign.ray.address="http://127.0.0.1:8265"'
    )
