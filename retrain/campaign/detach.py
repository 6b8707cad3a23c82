"""Leaves a campaign running: an orchestrator in a session of its own, its messages in campaign.log."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from retrain.errors import EXIT_DONE, LaunchError
from retrain.locks.held import holder
from retrain.records.files import open_log
from retrain.records.layout import CampaignFiles

PAUSE_S = 0.02


def detach(directory: Path, arguments: Sequence[str] = ()) -> int:
    """Start `retrain resume DIRECTORY` in the background.

    Args:
        directory: the campaign's.
        arguments: more arguments of `resume`.

    Returns:
        Its process id, once it holds the campaign (or has already finished it).

    Raises:
        LaunchError: it ended at once; its last words are in campaign.log.
    """
    files = CampaignFiles(directory)
    log = open_log(files.log)
    start = os.fstat(log).st_size
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "retrain", "resume", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{directory}: no orchestrator could be started ({error.strerror})") from error
    finally:
        os.close(log)
    while (code := process.poll()) is None:
        found = holder(files.lock)
        if found is not None and found.pid == process.pid:
            return process.pid
        time.sleep(PAUSE_S)
    if code != EXIT_DONE:
        said = files.log.read_bytes()[start:].decode(errors="replace").strip()
        raise LaunchError(f"{directory}: the orchestrator ended at once: {said or f'exit code {code}'}")
    return process.pid
