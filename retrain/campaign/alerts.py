"""Tells a command and an address what happens in a campaign, each event once.

Each way has a thread of its own, so that one that is slow, hangs or fails holds up neither a run nor the
other way. What it did not take is told in a notice and in `status`, and is sent again by the next resume.
An orchestrator that is killed right after a delivery may repeat that one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from retrain.base.clock import utc_now
from retrain.base.errors import RecordsError
from retrain.base.http_client import answer_of
from retrain.base.redaction import redacted
from retrain.campaign.endings import Ending
from retrain.config.schema import CampaignSection
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.attention import AttentionWatch
from retrain.records.campaign_state import ALERT_VERSION, Alert, AlertBook, why_stopped
from retrain.records.decision import OPEN, Decision, verdict_of
from retrain.records.files import readable
from retrain.records.layout import CampaignFiles
from retrain.records.lines import dump_line
from retrain.records.mirror import MirrorState
from retrain.records.run_row import NO_MESSAGE, RunReading, read_run
from retrain.records.run_state import read_attempts
from retrain.records.text import dollars, plain

PATIENCE_S = 600.0  # with a pause
LOOK_S = 5.0  # at least, between two looks at the runs
SHARE = 0.02  # of a core, for them
LONGEST_S = 30.0  # of one delivery
ATTEMPTS = 3  # to deliver an alert
FIRST_WAIT_S = 1.0  # between them; each later one is four times as long
LAST_S = 10.0  # for what is still to be delivered at the end
NEAR_END = 0.9  # of the budget


class Way(Protocol):
    """One way to deliver alerts."""

    name: str

    def send(self, body: bytes) -> str:
        """Deliver, and return why that failed; "" if it did not."""

    def stop(self) -> None:
        """End a delivery that another thread has begun."""


class Command:
    """A command that gets each alert on its standard input."""

    name = "notify"

    def __init__(self, command: Sequence[str], where: Path) -> None:
        self._command, self._where = command, where
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, body: bytes) -> str:
        with tempfile.TemporaryFile() as errors:  # not a pipe, which what it leaves behind would hold open
            try:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._where,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
                )
            except (OSError, ValueError) as error:
                return f"cannot be started ({getattr(error, 'strerror', None) or error})"
            try:
                self._process.communicate(body, timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                self.stop()
                self._process.wait()
                return f"took longer than {LONGEST_S:g} s and was killed"
            code = self._process.returncode
            if code == 0:
                return ""
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - 1000))
            said = errors.read().decode(errors="replace").strip().splitlines()
        return f"exit code {code}{f': {said[-1]}' if said else ''}"

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)


class Webhook:
    """An address to which each alert is posted."""

    def __init__(self, address: str) -> None:
        self.name = "notify_url"
        self._address = address

    def send(self, body: bytes) -> str:
        status, problem = answer_of(self._address, body, LONGEST_S)
        if status >= 300:  # a redirect is a refusal
            problem = f"HTTP status {status}"
        return f"{urlsplit(self._address).hostname}: {problem}" if problem else ""

    def stop(self) -> None:
        """A thread that waits for an answer ends with this process."""


class Alerts:
    """A campaign's alerts, for the holder of its lock; does nothing where the campaign names no way."""

    def __init__(
        self, campaign: CampaignSection, files: CampaignFiles, where: Path, notice: Callable[[str], None]
    ) -> None:
        """Send again what an earlier orchestrator could not deliver; the command runs in `where`."""
        self._files, self._notice = files, notice
        ways: list[Way] = [Command(campaign.notify, where)] if campaign.notify else []
        ways += [Webhook(campaign.notify_url)] if campaign.notify_url else []
        self._outcomes: queue.SimpleQueue[tuple[str, str, str]] = queue.SimpleQueue()
        self._book = readable(AlertBook, files.alerts, notice) if ways else None
        self._deliveries = [_Delivery(way, self._outcomes.put) for way in ways] if self._book else []
        self._refused: set[str] = set()  # ways of which a problem was told
        for delivery in self._deliveries:
            for alert in self._book.undelivered(delivery.way.name) if self._book else ():
                delivery.put(alert)
        self._readings: dict[str, RunReading] = {}
        self._attention = AttentionWatch(PATIENCE_S, has_queue=campaign.launcher not in ("local", "inline"))
        self._look_at_s = 0.0

    def look(self, plan: Plan, *, is_last: bool = False) -> None:
        """Look at all runs if it is time, or a last time, and note what was delivered; never waits."""
        if self._book is None:
            return
        self._note_outcomes()
        now_s = time.monotonic()
        if now_s < self._look_at_s and not is_last:
            return
        began_s = time.thread_time()
        with contextlib.suppress(RecordsError):  # what needs the records reports it
            rows = []
            for run in plan.runs:
                before = self._readings.get(run.run_id)
                self._readings[run.run_id] = read_run(run.planned, self._files.run(run.run_id), before)
                rows.append(self._readings[run.run_id].row)
            attempts = {row.name: row.attempt for row in rows}
            for each in self._attention.look(rows, now_s):
                place = f"{each.run}:{attempts.get(each.run, '')}"
                key = each.condition if each.kind == "no_signal" else place
                self._tell(f"{each.kind}:{key}", each.kind, each.what, each.run, each.condition)
            limit_usd = plan.runs[0].config.budget.usd
            cost_usd = sum(row.cost_usd or 0.0 for row in rows)
            if limit_usd is not None and cost_usd >= NEAR_END * limit_usd:
                what = f"{dollars(cost_usd)} of a budget of {dollars(limit_usd)} are spent"
                self._tell(f"budget:{limit_usd}", "budget", what)
        cost_s = time.thread_time() - began_s
        self._look_at_s = now_s + max(LOOK_S, cost_s / SHARE)

    def failed(self, run: RunPlan, ending: Ending) -> None:
        """Tell that a run has ended badly and is not retried."""
        if self._book is None:
            return
        attempts = readable(read_attempts, self._files.run(run.run_id).attempts)
        what = f"{ending.state}: {ending.message or NO_MESSAGE}"
        key = f"failed:{run.run_id}:{len(attempts or ())}"
        self._tell(key, "failed", what, run.planned.name, run.condition)

    def decided(self, decision: Decision | None) -> None:
        """Tell verdicts."""
        for each in decision.conditions if decision else ():
            if each.verdict != OPEN and decision:
                key = f"verdict:{each.condition}:{each.verdict}"
                self._tell(key, "verdict", verdict_of(each, decision), condition=each.condition)

    def not_mirrored(self, state: MirrorState) -> None:
        """Tell that nothing can be copied, once after each copy."""
        self._tell(f"mirror:{state.copied_at}", "mirror", f"{state.url}: {state.problem}")

    def ended(self, exit_code: int, what: str, which: object) -> None:
        """Tell that the campaign has ended; `which` tells one end from the next."""
        if self._book is not None:
            why = why_stopped(self._files)
            text = f"{what}; stopped by itself: {why}" if why else what
            self._tell(f"ended:{exit_code}:{which}", "ended", text, exit_code=exit_code)

    def close(self) -> None:
        """Wait until all is delivered, for LAST_S at most."""
        until_s = time.monotonic() + LAST_S
        for delivery in self._deliveries:
            delivery.put(None)
        for delivery in self._deliveries:
            delivery.end(until_s)
        for delivery in self._deliveries:
            for key in delivery.left():
                self._outcomes.put((key, delivery.way.name, f"no answer within {LAST_S:g} s of the end"))
        self._note_outcomes()

    def _tell(
        self, key: str, kind: str, what: str, run: str = "", condition: str = "", exit_code: int | None = None
    ) -> None:
        if self._book is None or key in self._book.alerts:
            return
        directory, host = self._files.directory.absolute(), os.uname().nodename
        text = plain(redacted(what), 2000)
        alert = Alert(
            ALERT_VERSION,
            key,
            kind,
            directory.name,
            str(directory),
            host,
            utc_now(),
            run,
            condition,
            text,
            exit_code,
        )
        with contextlib.suppress(RecordsError):  # a full disk, or a directory that was removed
            self._book.add(alert)
        for delivery in self._deliveries:
            delivery.put(alert)

    def _note_outcomes(self) -> None:
        while self._book is not None and not self._outcomes.empty():
            key, way, problem = self._outcomes.get()
            problem = redacted(problem)
            with contextlib.suppress(RecordsError):
                self._book.note(key, way, problem)
            if problem and way not in self._refused:
                self._notice(f"{way}: an alert was not delivered: {problem}")
            (self._refused.add if problem else self._refused.discard)(way)


