"""A stop that arrives between the making of a campaign's directory and the orchestrator's first look."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from retrain.base.errors import EXIT_DONE, EXIT_INTERRUPTED
from retrain.campaign.run import reopen, start
from retrain.campaign.stop import stop_campaign
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import RunState
from tests.semaphore_processes import wait_until

INLINE = ["campaign.launcher=inline"]


def test_a_campaign_that_was_stopped_before_anybody_ran_it_launches_nothing(campaign_file: Path) -> None:
    campaign = start(campaign_file, INLINE)
    said: list[str] = []
    stop_campaign(campaign.directory, on_wait=said.append)
    outcome = campaign.execute()
    assert outcome.exit_code == EXIT_INTERRUPTED
    assert set(outcome.states.values()) == {RunState.PENDING}
    assert said == ["it has not run yet; if it is being started now, it stops before its first run"]


def test_a_resume_after_such_a_stop_goes_on(campaign_file: Path) -> None:
    campaign = start(campaign_file, INLINE)
    stop_campaign(campaign.directory)
    assert reopen(campaign.directory).execute().exit_code == EXIT_DONE


STOPPED_AT_ONCE = """
import sys
from pathlib import Path
from retrain.campaign import run
from retrain.campaign.stop import stop_campaign
from retrain.cli.run import command
start = run.start
def start_and_be_stopped(*given):
    campaign = start(*given)
    stop_campaign(campaign.directory)
    return campaign
run.start = start_and_be_stopped
command(Path(sys.argv[1]), detach=True)
"""


def test_a_campaign_that_was_stopped_before_it_was_left_running_launches_nothing(campaign_file: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    script = [sys.executable, "-c", STOPPED_AT_ONCE, str(campaign_file)]
    subprocess.run(script, check=False, capture_output=True, cwd=campaign_file.parent, env=environment)
    (directory,) = (campaign_file.parent / "logs").iterdir()
    wait_until(lambda: "continue with: retrain resume" in CampaignFiles(directory).log.read_text())
    assert not any((directory / "runs").rglob("attempts.jsonl"))
