"""Alerts reach a command and an address once each, and hold nothing up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from retrain.base.errors import ConfigError
from retrain.base.locks import hold, holder
from retrain.campaign import Observer, alerts
from retrain.campaign.alerts import Alerts
from retrain.campaign.run import reopen, run_campaign, start
from retrain.records import attention, run_row
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import API_PAUSED, Progress, begin_attempt, write_progress
from retrain.results.status import survey
from tests.conftest import ONE_RUN
from tests.semaphore_processes import wait_until

ROOT = Path(__file__).parents[2]
INLINE = "campaign.launcher=inline"
KEEP = 'notify = ["sh", "-c", "cat >> kept; echo >> kept"]'
Event = dict[str, Any]


@pytest.fixture(autouse=True)
def _plugins_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(alerts, "FIRST_WAIT_S", 0.0)


@pytest.fixture
def hook() -> Iterator[tuple[str, list[Event]]]:
    """The address of a server, and what was posted to it."""
    posted: list[Event] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.headers["Content-Type"] == "application/json"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/taking":
                posted.append(json.loads(body))
            self.send_response({"/taking": 204, "/moved": 302}.get(self.path, 500))
            self.send_header("Location", "/taking")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taking)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()
    server.server_close()
    thread.join()


class Heard(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def with_keys(campaign_file: Path, *lines: str) -> None:
    text = campaign_file.read_text()
    campaign_file.write_text(text.replace("[campaign]", "\n".join(["[campaign]", *lines]), 1))


def kept(here: Path) -> list[Event]:
    """What the command of KEEP got, in the directory where the campaign was started."""
    return [json.loads(line) for line in (here / "kept").read_text().splitlines()]


def kinds(events: list[Event]) -> Counter[str]:
    return Counter(event["kind"] for event in events)


def test_each_event_is_sent_once_also_after_a_resume(campaign_file: Path, here: Path) -> None:
    with_keys(campaign_file, KEEP)
    outcome = run_campaign(campaign_file, [INLINE, "reward.reward=tests.plugins.broken"])
    assert kinds(kept(here)) == {"failed": 4, "ended": 1}
    failed, ended = kept(here)[0], kept(here)[-1]
    assert failed["run"].startswith(failed["condition"])
    assert "this reward is broken" in failed["what"]
    assert (ended["kind"], ended["exit_code"], ended["what"]) == ("ended", 4, "4 runs: 4 failed")
    assert (ended["version"], ended["campaign"]) == (1, outcome.directory.name)
    assert Path(ended["directory"]).is_dir()
    reopen(outcome.directory).execute()  # leaves them alone
    assert len(kept(here)) == 5
    reopen(outcome.directory).execute(retry_failed=True)  # they fail anew
    assert kinds(kept(here)) == {"failed": 8, "ended": 2}


def test_an_address_gets_the_end_before_run_returns(
    campaign_file: Path, hook: tuple[str, list[Event]]
) -> None:
    address, posted = hook
    with_keys(campaign_file, f'notify_url = "{address}/taking"')
    assert run_campaign(campaign_file, [INLINE]).exit_code == 0
    assert [(event["kind"], event["exit_code"], event["what"]) for event in posted] == [
        ("ended", 0, "4 runs: 4 done")
    ]


def test_verdicts_are_sent(campaign_file: Path, here: Path) -> None:
    with_keys(campaign_file, KEEP)
    campaign_file.write_text(
        campaign_file.read_text() + '[decision]\nmetric = "mean_reward"\nmax_seeds = 3\n'
    )
    run_campaign(campaign_file, [INLINE, "campaign.seeds=[0, 1, 2]"])
    (verdict,) = (event for event in kept(here) if event["kind"] == "verdict")
    assert verdict["condition"] == "maxrl"
    assert verdict["what"].startswith("maxrl: ")


def test_a_budget_that_is_nearly_spent_is_sent_once(campaign_file: Path, here: Path) -> None:
    with_keys(campaign_file, KEEP)
    prices = "[budget]\nusd = 1000\n[budget.prices.numpy]\nprefill = 1\nsample = 1e6\ntrain = 1\n"
    campaign_file.write_text(campaign_file.read_text() + prices)
    outcome = run_campaign(campaign_file, [INLINE, *ONE_RUN, "campaign.max_steps=100000"])
    assert outcome.exit_code == 130
    assert [event["kind"] for event in kept(here)[-2:]] == ["budget", "ended"]
    assert kinds(kept(here))["budget"] == 1
    assert "has no room for another step" in kept(here)[-1]["what"]


def test_a_condition_that_learns_nothing_is_sent_once(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "LOOK_S", 0.0)
    with_keys(campaign_file, KEEP)
    campaign = start(campaign_file, ["reward.reward=tests.plugins.never_right", "campaign.max_steps=100000"])
    thread = threading.Thread(target=lambda: stop_once(campaign.stop, here / "kept", 2))
    thread.start()
    campaign.execute()
    thread.join()
    assert kinds(kept(here)) == {"no_signal": 2, "ended": 1}
    assert {event["condition"] for event in kept(here)[:2]} == {"grpo", "maxrl"}


def stop_once(stop: Callable[[], None], path: Path, lines: int) -> None:
    """Stop once a file has so many lines; pytest's timeout ends a wait that never succeeds."""
    while not path.exists() or len(path.read_text().splitlines()) < lines:
        time.sleep(0.05)
    stop()


