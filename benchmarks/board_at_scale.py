"""How fast is `retrain board` over a large campaign that runs, and what does it cost while it is looked at?

Makes a campaign of which every run is alive, removed afterwards: this process holds the runs' locks, appends
a row to each every few seconds and says every second where it is, as workers do. A viewer asks as the page
does: for the table of runs, then for a condition's curves, then for what changed, with the curves open.

    python -m benchmarks.board_at_scale                # 500 x 500 rows of 1 kB, 250 MB
    python -m benchmarks.board_at_scale --browser      # also what a headless Chromium shows, and when
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import psutil

from benchmarks.suite import print_figures, script_parser
from retrain.base.clock import utc_now
from retrain.base.locks import hold
from retrain.records.layout import CampaignFiles, RunFiles, create_directory
from retrain.records.manifest import new_manifest, write_manifest
from retrain.records.run_row import RunEntry
from retrain.records.run_state import Progress, begin_attempt, write_progress

SEEDS = 10  # of a condition
WATCH = """
window.took_s = 0;
const campaign = document.querySelector("a[href^='#/c/']").getAttribute("href").split("/")[2];
location.hash = `#/c/${campaign}/${arguments[0]}`;
const began = performance.now();
const look = () => (IS_THERE ? (window.took_s = (performance.now() - began) / 1000) : setTimeout(look, 5));
setTimeout(look, 5);
"""
METRICS = 40  # of a row, with which it has a kilobyte


@dataclass(frozen=True)
class Worker:
    """A run that is alive as far as its files tell."""

    files: RunFiles
    run: RunEntry
    rng: random.Random

    def row(self, step: int) -> bytes:
        """Return a step's row."""
        known = {"step": step, "attempt": 1, "timestamp": utc_now(), "run": self.run.run_id}
        measured = {"mean_reward": step / self.run.max_steps, "step_time_s": self.rng.uniform(1, 2)}
        others = {f"metric_{number}": round(self.rng.random(), 6) for number in range(METRICS)}
        return json.dumps({**known, **measured, **others}).encode() + b"\n"

    def append(self, *rows: bytes) -> None:
        fd = os.open(self.files.metrics, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, b"".join(rows))
        os.close(fd)

    def tell(self, step: int) -> None:
        """Say where the run is."""
        write_progress(self.files.status, Progress("running", "sample", step, self.run.max_steps, 1))


def make_campaign(log_dir: Path, runs: int, rows: int) -> list[Worker]:
    """Write a campaign whose runs have taken so many steps, half of those that they are to take."""
    campaign = CampaignFiles(create_directory(log_dir, "scale"))
    campaign.campaign_toml.write_text("")
    campaign.runs.mkdir()
    names = [(f"condition{number // SEEDS}", number % SEEDS) for number in range(runs)]
    planned = [RunEntry(f"{name}_s{seed}", name, seed, 2 * rows) for name, seed in names]
    manifest = new_manifest("scale", "0", planned, log_dir)
    write_manifest(campaign.manifest, replace(manifest, workers=runs))
    hold(campaign.lock)
    workers = []
    for run in planned:
        worker = Worker(campaign.run(run.run_id), run, random.Random(run.run_id))
        worker.files.directory.mkdir()
        worker.files.run_toml.write_text("")
        hold(worker.files.lock)
        begin_attempt(worker.files.attempts)
        worker.append(*map(worker.row, range(1, rows + 1)))
        worker.tell(rows)
        workers.append(worker)
    return workers


