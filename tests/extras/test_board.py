"""The board in a real browser, over real campaigns: live, by keyboard, on a phone, for its own page only."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlencode

import psutil
import pytest

from retrain.records.layout import CampaignFiles
from retrain.records.lines import append_line
from retrain.records.samples import SamplesWriter
from tests.conftest import TINY
from tests.extras.browser import Browser, chromium
from tests.extras.test_report_engines import crashed as on_a_server
from tests.extras.test_report_page import CONDITIONS, HOSTILE, campaign
from tests.long.test_search import REFERENCE, SEARCH, WINNER
from tests.simulated import flat, write_campaign

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
LONG = TINY.replace("max_steps = 4", "max_steps = 4000").replace("max_workers = 2", "max_workers = 1")
LONG += "[backend]\noptions = { api_latency_s = 0.05 }\n"  # its steps leave the machine to the browser
TAB, ENTER = "\ue004", "\ue007"
HIDDEN = "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
TICK = """
[...document.querySelectorAll("label")].find((one) => one.textContent.trim() === arguments[0]).control.click()
"""
TOKENS = "return [...document.querySelectorAll('[title^=advantage]')].map((e) => [e.textContent, e.title])"
ROWS = """
return [...document.querySelectorAll("section table")].map((table) =>
  [...table.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((cell) => cell.textContent)));