def test_a_worker_that_hangs_is_sent_once(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "LOOK_S", 0.0)
    monkeypatch.setattr(attention, "LONGEST_SILENCE_S", 2.0)
    monkeypatch.setattr(run_row, "LEAST_SILENCE_S", 2.0)
    with_keys(campaign_file, KEEP)
    campaign = start(campaign_file, [*ONE_RUN, "campaign.max_steps=100000"])
    run = CampaignFiles(campaign.directory).run("grpo_s0")

    def hang() -> None:
        wait_until(lambda: run.metrics.exists() and len(read_metrics(run.directory)) > 1)
        worker = holder(run.lock)
        assert worker is not None
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: (here / "kept").exists())
            time.sleep(0.5)  # for a second one, which would be wrong
        finally:
            os.kill(worker.pid, signal.SIGCONT)
            campaign.stop()

    thread = threading.Thread(target=hang)
    thread.start()
    campaign.execute()
    thread.join()
    assert [(event["kind"], event["run"]) for event in kept(here)] == [("stalled", "grpo_s0"), ("ended", "")]
    assert "nothing has happened for" in kept(here)[0]["what"]


def test_a_pause_is_sent_when_it_is_long(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "PATIENCE_S", 0.0)
    with_keys(campaign_file, KEEP)
    campaign = start(campaign_file, [*ONE_RUN])
    files = CampaignFiles(campaign.directory)
    run = files.run("grpo_s0")
    sending = Alerts(campaign.plan.campaign, files, here, print)
    with hold(run.lock) or pytest.fail("somebody holds it"):
        begin_attempt(run.attempts)
        write_progress(run.status, Progress("running", API_PAUSED, 1, 4, 1))
        for _ in range(2):
            sending.look(campaign.plan)
            monkeypatch.setattr(sending, "_look_at_s", 0.0)
    sending.close()
    assert [(event["kind"], event["run"]) for event in kept(here)] == [("paused", "grpo_s0")]


def test_a_command_that_hangs_holds_nothing_up_and_a_resume_repeats_what_it_missed(
    campaign_file: Path, here: Path, hook: tuple[str, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "LAST_S", 1.0)
    address, posted = hook
    hanging = 'notify = ["sh", "-c", "echo $$ >> pids; exec sleep 100000"]'
    with_keys(campaign_file, hanging, f'notify_url = "{address}/taking"')
    outcome = run_campaign(campaign_file, ["reward.reward=tests.plugins.broken"])
    assert outcome.exit_code == 4
    assert kinds(posted) == {"failed": 4, "ended": 1}
    (pid,) = (here / "pids").read_text().split()
    wait_until(lambda: not psutil.pid_exists(int(pid)))
    (status,) = survey(outcome.directory)
    assert status.alerts == "5 of 5 not delivered; notify: no answer within 1 s of the end"
    file = outcome.directory / "campaign.toml"
    file.write_text(file.read_text().replace(hanging, KEEP))
    reopen(outcome.directory).execute()
    assert kinds(kept(here)) == {"failed": 4, "ended": 1}
    assert len(posted) == 5
    assert survey(outcome.directory)[0].alerts == ""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('notify = ["sh", "-c", "echo no display >&2; exit 3"]', "notify: exit code 3: no display"),
        ('notify_url = "{address}/secret"', "notify_url: 127.0.0.1: HTTP status 500"),
        ('notify_url = "{address}/moved"', "notify_url: 127.0.0.1: HTTP status 302"),
        ('notify_url = "http://127.0.0.1:1/secret"', "notify_url: 127.0.0.1: Connection refused"),
    ],
)
def test_a_way_that_fails_is_named_and_ends_no_campaign(
    line: str, problem: str, campaign_file: Path, hook: tuple[str, list[Event]]
) -> None:
    with_keys(campaign_file, line.format(address=hook[0]))
    heard = Heard()
    outcome = run_campaign(campaign_file, [INLINE, *ONE_RUN], heard)
    assert (outcome.exit_code, hook[1]) == (0, [])
    way, why = problem.split(": ", 1)
    assert f"{way}: an alert was not delivered: {why}" in heard.notices
    assert survey(outcome.directory)[0].alerts == f"1 of 1 not delivered; {problem}"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            'notify = ["no-such-program"]',
            'got ["no-such-program"]; "no-such-program" is no program that is found',
        ),
        ('notify_url = "hooks.example"', "is no address; needs one of HTTP"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(line: str, problem: str, campaign_file: Path) -> None:
    with_keys(campaign_file, line)
    with pytest.raises(ConfigError) as refused:
        start(campaign_file)
    assert refused.value.problems[0].startswith(f"tiny.toml [campaign].{line.split()[0]}: {problem}")


def test_a_campaign_without_a_way_writes_nothing(campaign_file: Path) -> None:
    outcome = run_campaign(campaign_file, [INLINE, *ONE_RUN])
    assert not (outcome.directory / "alerts.jsonl").exists()
