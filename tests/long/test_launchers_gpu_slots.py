"""GPUs are shared out evenly, held as long as a worker lives, and free however it ends."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from retrain.backends.local import MOST_DEVICES
from retrain.base.errors import LaunchError
from retrain.campaign.launcher_setup import assignment_of
from retrain.campaign.launchers import Assignment
from retrain.campaign.launchers.local import GpuSlot, open_launcher, take_slot, visible_gpus
from retrain.config.load import parse
from retrain.config.resolve import as_tables
from retrain.plan.build import plan_runs
from retrain.records.layout import CampaignFiles, RunFiles

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


def test_a_run_on_several_gpus_gets_those_with_the_fewest_workers(tmp_path: Path) -> None:
    def take(count: int, *gpus: str) -> GpuSlot:
        return take_slot(gpus or ("0", "1", "2"), tmp_path, (), count)

    one, two, all_of_them = take(1), take(2), take(1024)
    slots = [one, two, all_of_them, take(2), take(2, "2", "2", "1")]
    seen = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in slots]
    assert seen == ["0", "1,2", "0,1,2", "0,1", "2,1"]
    all_of_them.close()
    assert take(1).environment == {"CUDA_VISIBLE_DEVICES": "0"}
    assert len(two.descriptors) == 2


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


def test_a_gpu_is_one_whether_it_is_named_by_number_or_by_uuid(tmp_path: Path) -> None:
    uuids = ["GPU-aaaa-1", "GPU-bbbb-2"]
    first = take_slot(["0"], tmp_path, uuids)
    second = take_slot(["GPU-aaaa-1", "GPU-bbbb"], tmp_path, uuids)
    third = take_slot(["0", "1", "MIG-cccc-3"], tmp_path, uuids)
    seen = [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in (first, second, third)]
    for slot in (first, second, third):
        slot.close()
    assert seen == ["0", "GPU-bbbb", "MIG-cccc-3"]


REWARD = """
import fcntl, os

def score(completion, prompt):
    with open("seen", "a") as seen:
        seen.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\\n")
    with open("hold") as hold:
        fcntl.flock(hold, fcntl.LOCK_SH)
    return 0.0
"""


def four_runs(tmp_path: Path) -> dict[str, Path]:
    """Runs that say which GPU they see, then wait for `hold`; the last one is not to get any."""
    (tmp_path / "slow_reward.py").write_text(REWARD)
    raw = {"training": {"max_steps": 1}, "reward": {"reward": "slow_reward.score"}}
    plan = plan_runs(parse(raw, "c"))
    runs = {}
    for number in range(4):
        files = RunFiles(tmp_path / f"run{number}")
        files.directory.mkdir()
        files.run_toml.write_text(tomli_w.dumps(as_tables(plan.runs[0].config)))
        runs[f"run{number}"] = files.directory
    return runs


def test_the_local_launcher_gives_each_run_a_gpu_while_its_worker_lives(
    here: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.syspath_prepend(here)
    os.mkfifo("seen")
    runs = four_runs(here)
    with os.fdopen(os.open("seen", os.O_RDWR)) as seen, Path("hold").open("w") as hold:
        fcntl.flock(hold, fcntl.LOCK_EX)
        gpu_runs = dict.fromkeys(["run0", "run1", "run2"], 1)
        launcher = open_launcher(Assignment("c", here, runs, 4, None, where=here, gpu_runs=gpu_runs))
        launcher.submit(list(runs))
        ended: set[str] = set()
        try:
            assert sorted(seen.readline().strip() for _ in runs) == ["5", "5", "5,7", "7"]
            launcher.cancel(["run1"], now=True)
            ended = {end.run_id for end in launcher.poll(60)}
            assert ended == {"run1"}
            free = take_slot(["5", "7"])
            assert free.environment == {"CUDA_VISIBLE_DEVICES": "7"}
            free.close()
        finally:
            left = set(runs) - ended
            launcher.cancel(list(left), now=True)
            while left:
                left -= {end.run_id for end in launcher.poll(60)}


def test_only_runs_that_take_any_gpu_are_given_one() -> None:
    conditions = [
        {"name": "any", "backend": {"backend": "local"}},
        {"name": "own", "backend": {"backend": "local", "options": {"device": "cuda:1"}}},
        {"name": "none", "backend": {"backend": "numpy"}},
        {"name": "two", "backend": {"backend": "local", "options": {"devices": 2}}},
        {"name": "all", "backend": {"backend": "local", "options": {"devices": "all"}}},
    ]
    plan = plan_runs(parse({"campaign": {"seeds": [0], "conditions": conditions}}, "c", try_plugins=False))
    files = CampaignFiles(Path("c"))
    wanted = {"any_s0": 1, "two_s0": 2, "all_s0": MOST_DEVICES}
    assert assignment_of(plan, files, Path.cwd()).gpu_runs == wanted


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
    with pytest.raises(LaunchError, match="cannot reserve a GPU"):
        take_slot(["0"], tmp_path / "file")


def test_locks_that_others_could_remove_are_not_used(temporary: Path) -> None:
    folder = temporary / f"retrain-gpus-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(LaunchError, match="is not a folder of this user alone; remove it, or set TMPDIR"):
        take_slot(["0"])


def test_a_lock_that_somebody_made_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "0.0.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LaunchError):
        take_slot(["0"], tmp_path)
    assert not (tmp_path / "elsewhere").exists()