@contextmanager
def living(workers: list[Worker], rows: int, step_s: float) -> Iterator[None]:
    """Have workers take a step every so many seconds, in turn, and each say every second where it is."""
    over = threading.Event()

    def live() -> None:
        began, taken = time.monotonic(), 0
        for second in range(1, 10**6):
            due = round(second * len(workers) / step_s)
            for number in range(taken, due):
                worker = workers[number % len(workers)]
                worker.append(worker.row(rows + 1 + number // len(workers)))
            for number, worker in enumerate(workers):
                worker.tell(rows + (due - number) // len(workers))
            taken = due
            if over.wait(max(0.0, began + second - time.monotonic())):
                return

    thread = threading.Thread(target=live)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Viewer:
    """Asks a board as its page does."""

    def __init__(self, address: str) -> None:
        self._server, token = re.findall(r"(http://.*)/#token=(.*)", address)[0]
        self._headers = {"Authorization": f"Bearer {token}"}

    def ask(self, path: str) -> Any:
        """Return an answer, None if nothing has changed."""
        with urlopen(Request(f"{self._server}/api/{path}", headers=self._headers)) as answer:
            return json.loads(answer.read() or b"null")

    def timed(self, path: str) -> tuple[Any, float]:
        """Return an answer, and the seconds that it took."""
        began_s = time.perf_counter()
        return self.ask(path), time.perf_counter() - began_s


def look(viewer: Viewer, process: psutil.Process, seconds: float) -> dict[str, float]:
    """Return how long first looks take, and what following a campaign for so long costs."""
    (campaign,) = viewer.ask("campaigns/all")["order"]
    table, table_s = viewer.timed(f"campaign/{campaign}")
    curves, curves_s = viewer.timed(f"curves/{campaign}?condition=condition0")
    _, other_s = viewer.timed(f"curves/{campaign}?condition=condition1&metric=metric_7")
    _, every_s = viewer.timed(f"curves/{campaign}?metric=metric_9")
    version, since, changed = table["version"], time.monotonic(), 0
    again_s, before_s = since + curves["again_s"], sum(process.cpu_times()[:2])
    while time.monotonic() < since + seconds:
        time.sleep(1.0)
        if news := viewer.ask(f"campaign/{campaign}?since={version}"):
            version, changed = news["version"], changed + 1
        if time.monotonic() >= again_s:
            curves = viewer.ask(f"curves/{campaign}?condition=condition0&have={curves.get('digest', '')}")
            again_s = time.monotonic() + curves["again_s"]
    spent_s = sum(process.cpu_times()[:2]) - before_s
    return {
        "table_s": table_s,
        "curves_s": curves_s,
        "other_curves_s": other_s,
        "curves_of_all_runs_s": every_s,
        "updates_per_minute": 60 * changed / seconds,
        "cpu_ms_per_second": 1000 * spent_s / (time.monotonic() - since),
    }


def look_in_browser(address: str) -> dict[str, float]:
    """Return how long a page takes from a click to the whole table, and to a condition's curves."""
    from tests.extras.browser import chromium  # not at the top: needs selenium and Chromium

    found = {}
    with chromium() as browser:
        browser.go(address)
        browser.until("return document.querySelector('table td a')")
        browser.until("return typeof vegaEmbed === 'function'")
        for name, part, is_there in (
            ("browser_table_s", "runs", "document.querySelectorAll('tbody tr').length > 1"),
            ("browser_curves_s", "curves", "document.querySelector('.chart[data-state=drawn]')"),
        ):
            browser.run(WATCH.replace("IS_THERE", is_there), part)
            found[name] = browser.until("return window.took_s")
    return found


def peak_mb(pid: int) -> float:
    """Return the most memory that a process has had, in MB."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak) * 1024 / 1e6


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--rows", type=int, default=500, help="of each run, at the start")
    parser.add_argument("--step-s", type=float, default=5.0, help="seconds between two rows of a run")
    parser.add_argument("--seconds", type=float, default=60.0, help="to look for")
    parser.add_argument("--browser", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="retrain-board-") as name:
        workers = make_campaign(Path(name), options.runs, options.rows)
        with living(workers, options.rows, options.step_s):
            command = [sys.executable, "-m", "retrain", "board", name, "--port", "0"]
            began_s = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as board:
                try:
                    assert board.stdout is not None
                    address = board.stdout.readline().split(": ")[1].strip()
                    found = {"runs": options.runs, "rows": options.rows}
                    found["start_s"] = time.perf_counter() - began_s
                    found |= look(Viewer(address), psutil.Process(board.pid), options.seconds)
                    if options.browser:
                        found |= look_in_browser(address)
                    found["peak_rss_mb"] = peak_mb(board.pid)
                finally:
                    board.send_signal(signal.SIGINT)
    print_figures(found, as_json=options.json)


if __name__ == "__main__":
    main()
