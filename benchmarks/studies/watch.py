"""What does `retrain status --watch` cost while 100 runs are alive?

One process simulates them: real locks, rows, status files and attempts, one step a second each. Beside
it runs the real command on a pseudo-terminal of 120 x 40; its processor time (as the kernel counts it)
is divided by the wall time, start-up left out. Then the same with `--json`, and for comparison a loop
that surveys everything anew as often as the view was redrawn.

    python -m benchmarks.studies.watch [--runs 100] [--rows 500] [--seconds 30] [--json]
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.suite import script_parser
from retrain.base.locks import hold
from retrain.records.layout import CampaignFiles, create_directory
from retrain.records.manifest import new_manifest, write_manifest
from retrain.records.metrics import MetricsWriter
from retrain.records.run_row import RunEntry
from retrain.records.run_state import Progress, begin_attempt, write_progress
from retrain.results.status import survey

CONDITIONS = 10
WARM_UP_S = 4.0  # imports and the first look
FILLER = {f"some_metric_{number}": number / 7 for number in range(20)}  # rows of about 1,000 bytes


@dataclass(frozen=True)
class Measured:
    what: str
    percent_of_a_core: float
    cpu_s: float
    wall_s: float
    redraws_per_s: float
    bytes_per_s: float


class LiveRuns:
    """Runs that take a step a second until they are left."""

    def __init__(self, log_dir: Path, runs: int, rows: int) -> None:
        self._stack = ExitStack()
        self._left = threading.Event()
        campaign = CampaignFiles(create_directory(log_dir, "live"))
        campaign.campaign_toml.touch()
        campaign.runs.mkdir()
        names = [(f"condition{i % CONDITIONS}", i // CONDITIONS) for i in range(runs)]
        planned = [RunEntry(f"{condition}_s{seed}", condition, seed, 100_000) for condition, seed in names]
        write_manifest(campaign.manifest, new_manifest("live", "0", planned, log_dir))
        self._runs = [campaign.run(run.run_id) for run in planned]
        self._writers = []
        for files in self._runs:
            files.directory.mkdir()
            files.run_toml.touch()
            lock = hold(files.lock)
            assert lock is not None
            self._stack.enter_context(lock)
            begin_attempt(files.attempts)
            writer = self._stack.enter_context(MetricsWriter(files.metrics, 1))
            self._writers.append(writer)
            for step in range(1, rows + 1):
                writer.append(row_of(step))
        self._rows = rows
        self._thread = threading.Thread(target=self._live)

    def __enter__(self) -> LiveRuns:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self._stack.close()

    def _live(self) -> None:
        step = self._rows
        while not self._left.is_set():
            step += 1
            for files, writer in zip(self._runs, self._writers, strict=True):
                write_progress(files.status, Progress("running", "train", step, 100_000, 1))
                writer.append(row_of(step))
                if self._left.wait(1.0 / len(self._runs)):
                    return


def row_of(step: int) -> dict[str, object]:
    values: dict[str, object] = {
        "step": step,
        "mean_reward": 1 - 1 / (1 + step / 100),
        "step_time_s": 1.0,
        "batch_size": 8,
    }
    values |= {"bp_regime": "optimal", "bp_action": "hold", "throttle_level": "full"}
    return values | FILLER


def watch(log_dir: Path, seconds: float, *options: str) -> Measured:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "retrain", "status", str(log_dir), "--watch", *options]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | {"TERM": "xterm-256color"}
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, env=env, start_new_session=True)
    os.close(theirs)
    seen = Drain(ours)
    time.sleep(WARM_UP_S)
    watched, begun, before, redraws, size = psutil.Process(child.pid), time.monotonic(), None, 0, 0
    before = watched.cpu_times()
    redraws, size = seen.redraws, seen.size
    time.sleep(seconds)
    after, wall_s = watched.cpu_times(), time.monotonic() - begun
    child.terminate()
    child.wait()
    os.close(ours)
    cpu_s = after.user + after.system - before.user - before.system
    what = "watch --json" if options else "watch"
    redraws, size = seen.redraws - redraws, seen.size - size
    return Measured(what, 100 * cpu_s / wall_s, cpu_s, wall_s, redraws / wall_s, size / wall_s)


class Drain:
    """Reads what a terminal would show, and counts how often it is redrawn."""

    def __init__(self, fd: int) -> None:
        self.redraws = 0
        self.size = 0
        threading.Thread(target=self._read, args=(fd,), daemon=True).start()

    def _read(self, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 2**16)
            except OSError:
                return
            if not data:
                return
            self.size += len(data)
            self.redraws += data.count(b"\x1b[H")


def survey_anew(log_dir: Path, seconds: float, pause_s: float) -> Measured:
    survey(log_dir)
    begun, before, looks = time.monotonic(), time.thread_time(), 0
    while time.monotonic() - begun < seconds:
        survey(log_dir)
        looks += 1
        time.sleep(pause_s)
    cpu_s, wall_s = time.thread_time() - before, time.monotonic() - begun
    return Measured("survey anew", 100 * cpu_s / wall_s, cpu_s, wall_s, looks / wall_s, 0.0)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--rows", type=int, default=500, help="rows that each run has at the beginning")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="retrain-watch-") as name:
        log_dir = Path(name)
        with LiveRuns(log_dir, options.runs, options.rows):
            view = watch(log_dir, options.seconds)
            lines = watch(log_dir, options.seconds, "--json")
            anew = survey_anew(log_dir, options.seconds, 1 / max(0.1, view.redraws_per_s))
    measured = [view, lines, anew]
    if options.json:
        print(json.dumps({"runs": options.runs, "measured": [asdict(one) for one in measured]}))
        return
    print(f"{options.runs} live runs, a step a second each, {options.rows} rows to begin with")
    print(f"{'':14}{'% of a core':>12}{'cpu s':>8}{'wall s':>8}{'redraws/s':>11}{'kB/s':>8}")
    for one in measured:
        print(
            f"{one.what:14}{one.percent_of_a_core:12.2f}{one.cpu_s:8.2f}{one.wall_s:8.1f}"
            f"{one.redraws_per_s:11.2f}{one.bytes_per_s / 1000:8.1f}"
        )


if __name__ == "__main__":
    main()