class _Delivery(threading.Thread):
    """Delivers alerts one way, one after the other."""

    def __init__(self, way: Way, done: Callable[[tuple[str, str, str]], None]) -> None:
        super().__init__(name=f"alerts by {way.name}", daemon=True)
        self.way, self._done = way, done
        self._alerts: queue.SimpleQueue[Alert | None] = queue.SimpleQueue()
        self._left: dict[str, None] = {}  # keys of what is not delivered yet
        self._ending = threading.Event()
        self.start()

    def put(self, alert: Alert | None) -> None:
        """Deliver an alert after those before it; None ends this."""
        if alert is not None:
            self._left[alert.key] = None
        self._alerts.put(alert)

    def left(self) -> Sequence[str]:
        """Return the keys of what was not delivered, after the end."""
        return list(self._left)

    def end(self, until_s: float) -> None:
        """Wait for what is left, on the monotonic clock; then end what is under way."""
        self.join(max(0.0, until_s - time.monotonic()))
        self._ending.set()
        self.way.stop()

    def run(self) -> None:
        for alert in iter(self._alerts.get, None):
            if self._ending.is_set():
                return
            problem = self._persist(dump_line(asdict(alert)).encode())
            if problem and self._ending.is_set():
                return
            del self._left[alert.key]
            self._done((alert.key, self.way.name, problem))

    def _persist(self, body: bytes) -> str:
        problem = ""
        for attempt in range(ATTEMPTS):
            if attempt and self._ending.wait(FIRST_WAIT_S * 4.0 ** (attempt - 1)):
                break
            if not (problem := self.way.send(body)):
                break
        return problem
