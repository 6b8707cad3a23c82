"""What the Ray launcher submits, and what is wrong with a table, on a machine without a Ray."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.backends import Devices
from retrain.base.distribution import install_command
from retrain.base.errors import EXIT_CONFIG, EXIT_LAUNCH
from retrain.campaign.launchers import ray as plugin
from retrain.campaign.launchers.ray import job_options, render, task_options
from retrain.campaign.launchers.ray.driver import config_of_tasks
from retrain.campaign.launchers.shared_permits import workers_at_a_time
from retrain.config.schema import RaySection
from tests.ray_pieces import assignment

Retrain = Callable[..., subprocess.CompletedProcess[str]]


def test_a_task_asks_for_what_the_table_says(tmp_path: Path) -> None:
    table = RaySection(cpus=2, gpus=1, memory_gb=1.5, resources={"tinker": 1})
    asked = {"num_cpus": 2, "num_gpus": 1, "memory": 1_500_000_000}
    assert task_options(table) == {**asked, "resources": {"tinker": 1}}
    assert task_options(RaySection(cpus=0.5)) == {"num_cpus": 0.5}


def test_a_task_asks_for_a_core_and_where_it_has_gpus_for_a_gpu_for_each_device(tmp_path: Path) -> None:
    def asked(devices: Devices, **options: float) -> str:
        shown = plugin.script(assignment(tmp_path, devices=devices, options=options))
        return " ".join(line.strip("# ") for line in shown.splitlines() if "num_" in line)

    assert asked(Devices(4), cpus=0.5) == "num_cpus = 4"
    assert asked(Devices(4), gpus=1.0) == "num_cpus = 4 num_gpus = 4"
    assert asked(Devices(2, gpus=2), cpus=8.0) == "num_cpus = 8.0 num_gpus = 2"


def test_tasks_have_the_environment_that_the_table_gives_and_the_job_time_to_stop(tmp_path: Path) -> None:
    for given in ({}, {"env_vars": {"A": "b"}}, {"pip": ["a"]}):
        asked = job_options(assignment(tmp_path), RaySection(runtime_env=given))
        job = asked["runtime_env"]["env_vars"]
        assert job == {"RAY_JOB_STOP_WAIT_TIME_S": "86400", **given.get("env_vars", {})}
        of_tasks = json.loads(config_of_tasks(json.dumps(asked)))
        assert of_tasks == {**asked, "runtime_env": given}


def test_permits_are_what_the_cap_leaves_each_run(tmp_path: Path) -> None:
    few, many = assignment(tmp_path, 8, permits=4), assignment(tmp_path, 3, permits=7)
    assert (workers_at_a_time(few, "split"), workers_at_a_time(many, "split")) == (4, 3)
    assert "RETRAIN_OWN_PERMITS=1\n" in render(few, RaySection())
    assert "RETRAIN_OWN_PERMITS=2\n" in render(many, RaySection())
    assert "RETRAIN_OWN_PERMITS" not in render(assignment(tmp_path), RaySection())


def test_permits_that_are_shared_leave_the_cap_alone(tmp_path: Path) -> None:
    shared = RaySection(permits="shared")
    assert workers_at_a_time(assignment(tmp_path, 8, permits=4), shared.permits) == 8
    assert "RETRAIN_OWN_PERMITS" not in render(assignment(tmp_path, 8, permits=4), shared)


def test_sharing_permits_with_other_campaigns_asks_for_proof(tmp_path: Path) -> None:
    sharing = assignment(tmp_path, permit_directories=(tmp_path,))
    (problem,) = plugin.check_campaign(sharing)
    assert problem.startswith("[backend].throttle_dir: permits shared through a directory may be given out")
    assert '[campaign.ray].permits = "shared"' in problem
    assert plugin.check_campaign(replace(sharing, options={"permits": "shared"})) == []


# On a machine without Ray


def test_without_ray_nothing_is_created_and_the_user_told(
    retrain: Retrain, campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    done = retrain("run", campaign_file, "--set", "campaign.launcher=ray")
    assert done.returncode == EXIT_LAUNCH
    assert install_command("ray") in done.stderr or "no Ray cluster answers" in done.stderr
    assert not (campaign_file.parent / "logs").exists()


def test_explain_shows_what_would_be_submitted_and_no_secrets(retrain: Retrain, campaign_file: Path) -> None:
    secret = """campaign.ray.runtime_env={env_vars={KEY='s3cret'}}"""
    done = retrain("explain", campaign_file, "--set", "campaign.launcher=ray", "--set", secret)
    assert done.returncode == 0, done.stderr
    assert "num_cpus = 1" in done.stdout
    assert "KEY" in done.stdout
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("adress = 'x'", "[campaign.ray].adress: unknown key; did you mean 'address'?"),
        ("poll_seconds = 0.5", "[campaign.ray].poll_seconds: got 0.5; needs at least 2"),
        ("cpus = 0", "[campaign.ray].cpus: got 0; ask for something"),
        ("resources = {tinker = 'x'}", "[campaign.ray].resources.tinker: got 'x'; needs a number above 0"),
        ("resources = {GPU = 1}", "[campaign.ray].resources.GPU: is not a custom resource; use the key gpus"),
        ("runtime_env = {working_dir = '.'}", "[campaign.ray].runtime_env.working_dir: '.' would be copied"),
        ("runtime_env = {env_vars = {A = 1}}", "[campaign.ray].runtime_env.env_vars: needs a table of"),
        ('setup = ["""a\nb"""]', "[campaign.ray].setup: 'a\\nb' has more than one line"),
    ],
)
def test_wrong_keys_are_named(line: str, problem: str, retrain: Retrain, campaign_file: Path) -> None:
    ray = f'launcher = "ray"\n[campaign.ray]\n{line}\n[[campaign.conditions]]'
    campaign_file.write_text(campaign_file.read_text().replace("[[campaign.conditions]]", ray, 1))
    done = retrain("explain", campaign_file)
    assert done.returncode == EXIT_CONFIG
    assert problem in done.stderr
