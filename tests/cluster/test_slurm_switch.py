"""A campaign that changes between this machine and a real Slurm while workers live."""

from __future__ import annotations

import signal
from pathlib import Path

from retrain.base.errors import EXIT_LAUNCH
from tests.cluster.campaigns import STEPS, Start, counting_runs, finish, numbers, only_campaign, results
from tests.cluster.slurm_cluster import Cluster
from tests.cluster.test_slurm_campaign import SLURM_TOML
from tests.cluster.waiting import await_that

AT_A_TIME = 2


def file_for(launcher: str, directory: Path) -> Path:
    """Write a campaign whose runs do not get on before there is a file `gate`."""
    path = directory / "switch.toml"
    text = SLURM_TOML.replace("seeds = [0, 1]", "seeds = [0, 1, 2, 3]").replace(
        '"tests.plugins.slow"', f'"tests.plugins.held"\nparams.gate = "{directory / "gate"}"'
    )
    path.write_text(text.replace("max_workers = 5", f'max_workers = {AT_A_TIME}\nlauncher = "{launcher}"'))
    return path


def switch(campaign: Path, before: str, after: str) -> None:
    given = campaign / "campaign.toml"
    given.write_text(given.read_text().replace(f'launcher = "{before}"', f'launcher = "{after}"'))


def all_are_done(campaign: Path) -> bool:
    found = results(campaign)
    steps = [[row["step"] for row in numbers(campaign / "runs" / run_id)] for run_id in found]
    return {state for state, _ in found.values()} == {"done"} and steps == [list(range(1, STEPS + 1))] * 4


def test_from_here_to_slurm_there_are_never_more_at_a_time(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    with counting_runs(tmp_path / "logs") as counts:
        first = retrain("run", file_for("local", tmp_path))
        await_that("two workers", lambda: counts and counts[-1] == AT_A_TIME)
        first.send_signal(signal.SIGKILL)
        finish(first)
        campaign = only_campaign(tmp_path / "logs")
        switch(campaign, "local", "slurm")
        resumed = retrain("resume", campaign)
        assert any("alive and adopted" in line for line in resumed.stderr)  # type: ignore[union-attr]
        (tmp_path / "gate").touch()
        code, said = finish(resumed)
    assert code == 0, said
    assert max(counts) == AT_A_TIME
    assert all_are_done(campaign)


def test_from_slurm_to_here_only_when_slurm_has_nothing_left(
    slurm: Cluster, retrain: Start, tmp_path: Path
) -> None:
    first = retrain("run", file_for("slurm", tmp_path))
    await_that("two workers", lambda: len(slurm.workers()) == AT_A_TIME)
    first.send_signal(signal.SIGKILL)
    finish(first)
    campaign = only_campaign(tmp_path / "logs")
    switch(campaign, "slurm", "local")
    code, said = finish(retrain("resume", campaign))
    assert (code, "slurm still has" in said) == (EXIT_LAUNCH, True), said
    (tmp_path / "gate").touch()
    assert finish(retrain("stop", campaign))[0] == 0
    code, said = finish(retrain("resume", campaign))
    assert code == 0, said
    assert not slurm.workers()
    assert all_are_done(campaign)
