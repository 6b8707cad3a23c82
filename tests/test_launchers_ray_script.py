"""What the Ray launcher submits: what a job asks for, and the script that it runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.config.engines import Ray
from retrain.errors import EXIT_INFRASTRUCTURE
from retrain.launchers import ray as plugin
from retrain.launchers._ray_queue import Queue, Terms
from retrain.launchers._ray_script import ask_of, render, terms_of
from retrain.launchers.permit_split import workers_at_a_time
from tests.remembering_ray import assignment


def test_a_job_asks_for_what_the_table_says(tmp_path: Path) -> None:
    table = Ray(cpus=2, gpus=1, memory_gb=1.5, resources={"tinker": 1}, runtime_env={"env_vars": {"A": "b"}})
    ask = ask_of(assignment(tmp_path), table)
    assert ask["entrypoint_num_cpus"] == 2
    assert ask["entrypoint_num_gpus"] == 1
    assert ask["entrypoint_memory"] == 1_500_000_000
    assert ask["entrypoint_resources"] == {"tinker": 1}
    assert ask["runtime_env"]["env_vars"] == {"A": "b", "RAY_JOB_STOP_WAIT_TIME_S": "86400"}


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "$(touch hacked)", "a;b", "100%"])
def test_a_job_runs_its_own_run_whatever_the_directory_is_called(name: str, tmp_path: Path) -> None:
    given = assignment(tmp_path / name, where=tmp_path)
    queue = Queue(given.directory)
    queue.prepare(Terms())
    (queue.home / "job.sh").write_text(render(given, Ray(python="echo", setup=['echo "$RETRAIN_JOB"'])))
    done = subprocess.run(["bash", "-c", queue.entrypoint("r2", 1)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    said = (given.runs["r2"] / "output.log").read_text()
    job = f"{name}.r2.1"
    assert said == (f"ray {job}\n-P -m retrain.launchers._ray_place {given.directory} {job}\n")
    assert not (tmp_path / "hacked").exists()


def test_a_job_that_is_not_wanted_starts_no_worker(tmp_path: Path) -> None:
    given = assignment(tmp_path / "camp")
    Queue(given.directory).prepare(Terms())
    command = [sys.executable, "-m", "retrain.launchers._ray_place", given.directory]
    done = subprocess.run([*command, "camp.r0.1"], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_INFRASTRUCTURE
    assert "not wanted any more; left alone" in done.stderr


def test_permits_are_what_the_cap_leaves_each_run(tmp_path: Path) -> None:
    few, many = assignment(tmp_path, 8, permits=4), assignment(tmp_path, 3, permits=7)
    assert (workers_at_a_time(few, "split"), workers_at_a_time(many, "split")) == (4, 3)
    assert "RETRAIN_OWN_PERMITS=1\n" in render(few, Ray())
    assert "RETRAIN_OWN_PERMITS=2\n" in render(many, Ray())
    assert "RETRAIN_OWN_PERMITS" not in render(assignment(tmp_path), Ray())


def test_permits_that_are_shared_leave_the_cap_alone(tmp_path: Path) -> None:
    shared = Ray(permits="shared")
    assert workers_at_a_time(assignment(tmp_path, 8, permits=4), shared.permits) == 8
    assert "RETRAIN_OWN_PERMITS" not in render(assignment(tmp_path, 8, permits=4), shared)


def test_sharing_permits_with_other_campaigns_asks_for_proof(tmp_path: Path) -> None:
    sharing = assignment(tmp_path, permit_directories=(tmp_path,))
    (problem,) = plugin.check_campaign(sharing)
    assert problem.startswith("[backend].throttle_dir: permits shared through a directory may be given out")
    assert '[campaign.ray].permits = "shared"' in problem
    assert plugin.check_campaign(replace(sharing, options={"permits": "shared"})) == []


def test_jobs_are_not_kept_to_a_node_without_need(tmp_path: Path) -> None:
    assert "entrypoint_resources" not in terms_of(assignment(tmp_path), Ray()).ask
