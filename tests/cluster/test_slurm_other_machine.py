"""What holds between machines that share files, but not their locks; and what is refused there."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

from retrain.base.errors import EXIT_LAUNCH, EXIT_RUN_FAILED
from retrain.campaign.launchers.shared_permits import read_verdict
from tests.cluster.campaigns import (
    STEPS,
    Start,
    attempts_of,
    finish,
    has_steps,
    most_at_once,
    numbers,
    only_campaign,
)
from tests.cluster.slurm_cluster import Cluster
from tests.cluster.test_slurm_campaign import SLURM, SLURM_TOML, states
from tests.cluster.waiting import PATIENCE_S, await_that

LONG = ("--set", "campaign.seeds=[0]", "--set", "campaign.max_steps=100000")
PERMITS = ("--set", "backend.max_concurrent=2", "--set", "backend.options.api_latency_s=0.05")


def records_in(directory: Path) -> tuple[str, str]:
    return "--set", f"logging.log_dir={directory}"


def there(stranger: Cluster, *arguments: object) -> subprocess.Popen[str]:
    """Start the command line on the other machine."""
    command = stranger.as_stranger(sys.executable, "-m", "retrain", *map(str, arguments))
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def state_there(stranger: Cluster, campaign: Path) -> str:
    shown, _ = there(stranger, "status", campaign, "--json").communicate(timeout=PATIENCE_S)
    return str(json.loads(shown)["campaigns"][0]["runs"][0]["state"])


def test_where_locks_are_not_shared_a_lease_keeps_a_second_worker_and_orchestrator_away(
    stranger: Cluster, retrain: Start, tmp_path: Path
) -> None:
    log_dir = stranger.home / "unlocked" / "lease"
    (tmp_path / "lease.toml").write_text(SLURM_TOML)
    first = retrain("run", "lease.toml", *SLURM, *LONG, *records_in(log_dir))
    await_that("steps", lambda: has_steps(log_dir))
    campaign = only_campaign(log_dir)
    (run,) = (campaign / "runs").iterdir()
    script = str(campaign / "slurm" / "job.sh")
    twin = stranger.run(
        "sbatch", "--parsable", "-pstrange", "--array=0", "-o/dev/null", script, "0"
    ).stdout.strip()
    second = there(stranger, "resume", campaign)
    assert state_there(stranger, campaign) == "running"
    await_that("the twin's end", lambda: "FAILED" in states(stranger, twin))
    assert "left alone" in (run / "output.log").read_text()
    assert attempts_of(campaign) == [1]
    code, said = finish(second)
    assert (code, "is supervised by" in said) == (EXIT_LAUNCH, True), said
    assert finish(retrain("stop", campaign))[0] == 0
    finish(first)


def test_another_machine_takes_over_when_the_first_is_gone(
    stranger: Cluster, retrain: Start, tmp_path: Path
) -> None:
    log_dir = stranger.home / "unlocked" / "moved"
    (tmp_path / "moved.toml").write_text(SLURM_TOML)
    first = retrain("run", "moved.toml", *SLURM, *records_in(log_dir))
    await_that("steps", lambda: has_steps(log_dir))
    first.send_signal(signal.SIGKILL)
    finish(first)
    campaign = only_campaign(log_dir)
    code, said = finish(there(stranger, "resume", campaign))
    assert code == 0, said
    assert set(attempts_of(campaign)) == {1}
    for run in (campaign / "runs").iterdir():
        assert [row["step"] for row in numbers(run)] == list(range(1, STEPS + 1))


def test_permits_are_shared_after_two_nodes_proved_that_locks_are(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    (tmp_path / "shared.toml").write_text(SLURM_TOML)
    shared = ("--set", 'campaign.slurm.permits="shared"')
    code, said = finish(
        retrain("run", "shared.toml", *SLURM, *PERMITS, *shared, "--set", "campaign.max_steps=2")
    )
    assert code == 0, said
    campaign = only_campaign(tmp_path / "logs")
    assert read_verdict(campaign / "slurm" / "locks.json", [campaign / "permits"]) == ""
    assert (campaign / "permits" / "permits.json").exists()


def test_permits_are_refused_where_two_nodes_do_not_see_each_others_locks(
    stranger: Cluster, retrain: Start, tmp_path: Path
) -> None:
    log_dir = stranger.home / "unlocked" / "refused"
    (tmp_path / "refused.toml").write_text(SLURM_TOML)
    shared = ("--set", 'campaign.slurm.permits="shared"', "--set", "campaign.slurm.partition=mixed")
    code, said = finish(retrain("run", "refused.toml", *SLURM, *PERMITS, *shared, *records_in(log_dir)))
    assert code == EXIT_LAUNCH, said
    assert "could lock a file" in said
    assert 'permits = "split"' in said
    assert not any(log_dir.glob("*/runs/*/attempts.jsonl"))


def test_a_test_of_locks_that_fails_is_told_at_once(slurm: Cluster, retrain: Start, tmp_path: Path) -> None:
    (tmp_path / "failed.toml").write_text(SLURM_TOML)
    nowhere = ("--set", 'campaign.slurm.permits="shared"', "--set", "campaign.slurm.python=/nowhere/python")
    code, said = finish(retrain("run", "failed.toml", *SLURM, *PERMITS, *nowhere))
    assert code == EXIT_LAUNCH, said
    (told,) = re.findall(r"Slurm ended job \d+: FAILED; see (\S+\.out)", said)
    assert "/nowhere/python" in Path(told).read_text()


def test_split_permits_cap_the_runs(slurm: Cluster, retrain: Start, tmp_path: Path) -> None:
    (tmp_path / "split.toml").write_text(SLURM_TOML.replace("[0, 1]", "[0, 1, 2, 3]"))
    campaign = retrain("run", "split.toml", *SLURM, *PERMITS, "--set", "campaign.max_steps=6")
    assert most_at_once(slurm.workers, campaign) == 2
    assert finish(campaign)[0] == 0
    assert not list((only_campaign(tmp_path / "logs")).glob("permits/*"))


def test_a_directory_that_nodes_do_not_see_is_named_and_nothing_is_lost(
    stranger: Cluster, retrain: Start, tmp_path: Path
) -> None:
    log_dir = stranger.home / "lone" / "logs"
    file = tmp_path / "lone.toml"
    file.write_text(SLURM_TOML.replace("poll_seconds", 'partition = "strange"\npoll_seconds'))
    alone = ("--set", "campaign.retries=0")
    code, said = finish(retrain("run", "lone.toml", *SLURM, *alone, *records_in(log_dir)))
    assert code == EXIT_RUN_FAILED
    assert "before its worker wrote anything" in said
    assert "whether the nodes see that directory" in said
    campaign = only_campaign(log_dir)
    given = campaign / "campaign.toml"
    given.write_text(given.read_text().replace("strange", "main"))
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
