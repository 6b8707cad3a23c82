"""A campaign of two workers at an API with three permits learns, while the API has a bad day."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.base.errors import EXIT_RUN_FAILED
from retrain.base.rollouts import Prompt
from retrain.campaign.run import reopen, run_campaign
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from tests.asking import post
from tests.tinker_api.running import KEY, MODEL, RunningServer, serve, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ALPHABET = "01234="
STEPS, RUNS = 15, 2
FIRST_BURST, RESTART = 5, 15  # updates of all runs together, of 30
LATENCY_S = "0.02"  # of each call, so that those of a step overlap

CAMPAIGN = """
[model]
model = "{model}"
base_url = "{url}"

[training]
batch_size = 4
group_size = 16
max_tokens = 3
temperature = 1.0
lr = 2e-2  # at 4e-2 half of the runs collapse on one answer
save_every = 4

[algorithm]
loss_mode = "ppo"

[data]
task = "successor"
options = {{ digits = 1, base = 5, held_out = 0.0 }}

[reward]
reward = "partial"

[backend]
backend = "tinker"
max_concurrent = 3
options = {{ tokenizer = "{tokenizer}", first_retry_s = 0.1, probe = false }}

[campaign]
seeds = [0]
max_steps = {steps}
parallel = true
max_workers = 2

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "rloo"
advantage_mode = "rloo"
"""


@pytest.fixture
def server(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    yield from serve(here, monkeypatch, ALPHABET, "--latency", LATENCY_S)


class BadDay(threading.Thread):
    """Bursts of 502 and 429, then a server that is killed and comes back without its memory."""

    def __init__(self, server: RunningServer) -> None:
        super().__init__()
        self._server = server
        self._over = threading.Event()
        self.stats: list[dict[str, Any]] = []

    def run(self) -> None:
        self._await_updates(FIRST_BURST)
        for path in ("asample", "retrieve_future", "optim_step"):
            self._server.fail(path, times=2, status=502)
            self._server.fail(path, times=2, status=429)
        self._await_updates(RESTART)
        self.stats.append(self._server.stats())
        self._server.kill()
        self._server.start()

    def end(self) -> None:
        self._over.set()
        self.join()
        self.stats.append(self._server.stats())

    def _await_updates(self, count: int) -> None:
        while self._server.stats()["updates"] < count and not self._over.wait(0.05):
            pass


def test_a_campaign_learns_through_a_bad_day_and_keeps_to_its_permits(
    here: Path, server: RunningServer
) -> None:
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file = here / "campaign.toml"
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=STEPS))
    day = BadDay(server)
    day.start()
    outcome = run_campaign(file)
    day.end()

    assert outcome.exit_code == 0
    runs = sorted((outcome.directory / "runs").iterdir())
    rows = [read_metrics(run) for run in runs]
    assert [[row["step"] for row in steps] for steps in rows] == [list(range(1, STEPS + 1))] * RUNS
    rewards = np.array([[row["mean_reward"] for row in steps] for steps in rows])
    assert rewards[:, :4].mean() < 0.2
    assert rewards[:, -4:].mean() > 0.3
    assert sum(row["permit_wait_s"] for steps in rows for row in steps) > 0
    most = [stats["most_in_flight"] for stats in day.stats]
    assert max(most) == most[0] == 3  # after the restart there may be less to do
    assert set(day.stats[0]["failed"]) == {"429", "502"}
    secret = KEY.encode()
    assert not [path for path in here.rglob("*") if path.is_file() and secret in path.read_bytes()]


@pytest.mark.parametrize("staleness", [0, 1])
def test_steps_before_one_that_a_judge_left_are_not_paid_again(
    here: Path, server: RunningServer, staleness: int
) -> None:
    tokenizer, away = write_tokenizer(here / "tokenizer", ALPHABET), here / "the judge is away"
    file = here / "campaign.toml"
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=5))
    away.touch()
    one = ['campaign.conditions=[{name="one"}]', "campaign.parallel=false", "campaign.launcher=inline"]
    one += ["campaign.retries=0", "training.save_every=0", f"rate_limiter.max_staleness={staleness}"]
    one += ["reward.reward='tests.reward_functions.away_after_two_steps'"]
    failed = run_campaign(file, one)
    assert failed.exit_code == EXIT_RUN_FAILED
    (run,) = map(RunFiles, (failed.directory / "runs").iterdir())
    away.unlink()
    assert reopen(failed.directory).execute().exit_code == 0
    first, second = read_attempts(run.attempts)
    assert "the judge is away" in first.message
    assert second.resumed_from_step == 2
    rows = read_metrics(run.directory)
    assert [row["attempt"] for row in rows] == [1, 1, 2, 2, 2]
    assert {row.get("rate_prompts_at_a_time") for row in rows} == {4 if staleness else None}


class Twice:
    """Asks a second time."""

    def start(self, prompt: Prompt) -> str:
        self.answer, self.turns = prompt.answer, 0
        return prompt.text

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "=", float(completion == self.answer), self.turns == 2


class Asks:
    """The same as a program that knows tokens only."""

    def run(self, prompt: Prompt, base_url: str, api_key: str) -> float:
        ids = [ALPHABET.index(character) for character in prompt.text]
        for _ in range(2):
            body = {"token_ids": ids, "sampling_params": {}}
            _, answer = post(base_url.removesuffix("/v1"), api_key, body, "/inference/v1/generate")
            ids += [*answer["choices"][0]["token_ids"], ALPHABET.index("=")]
        return 0.5


@pytest.mark.parametrize(("kind", "separate"), [(Twice, False), (Twice, True), (Asks, False)])
def test_a_campaign_plays_episodes(server: RunningServer, here: Path, kind: type, separate: bool) -> None:
    environment = f"""
[environment]
environment = "tests.extras.test_tinker_campaign.{kind.__name__}"
max_turn_tokens = 2
separate_turns = {str(separate).lower()}
"""
    tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
    file = here / "campaign.toml"
    file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=2) + environment)
    one = ['campaign.conditions=[{name="one"}]', "training.max_tokens=4", "training.group_size=4"]
    one += ["campaign.parallel=false", "campaign.launcher=inline"]
    outcome = run_campaign(file, one)
    (run,) = (outcome.directory / "runs").iterdir()
    found = [(row["turns_mean"], row["separate_samples"], row["episode_errors"]) for row in read_metrics(run)]
    assert found == [(2.0, 16 * separate, 0)] * 2
