"""Ways for a run to be asked to stop, or to be killed, at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import psutil

from retrain.base.locks import start_mark
from retrain.campaign.orchestrate import CampaignOutcome
from retrain.campaign.run import reopen
from retrain.records.layout import CampaignFiles, RunFiles, find_campaigns
from retrain.records.metrics import read_metrics

INLINE, IN_TWO_WORKERS = 'launcher = "inline"', 'launcher = "local"\nparallel = true\nmax_workers = 2'


class StopAfterStep(threading.Event):
    """Asks to stop once the run's rows have reached a step."""

    def __init__(self, files: RunFiles, step: int) -> None:
        super().__init__()
        self._files, self._step = files, step

    def is_set(self) -> bool:
        return len(read_metrics(self._files.directory)) >= self._step


class StopAtLook(threading.Event):
    """Asks to stop when it is looked at so many times."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self._left = look

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0


def kill_when(is_time: Callable[[], bool], command: Sequence[str], directory: Path) -> None:
    """Run a command, and kill it with all that it started when it is time, or after five minutes."""
    process = subprocess.Popen(command, cwd=directory, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not is_time() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
        command_itself = psutil.Process(process.pid)
        command_itself.suspend()  # it starts no more
        killed = [*command_itself.children(recursive=True), command_itself]
        for one in killed:
            one.kill()
        while not all(map(has_ended, killed)):
            time.sleep(0.01)
    process.wait()


def killed_at(
    moments: Sequence[int], have_come: Callable[[Path, int], bool], file: Path, directory: Path
) -> Path:
    """Run a campaign in a new directory, and kill it, and what resumes it, at each moment; return its own."""
    directory.mkdir()
    command = [sys.executable, "-m", "retrain", "run", str(file)]
    for moment in moments:
        kill_when(partial(have_come, directory, moment), command, directory)
        (campaign,) = find_campaigns(directory / "logs")
        command = [sys.executable, "-m", "retrain", "resume", str(campaign)]
    return campaign


def has_ended(process: psutil.Process) -> bool:
    """Whether a process has ended; one that lost its parent may stay as a zombie that nobody reaps."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_running(pid: int, started: str) -> bool:
    """Whether the process runs that had this number when its `start_mark` was taken."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return start_mark(pid) == started and not has_ended(psutil.Process(pid))
    return False


def finish_inline(directory: Path) -> CampaignOutcome:
    """Let a campaign of two workers at a time go on to its end in this process, which starts no others."""
    given = CampaignFiles(directory).campaign_toml
    given.write_text(given.read_text().replace(IN_TWO_WORKERS, INLINE))
    return reopen(directory).execute()
