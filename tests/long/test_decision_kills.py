"""A campaign that adds seeds is killed, orchestrator and workers, and comes to the same verdicts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from retrain.campaign.run import start
from retrain.records.layout import find_campaigns
from tests.long.test_decision import DECISION, decision_of

PARALLEL = ("campaign.launcher=local", "campaign.parallel=true", "campaign.max_workers=2")
KILL_AT = (2, 6, 9, 11)  # runs that are done
GIVE_UP_S = 300.0


def done_runs(directory: Path) -> int:
    return len(list(directory.glob("logs/*/runs/*/done.json")))


def test_kills_change_no_verdict(here: Path) -> None:
    path = here / "decision.toml"
    path.write_text(DECISION.partition('[[campaign.conditions]]\nname = "alike"')[0])
    expected = decision_of(start(path).execute().directory)
    own = here / "killed"
    own.mkdir()
    command = [sys.executable, "-m", "retrain", "run", str(path)]
    command += [word for one in PARALLEL for word in ("--set", one)]
    for runs in KILL_AT:
        process = subprocess.Popen(command, cwd=own, start_new_session=True, stderr=subprocess.DEVNULL)
        until = time.monotonic() + GIVE_UP_S
        while done_runs(own) < runs and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):  # it may just have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        (directory,) = find_campaigns(own / "logs")
        command = [sys.executable, "-m", "retrain", "resume", str(directory)]
    assert decision_of(directory).ended == ""
    subprocess.run(command, cwd=own, check=True, stderr=subprocess.DEVNULL)
    assert decision_of(directory) == expected
    assert done_runs(own) == expected.runs
