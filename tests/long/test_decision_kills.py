"""A campaign that adds seeds is killed, orchestrator and workers, and comes to the same verdicts."""

from __future__ import annotations

from pathlib import Path

from retrain.campaign.run import start
from tests.long.test_decision import DECISION, decision_of
from tests.stopping import IN_TWO_WORKERS, INLINE, finish_inline, killed_at

KILL_AT = (3, 8)  # runs that are done, of 12: whoever waits for them may be late


def done_runs(directory: Path) -> int:
    return len(list(directory.glob("logs/*/runs/*/done.json")))


def are_done(directory: Path, runs: int) -> bool:
    return done_runs(directory) >= runs


def test_kills_change_no_verdict(here: Path) -> None:
    path = here / "decision.toml"
    text = DECISION.partition('[[campaign.conditions]]\nname = "alike"')[0]
    path.write_text(text)
    expected = decision_of(start(path).execute().directory)
    path.write_text(text.replace(INLINE, IN_TWO_WORKERS))
    own = here / "killed"
    directory = killed_at(KILL_AT, are_done, path, own)
    assert decision_of(directory).ended == ""
    finish_inline(directory)
    assert decision_of(directory) == expected
    assert done_runs(own) == expected.runs
