"""A campaign that finds out how many calls an API bears: it refuses more than four at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.campaign.run import run_campaign
from retrain.records.metrics import read_metrics
from retrain.status import survey
from tests.tinker_api.running import MODEL, RunningServer, serve, write_tokenizer

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
ALPHABET = "01234="
STEPS, RUNS, CAPACITY = 20, 3, 4

CAMPAIGN = """
[model]
model = "{model}"
base_url = "{url}"

[training]
batch_size = 4
group_size = 4
max_tokens = 3
temperature = 1.0
save_every = 0

[data]
task = "successor"
options = {{ digits = 1, base = 5, held_out = 0.0 }}

[backend]
backend = "tinker"
max_concurrent = "auto"
options = {{ tokenizer = "{tokenizer}", first_retry_s = 0.1 }}

[campaign]
seeds = [0, 1, 2]
max_steps = {steps}
parallel = true
"""


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, ALPHABET, "--latency", "0.05", "--capacity", str(CAPACITY))


def test_permits_settle_near_what_the_api_bears_and_every_run_finishes(
    here: Path, server: RunningServer
) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file = here / "campaign.toml"
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=STEPS))
    outcome = run_campaign(file)

    assert outcome.exit_code == 0
    rows = [row for run in (outcome.directory / "runs").iterdir() for row in read_metrics(run)]
    assert len(rows) == RUNS * STEPS
    later = [row["permits"] for row in rows if row["step"] > STEPS / 2]
    assert CAPACITY / 3 <= sum(later) / len(later) <= 1.5 * CAPACITY  # fewer where this machine is slow
    lines = (outcome.directory / "permits" / "adaptive.jsonl").read_text().splitlines()
    changes = [json.loads(line) for line in lines]
    assert len(changes) < RUNS * STEPS / 4  # a limit that stays is not tried again and again
    assert any(c["permits"] < c["before"] for c in changes)
    assert any(c["permits"] > c["before"] for c in changes)
    (status,) = survey(outcome.directory)
    assert status.permits is not None
    assert status.permits.permits == changes[-1]["permits"]
    assert changes[-1]["reason"] in status.permits.change
