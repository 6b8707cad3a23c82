"""The files of a campaign itself are cut short at every operation: started, resumed, changed, stopped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, start
from retrain.campaign.stop import stop_campaign
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.records.layout import CampaignFiles, find_campaigns
from retrain.records.manifest import read_manifest
from tests.conftest import TINY
from tests.crash_disk import Disk, deaths_at

MEMORY = Path("/dev/shm")
SETS = ["campaign.launcher=inline"]
TWO_RUNS = TINY.replace("seeds = [0, 1]", "seeds = [0]")  # of which one may lag behind the other


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as directory:
        monkeypatch.chdir(directory)
        Path("tiny.toml").write_text(TWO_RUNS)
        yield Path(directory).resolve()


def begin(root: Path) -> None:
    """Make a campaign and supervise it, launching nothing."""
    campaign = start(Path("tiny.toml"), [*SETS, f'logging.log_dir="{root}"'])
    campaign.stop()
    campaign.execute()


def go_on(directory: Path, *, accept: bool = False) -> None:
    campaign = reopen(directory, accept_config_change=accept)
    campaign.stop()
    campaign.execute()


def every_death(root: Path, prepare: Callable[[], None], act: Callable[[], None]) -> Iterator[str]:
    """Let `act` die at every one of its operations on `root` in every way, each time on a fresh `prepare`."""

    def live(at: int = 0, moment: str = "before") -> Disk:
        shutil.rmtree(root, ignore_errors=True)
        prepare()
        disk = Disk(root, at, moment)
        with disk.installed():
            act()
        return disk

    whole, deaths = live(), 0
    for at in range(1, whole.operations + 1):
        for moment in deaths_at(at, whole):
            if live(at, moment).is_dead:  # an operation that fails has no end to die at, and changes nothing
                deaths += 1
                yield f"{moment} operation {at}"
    assert deaths > whole.operations / 2


def is_consistent(directory: Path) -> bool:
    """Every file says the same configuration, and nothing half-written is left."""
    files = CampaignFiles(directory)
    plan = plan_runs(load_config(files.campaign_toml, SETS), "tiny")
    hashes = {run.run_id: run.config_hash for run in plan.runs}
    manifest = read_manifest(files.manifest)
    recorded = {run.run_id: run.config_hash for run in manifest.runs} if manifest else {}
    written = {
        name: (files.run(name).run_toml.read_text().count(value) == 1) for name, value in hashes.items()
    }
    return recorded == hashes and all(written.values()) and not list(directory.glob(".*.tmp"))


def test_a_start_that_is_killed_anywhere_is_no_campaign_or_one_that_goes_on(scratch: Path) -> None:
    root, deaths, campaigns = scratch / "logs", 0, 0
    for where in every_death(root, lambda: None, lambda: begin(root)):
        deaths += 1
        for directory in find_campaigns(root) if root.is_dir() else ():
            campaigns += 1
            go_on(directory)
            assert is_consistent(directory), where
    assert deaths > 50
    assert campaigns > 30


@pytest.fixture
def made(scratch: Path) -> Path:
    """A campaign that was started, to be copied."""
    begin(scratch / "made")
    (directory,) = find_campaigns(scratch / "made")
    return directory


def edit(directory: Path, old: str, new: str) -> None:
    path = directory / "campaign.toml"
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("then", ["put back", "accepted"])
def test_a_change_whose_acceptance_is_killed_anywhere_reaches_all_runs_or_none(
    then: str, made: Path, scratch: Path
) -> None:
    root = scratch / "changed"

    def prepare() -> None:
        shutil.copytree(made, root)
        edit(root, "lr = 5e-3", "lr = 6e-3")

    for where in every_death(root, prepare, lambda: go_on(root, accept=True)):
        if then == "put back":
            edit(root, "lr = 6e-3", "lr = 5e-3")
            with suppress(ConfigError):  # refused if it was accepted already: both are right
                go_on(root)
        go_on(root, accept=True)
        assert is_consistent(root), where


def test_a_stop_that_is_killed_anywhere_hinders_nothing(made: Path, scratch: Path) -> None:
    root = scratch / "stopped"
    for where in every_death(
        root, lambda: shutil.copytree(made, root) and None, lambda: stop_campaign(root) and None
    ):
        assert not stop_campaign(root).workers
        go_on(root)
        assert is_consistent(root), where
        assert not os.path.lexists(root / "stop.json")
