"""A campaign finds how many calls an API bears, here four at once, and shows and records that it pauses.

Nor does it need more room for models than for its runs, one of whose workers is killed.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.campaign.run import run_campaign
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.results.status import survey
from tests.tinker_api.running import MODEL, RunningServer, serve, write_tokenizer

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
ALPHABET = "01234="
STEPS, RUNS, CAPACITY = 10, 2, 4
SAMPLED_BEFORE = 40  # requests before the pause, of 160: updates are few, since many steps have only ties

CAMPAIGN = """
[model]
model = "{model}"
base_url = "{url}"

[training]
batch_size = 8
group_size = 2
max_tokens = 3
temperature = 1.0
save_every = 0

[data]
task = "successor"
options = {{ digits = 1, base = 5, held_out = 0.0 }}

[reward]
reward = "tests.plugins.killed_once"
params = {{ flag = "killed" }}

[backend]
backend = "tinker"
max_concurrent = "auto"
options = {{ tokenizer = "{tokenizer}", first_retry_s = 0.1 }}

[campaign]
seeds = [0, 1]
max_steps = {steps}
parallel = true
"""


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    limits = ("--capacity", str(CAPACITY), "--most-models", str(RUNS))
    yield from serve(here, monkeypatch, ALPHABET, "--latency", "0.1", *limits)


class Pause(threading.Thread):
    """Has the API pause after a few steps, until the campaign says so."""

    def __init__(self, server: RunningServer, logs: Path) -> None:
        super().__init__()
        self._server, self._logs = server, logs
        self._over = threading.Event()
        self.said: list[str] = []

    def run(self) -> None:
        while self._sampled() < SAMPLED_BEFORE and not self._over.wait(0.1):
            pass
        self._server.pause("paused_capacity")
        gives_up_s = time.monotonic() + 120  # else the campaign would wait for ever
        while not (self.said or self._over.wait(0.1)) and time.monotonic() < gives_up_s:
            (campaign,) = survey(self._logs)
            self.said.extend(run.detail for run in campaign.runs if run.phase == "API paused")
        self._server.pause()

    def _sampled(self) -> int:
        return int(self._server.stats()["requests"].get("asample", 0))

    def end(self) -> None:
        self._over.set()
        self.join()


def test_permits_follow_what_the_api_bears_and_a_pause_is_shown(here: Path, server: RunningServer) -> None:
    """Where they settle, on a machine of any speed, is tested with the controller."""
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file = here / "campaign.toml"
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=STEPS))
    pause = Pause(server, here / "logs")
    pause.start()
    outcome = run_campaign(file)
    pause.end()

    assert outcome.exit_code == 0
    runs = sorted((outcome.directory / "runs").iterdir())
    endings = [[one.ending for one in read_attempts(run / "attempts.jsonl")] for run in runs]
    assert sorted(endings) == [["done"], ["infrastructure", "done"]]
    assert server.stats()["models"] == 0
    assert not [run for run in runs if "PyTorch" in (run / "output.log").read_text()]  # no need of tokenizers
    rows = [row for run in runs for row in read_metrics(run)]
    assert len(rows) == RUNS * STEPS
    lines = (outcome.directory / "permits" / "adaptive.jsonl").read_text().splitlines()
    changes = [json.loads(line) for line in lines]
    assert any(c["permits"] < c["before"] for c in changes)
    assert any(c["permits"] > c["before"] for c in changes)
    (status,) = survey(outcome.directory)
    assert status.permits is not None
    assert status.permits.permits == changes[-1]["permits"]
    assert changes[-1]["reason"] in status.permits.change

    assert any(re.match(r"capacity, \d", text) for text in pause.said), pause.said
    assert all(0 <= row["api_pause_s"] <= min(row["step_time_s"], row["api_pauses_s"]) for row in rows)
    assert any(row["api_pause_s"] > 0 for row in rows)
