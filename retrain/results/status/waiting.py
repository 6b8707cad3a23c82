"""Waits for a campaign: until its orchestrator has left, or something about it needs somebody."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import EXIT_ATTENTION, EXIT_DONE, EXIT_RUN_FAILED
from retrain.records.attention import Attention, AttentionWatch
from retrain.records.files import readable
from retrain.records.layout import open_campaign
from retrain.records.manifest import read_manifest
from retrain.records.provenance import known_origin
from retrain.results.status import CampaignStatus
from retrain.results.status.watch import Watcher

ARRIVAL_S = 10.0  # until a campaign without an orchestrator counts as left: one may just be starting
LOCAL = ("local", "inline")  # launchers without a queue
BY_STATE = {"done": EXIT_DONE, "failed": EXIT_RUN_FAILED}  # where no exit code was recorded


@dataclass(frozen=True)
class Waited:
    """Why a wait ended."""

    id: str  # the campaign's directory's name
    state: str  # of the campaign
    exit_code: int  # what `retrain run` exited with; 6 if something needs attention
    attention: tuple[Attention, ...]  # what does; empty after the end
    stopped: str  # why the campaign stopped by itself
    resume_with: str


class CampaignWait:
    """Looks at one campaign until it is over."""

    def __init__(self, directory: Path, patience_s: float, ignored: Collection[str] = ()) -> None:
        """Begin; what needs attention of `ignored` kinds ends no wait.

        Raises ConfigError or RecordsError if the directory holds no campaign that can be read.
        """
        self._files = open_campaign(directory)
        self._watcher = Watcher(directory)
        launcher = known_origin(self._files)[0].launcher
        self._attention = AttentionWatch(patience_s, has_queue=launcher not in LOCAL)
        self._ignored = ignored
        self._alone_since_s: float | None = None

    def look(self) -> Waited | None:
        """Return why there is nothing more to wait for; None while there is."""
        view = self._watcher.refresh()
        status, now_s = view.campaigns[0].status, time.monotonic()
        if status.is_supervised:
            self._alone_since_s = None
            notices = [event.text for event in view.events if event.kind == "notice"]
            wanting = self._attention.look(status.runs, now_s, notices[-1] if notices else "")
            attention = tuple(each for each in wanting if each.kind not in self._ignored)
            return _waited(status, EXIT_ATTENTION, attention) if attention else None
        # the manifest is read after its writer was seen to be gone, so it is the last one
        manifest = readable(read_manifest, self._files.manifest)
        exit_code = manifest.exit_code if manifest else None
        if exit_code is None and not any(run.state == "running" for run in status.runs):
            exit_code = BY_STATE.get(status.state)
        if exit_code is not None:
            return _waited(status, exit_code)
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        if now_s - self._alone_since_s < ARRIVAL_S or "unsupervised" in self._ignored:
            return None
        what = "its orchestrator has left without a record of its end: no run is started or retried"
        return _waited(status, EXIT_ATTENTION, (Attention("unsupervised", "", "", what),))


def _waited(status: CampaignStatus, exit_code: int, attention: tuple[Attention, ...] = ()) -> Waited:
    return Waited(status.id, status.state, exit_code, attention, status.stopped, status.resume_with)
