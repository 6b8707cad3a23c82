"""A campaign that adds seeds is killed, orchestrator and workers, and comes to the same verdicts."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

from retrain.campaign.run import start
from retrain.records.layout import find_campaigns
from tests.long.test_decision import DECISION, decision_of
from tests.stopping import kill_when

PARALLEL = ("campaign.launcher=local", "campaign.parallel=true", "campaign.max_workers=2")
KILL_AT = (2, 6, 9, 11)  # runs that are done


def done_runs(directory: Path) -> int:
    return len(list(directory.glob("logs/*/runs/*/done.json")))


def are_done(directory: Path, runs: int) -> bool:
    return done_runs(directory) >= runs


def test_kills_change_no_verdict(here: Path) -> None:
    path = here / "decision.toml"
    path.write_text(DECISION.partition('[[campaign.conditions]]\nname = "alike"')[0])
    expected = decision_of(start(path).execute().directory)
    own = here / "killed"
    own.mkdir()
    command = [sys.executable, "-m", "retrain", "run", str(path)]
    command += [word for one in PARALLEL for word in ("--set", one)]
    for runs in KILL_AT:
        kill_when(partial(are_done, own, runs), command, own)
        (directory,) = find_campaigns(own / "logs")
        command = [sys.executable, "-m", "retrain", "resume", str(directory)]
    assert decision_of(directory).ended == ""
    subprocess.run(command, cwd=own, check=True, stderr=subprocess.DEVNULL)
    assert decision_of(directory) == expected
    assert done_runs(own) == expected.runs