"""
TEXT = "return document.body.innerText"


class Served:
    """A board that runs, its port and its tokens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.to_look, self.to_change = (process.stdout.readline().split(": ")[1].strip() for _ in range(2))
        self.port, self.token, self.change = re.findall(r":(\d+)/#token=(.+)&change=(.+)", self.to_change)[0]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, object]]:
        """Ask as a program does; headers have dashes for underscores."""
        sent = {"Authorization": f"Bearer {self.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=60)
        with closing(connection):
            connection.request(method, path, headers={name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            body = answer.read()
        return answer.status, json.loads(body) if body.startswith(b"{") else {}


@contextmanager
def board(directory: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "retrain", "board", str(directory), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield Served(process)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A board over one campaign that has ended, with hostile words, and one without any run."""
    directory = tmp_path_factory.mktemp("board") / "logs"
    files = CampaignFiles(campaign(directory))
    append_line(files.notices, {"at": "2026-01-01T00:00:00.000Z", "text": HOSTILE})
    write_campaign(directory, {("grpo", 0): flat(0.5, more=lambda step: {HOSTILE: 1.0})}, name="odd-1a2b")
    write_conversations(directory)
    with board(directory) as served:
        yield served


def write_conversations(directory: Path) -> None:
    """Two conditions with kept rollouts, of training and of held-out prompts."""
    named = write_campaign(directory, {("talk", 0): flat(0.5, 20), ("calm", 0): flat(0.5)}, name="read-1a2b")
    for run, last in (("talk_s0", 10), ("calm_s0", 15)):
        files = CampaignFiles(named).run(run)
        with closing(SamplesWriter(files.held_out, 1)) as held_out:
            for step in (5, 10, last):
                held_out.append(step, [{"reward": 1.0, "prompt_id": n, "completion": run} for n in (7, 8)])
        with closing(SamplesWriter(files.samples, 1)) as samples:
            turns = [{"policy": "go😀d", "environment": HOSTILE, "token_advantages": [[2, 0.5], [2, -0.25]]}]
            samples.append(19, [{"reward": 1.0, "prompt": "?", "completion": HOSTILE, "truncated": True}])
            rewarded = {"reward": 0.5, "parts": {"format": 0.5}, "prompt": "?", "source": "maths"}
            other = rewarded | {"completion": "c", "source": "code", "sign": "ran out of memory or files"}
            samples.append(20, [rewarded | {"turns": turns}, other])


def part(browser: Browser, served: Served, name: str, campaign: str = "study-1a2b") -> None:
    browser.go(served.to_change)
    browser.until("return document.querySelector('table td')")
    browser.run(f"location.hash = '#/c/{campaign}/{name}'")


def drawn(browser: Browser, name: str) -> None:
    browser.until(f"return document.querySelector('[data-chart={name}][data-state=drawn]:not(.coming)')")


def test_campaigns_and_runs_are_listed_with_their_states(still, browser):
    browser.go(still.to_look)
    browser.until("return document.body.innerText.includes('12 done, 1 failed')")
    browser.find("a[href='#/c/study-1a2b/runs']").click()
    browser.until("return document.querySelectorAll('tbody tr').length === 13")
    failed = browser.find("td[data-state=failed]")
    assert failed.text == "failed"
    assert browser.complaints() == []


def test_nothing_is_fetched_from_elsewhere_and_the_token_leaves_the_address(still, browser):
    part(browser, still, "curves")
    drawn(browser, "mean-reward")
    own = f"http://127.0.0.1:{still.port}/"
    asked = [url for url in browser.fetched() if not url.startswith("data:")]
    assert asked
    assert [url for url in asked if not url.startswith(own)] == []
    assert still.token not in browser.run("return location.href")


def test_curves_of_any_metric_are_drawn_by_condition(still, browser):
    part(browser, still, "curves")
    drawn(browser, "mean-reward")
    browser.until(
        "return [...document.querySelectorAll('option')].some((one) => one.value === 'permit_wait_s')"
    )
    browser.choose("select", "permit_wait_s")
    drawn(browser, "permit-wait-s")
    legend = browser.run("return document.querySelector('.chart svg').textContent")
    assert [name for name in CONDITIONS if name not in legend] == []
    browser.find("input[type=checkbox]").click()  # the first condition
    browser.until("return document.querySelector('summary').textContent === 'Conditions: 2 of 3'")
    count = "document.querySelector('.chart svg').innerHTML.split('stroke=\"#0072B2\"').length"
    browser.until(f"return {count} === 1 || !document.querySelector('.mark-line [stroke=\"#0072B2\"]')")
    assert browser.complaints() == []


def test_back_pressure_shows_its_curve_and_where_each_run_is(still, browser):
    part(browser, still, "pressure")
    drawn(browser, "usl")
    drawn(browser, "regimes")
    browser.until("return document.body.innerText.includes('maxrl+bp_s3')")
    assert browser.complaints() == []


def test_hostile_words_stay_words(still, browser):
    part(browser, still, "notices")
    browser.until("return document.querySelector('details')")
    browser.find("summary").click()
    browser.until("return document.querySelector('details pre').textContent.includes('onerror')")
    assert browser.run(TEXT).count("<img src=x onerror=") >= 3  # a failure, its log, a notice
    part(browser, still, "curves", "odd-1a2b")
    browser.until(
        "return [...document.querySelectorAll('option')].some((one) => one.value.includes('onerror'))"
    )
    browser.choose("select", HOSTILE)
    browser.until("return document.querySelector('.chart svg')?.textContent.includes('onerror')")
    assert browser.run("return window.pwned") is None
    assert browser.complaints() == []


def test_a_search_and_its_decision_are_shown_rung_by_rung(browser, here, retrain):
    (here / "search.toml").write_text(SEARCH)
    assert retrain("run", "search.toml").returncode == 0
    (campaign_dir,) = (here / "logs").iterdir()
    with board(here / "logs") as served:
        part(browser, served, "decisions", campaign_dir.name)
        browser.until("return document.querySelectorAll('h3').length === 3")
        heads = browser.run("return [...document.querySelectorAll('th')].map((one) => one.textContent)")
        rows = browser.run(ROWS)
    assert heads[:5] == ["condition", "step 2", "step 4", "step 6", "outcome"]
    outcomes = ["dropped at step 2"] * 2 + ["dropped at step 4", "dropped at step 6", "won"]
    assert [row[4] for row in rows[0]] == outcomes
    assert rows[0][-1][0] == WINNER
    assert [row[:2] for row in rows[1]] == [[WINNER, f"better than {REFERENCE}"]]
    assert rows[2][-1][3] == f"{WINNER} better"


def test_permits_and_engines_are_drawn_over_time(browser, tmp_path):
    waits = {"permit_wait_s": 0.5, "permits": 4}
    runs = {("a", 0): flat(0.5, 5, more=lambda step: on_a_server(step) | waits), ("b", 0): flat(0.5)}
    write_campaign(tmp_path, runs)
    with board(tmp_path) as served:
        part(browser, served, "engines")
        for name in ("permits", "permit-wait-s", "engine-running", "engine-kv-fraction"):
            drawn(browser, name)
        assert "server 1 crashed" in browser.run(TEXT)
        assert browser.complaints() == []


def test_rollouts_are_read_with_their_turns_advantages_and_signs(still, browser):
    part(browser, still, "rollouts?run=talk_s0", "read-1a2b")
    browser.until("return document.querySelectorAll('.rollout').length === 3")
    shown = browser.run(TEXT)
    assert [
        word for word in ("turn 1", "observation", "format 0.5", "truncated", HOSTILE) if word not in shown
    ] == []
    pieces = browser.run(
        "return [...document.querySelectorAll('[title^=advantage]')].map((e) => [e.textContent, e.title])"
    )
    assert pieces == [["go", "advantage +0.5"], ["😀d", "advantage -0.25"]]
    for label, count in (("truncated", 1), ("signs of cheating", 1)):
        browser.run(TICK, label)
        browser.until(f"return document.querySelectorAll('.rollout').length === {count}")
        browser.run(TICK, label)
        browser.until("return document.querySelectorAll('.rollout').length === 3")
    browser.until("return document.querySelectorAll('select')[3].options.length === 3")
    browser.run("const one = document.querySelectorAll('select')[3]; one.value = 'code'")
    browser.run("document.querySelectorAll('select')[3].dispatchEvent(new Event('change'))")
    browser.until("return document.querySelectorAll('.rollout').length === 1")
    browser.run("const one = document.querySelectorAll('select')[3]; one.value = ''")
    browser.run("document.querySelector('input[type=number]').value = '0.9'")
    browser.run("document.querySelector('input[type=number]').dispatchEvent(new Event('change'))")
    browser.until("return document.querySelectorAll('.rollout').length === 1")
    assert browser.run("return window.pwned") is None
    assert browser.complaints() == []


def test_two_conditions_are_read_side_by_side_on_the_same_held_out_prompt(still, browser):
    part(browser, still, "rollouts?run=talk_s0", "read-1a2b")
    browser.until("return document.querySelectorAll('.rollout').length === 3")
    for place, value in ((1, "calm_s0"), (2, "held-out")):
        browser.run(
            "const one = document.querySelectorAll('select')[arguments[0]]; one.value = arguments[1];"
            "one.dispatchEvent(new Event('change'))",
            place,
            value,
        )
    browser.until("return document.querySelectorAll('.pair').length === 2")
    titles = browser.run("return [...document.querySelectorAll('.pair h3')].map((one) => one.textContent)")
    assert titles == [f"{run}_s0, step 10, prompt {n}" for n in (7, 8) for run in ("talk", "calm")]


@pytest.mark.parametrize("name", "runs curves pressure engines decisions notices rollouts".split())
def test_a_phone_needs_no_sideways_scrolling(still, browser, name):
    with browser.width(390):
        part(browser, still, name)
        browser.until("return document.querySelector('section')?.children.length")
        browser.until("return [...document.querySelectorAll('.chart')].every((one) => one.dataset.state)")
        assert (
            browser.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
            == 0
        )


def test_dark_pages_have_light_words(still, browser):
    with browser.dark():
        part(browser, still, "curves")
        drawn(browser, "mean-reward")
        ink = browser.run("return getComputedStyle(document.querySelector('.chart svg text')).fill")
        paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (
        sum(map(int, re.findall(r"\d+", ink)[:3])) > 500 > 200 > sum(map(int, re.findall(r"\d+", paper)[:3]))
    )


def test_the_keyboard_reaches_a_campaign_and_its_parts(still, browser):
    browser.go(still.to_look)
    browser.until("return document.querySelector('table td a')")
    browser.run("document.activeElement.blur()")
    focus = "return document.activeElement.textContent"
    for _ in range(8):
        browser.press(TAB)
        if browser.run(focus) == "study-1a2b":
            break
    browser.press(ENTER)
    browser.until("return document.querySelector('.tabs')")
    for _ in range(8):
        browser.press(TAB)
        if browser.run(focus) == "Curves":
            break
    browser.press(ENTER)
    drawn(browser, "mean-reward")


def test_without_its_token_the_page_shows_nothing_and_says_how(still, browser):
    browser.go(f"http://127.0.0.1:{still.port}/#token=wrong")
    browser.until("return document.body.innerText.includes('token is missing or wrong')")
    assert "study" not in browser.run(TEXT)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer x"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example:80"}, 421),
        ({"Host": "localhost:1234"}, 200),  # a forwarded port
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
    ],
)
def test_only_its_own_page_is_answered(still, headers, status):
    answered, body = still.ask("/api/campaigns/all", **headers)
    assert answered == status
    assert ("study-1a2b" in json.dumps(body)) is (status == 200)


def test_a_change_needs_a_post_its_own_token_and_an_origin(still):
    path, own = "/api/act/study-1a2b?action=resume", f"http://127.0.0.1:{still.port}"
    assert still.ask(path, X_Change_Token=still.change, Origin=own)[0] == 404
    assert still.ask(path, "POST", Origin=own)[0] == 403
    assert still.ask(path, "POST", Origin=own, X_Change_Token=still.token)[0] == 403
    assert still.ask(path, "POST", X_Change_Token=still.change)[0] == 403
    odd = f"/api/act/study-1a2b?{urlencode({'action': 'stop; rm'})}"
    assert still.ask(odd, "POST", Origin=own, X_Change_Token=still.change)[0] == 400
    away = "/api/act/..%2F..?action=stop"
    assert still.ask(away, "POST", Origin=own, X_Change_Token=still.change)[0] in (400, 404)


def test_a_taken_port_and_a_missing_directory_are_explained(still, tmp_path):
    def refused(*words: object) -> str:
        command = [sys.executable, "-m", "retrain", "board", *map(str, words)]
        answer = subprocess.run(command, capture_output=True, text=True)
        assert answer.returncode == 2
        return answer.stderr

    assert "choose another, or 0 for a free one" in refused(tmp_path, "--port", still.port)
    assert "does not exist" in refused(tmp_path / "nowhere", "--port", 0)


def running(directory: Path) -> list[psutil.Process]:
    """The processes of campaigns in a directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(directory) in word for word in process.info["cmdline"] or []):
            found.append(process)
    return [one for one in found if "board" not in one.info["cmdline"]]


@pytest.fixture
def live(here: Path) -> Iterator[tuple[Path, Callable[[], subprocess.Popen[bytes]]]]:
    """A campaign that runs for minutes."""
    (here / "long.toml").write_text(LONG)
    command = [sys.executable, "-m", "retrain", "run", "long.toml", "--detach"]
    subprocess.run(command, check=True, capture_output=True)
    (directory,) = (here / "logs").iterdir()
    yield directory
    for process in running(directory):
        process.kill()


def number(browser: Browser) -> int:
    """The steps that the page says are done."""
    text = browser.run("return document.querySelector('main .note').textContent")
    return int(text.split(" of ")[0].replace(",", "") or 0)


def test_a_live_campaign_grows_is_stopped_resumed_and_killed(live, browser):
    name = live.name
    with board(live.parent) as served:
        part(browser, served, "curves", name)
        drawn(browser, "mean-reward")
        first = browser.run("return document.querySelector('.chart svg').innerHTML")
        began = number(browser)
        browser.until(f"return document.querySelector('.chart svg').innerHTML !== {json.dumps(first)}")
        WAIT = "return parseInt(document.querySelector('main .note').textContent.replace(/,/g, '')) >"
        browser.until(f"{WAIT} {began}")

        browser.find("main > .buttons button").click()  # Stop
        assert browser.find("#command").text == f"retrain stop {name}"
        browser.run("document.querySelector('#confirm button[value=no]').click()")
        assert running(live), "it was not confirmed"
        browser.find("main > .buttons button").click()
        browser.find("#confirmed").click()
        browser.until("return document.querySelector('main [data-state]').textContent === 'interrupted'")
        browser.until("return document.body.innerText.includes(': stopped')")
        assert running(live) == []

        browser.until(
            "return [...document.querySelectorAll('.buttons button')].some((b) => b.textContent === 'Resume')"
        )
        browser.find("main > .buttons button").click()
        browser.find("#confirmed").click()
        browser.until("return document.querySelector('main [data-state]').textContent === 'running'")
        browser.until("return document.body.innerText.includes('runs in the background')")
        stopped = number(browser)
        browser.until(f"{WAIT} {stopped}")

        for process in running(live):
            os.kill(process.pid, signal.SIGKILL)
        browser.until("return document.querySelector('main [data-state]').textContent === 'interrupted'")
        part(browser, served, "runs", name)
        browser.until("return document.querySelector('td[data-state=died]')")
        assert [one for one in browser.complaints() if "favicon" not in one] == []


def test_two_look_at_once_and_a_copy_can_be_looked_at(still, tmp_path):
    for _ in range(2):
        assert still.ask("/api/campaign/study-1a2b")[0] == 200
    status, news = still.ask("/api/campaign/study-1a2b")
    assert status == 200
    assert still.ask(f"/api/campaign/study-1a2b?since={news['version']}")[0] == 204
    copied = campaign(tmp_path / "copy")
    for path in copied.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    with board(copied) as served:
        assert served.ask("/api/curves/study-1a2b?condition=grpo")[0] == 200
    time.sleep(0.01)
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == before
    for path in copied.rglob("*"):
        path.chmod(0o755)
