"""One orchestrator per campaign, however many are started at the same moment."""

from __future__ import annotations

from pathlib import Path

from tests.orchestrators import race

CAMPAIGN = """
[training]
batch_size = 2
group_size = 2
max_tokens = 4
[data]
task = "successor"
[campaign]
seeds = [0, 1]
max_steps = 2
"""


def test_of_twenty_orchestrators_started_at_once_one_wins_and_the_others_are_told_which(
    tmp_path: Path,
) -> None:
    file = tmp_path / "campaign.toml"
    file.write_text(CAMPAIGN + f'[logging]\nlog_dir = "{tmp_path}/logs"\n')
    winner, others = race(file, 20)
    assert len(others) == 19
    assert all(f"is supervised by process {winner} on " in line for line in others)
