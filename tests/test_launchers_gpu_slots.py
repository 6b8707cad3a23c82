"""GPUs are shared out evenly, held as long as a worker lives, and free however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.errors import LaunchError
from retrain.launchers._gpu_slots import take_slot, visible_gpus

WORKER = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); input()"


def start(gpus: list[str], directory: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a worker as a launcher would; give it and the GPU that it sees."""
    slot = take_slot(gpus, directory)
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        env={**os.environ, **slot.environment},
        pass_fds=slot.descriptors,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    slot.close()
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process: subprocess.Popen[str], number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate()


def test_workers_are_spread_and_a_killed_one_frees_its_gpu(tmp_path: Path) -> None:
    workers = [start(["0", "1"], tmp_path) for _ in range(4)]
    try:
        assert [gpu for _, gpu in workers] == ["0", "1", "0", "1"]
        end(workers[1][0])
        workers[1] = start(["0", "1"], tmp_path)
        assert workers[1][1] == "1"
    finally:
        for process, _ in workers:
            end(process)


def test_a_worker_keeps_its_gpu_after_the_launcher_let_go(tmp_path: Path) -> None:
    worker, gpu = start(["0", "1"], tmp_path)
    try:
        other = take_slot(["0", "1"], tmp_path)
        assert (gpu, other.environment) == ("0", {"CUDA_VISIBLE_DEVICES": "1"})
        other.close()
    finally:
        end(worker)
    free = take_slot(["0", "1"], tmp_path)
    assert free.environment == {"CUDA_VISIBLE_DEVICES": "0"}
    free.close()


def test_a_machine_without_gpus_reserves_nothing(tmp_path: Path) -> None:
    slot = take_slot([], tmp_path / "never")
    assert (dict(slot.environment), slot.descriptors, (tmp_path / "never").exists()) == ({}, (), False)


@pytest.mark.parametrize(
    ("setting", "gpus"),
    [
        (None, ["0", "1", "2"]),
        ("", []),
        ("-1", []),
        ("2, 0", ["2", "0"]),
        ("1,1", ["1"]),
        ("0,-1,1", ["0"]),
        ("GPU-8932f937,MIG-1", ["GPU-8932f937", "MIG-1"]),
    ],
)
def test_gpus_are_those_that_cuda_would_see(setting: str | None, gpus: list[str]) -> None:
    assert visible_gpus(setting, count=3) == gpus


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="no GPU can be reserved"):
        take_slot(["0"], tmp_path / "file")


def test_a_lock_that_somebody_made_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "0.0.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError):
        take_slot(["0"], tmp_path)
    assert not (tmp_path / "elsewhere").exists()
