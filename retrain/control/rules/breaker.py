"""Circuit breaker: pause launching after consecutive infrastructure failures.

Closed: every run is admitted. Open, after `threshold` consecutive infrastructure failures: no run is
admitted for a pause that doubles each time. Then half-open: one run is admitted as a probe. If the probe
fails for infrastructure, the breaker opens again; if it ends in any other way, or is still running
`PROBATION_S` after its worker began, the breaker closes. While it is queued, the others wait.

Source: the circuit breaker pattern, Nygard, Release It! (2007).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

PAUSE_S, LONGEST_PAUSE_S = 60.0, 1800.0  # the first pause; it doubles after each failed probe
PROBATION_S = 120.0  # a probe that runs this long counts as a success


@dataclass(frozen=True, slots=True)
class LaunchAdmission:
    """Whether a run may start now."""

    is_open: bool  # of the breaker: no run may start
    reason: str
    is_probe: bool = False  # half-open: one run may start, the next after its outcome is known


class CircuitBreaker:
    """Count consecutive infrastructure failures over a campaign.

    A run counts once, however often it is retried. Runs that are lost with one machine count as one.
    """

    def __init__(self, threshold: int, same_loss_s: float = 0.0) -> None:
        """Start closed; so many failures in a row open it, 0: never. Losses so close have one cause."""
        self._threshold, self._same_loss_s = threshold or math.inf, same_loss_s
        self._same_loss_until_s = -math.inf
        self._close()

    def _close(self) -> None:
        self._pause_s, self._failures, self._why = PAUSE_S, 0, ""
        self._failed: set[str] = set()  # runs that counted since it closed or opened
        self._resumes_at_s: float | None = None  # set: open until then, half-open afterwards
        self._probation_ends_s = math.inf  # until the probe's worker begins
        self._probe = ""  # half-open: the run that was launched

    def ask(self, now_s: float) -> LaunchAdmission:
        """Return whether a run may start; `now_s` is the caller's clock, the same in all calls."""
        if self._resumes_at_s is None:
            return LaunchAdmission(False, "closed")
        if now_s < self._resumes_at_s:
            return LaunchAdmission(True, self._why)
        if not self._probe:
            return LaunchAdmission(False, "one run is started as a probe", is_probe=True)
        if now_s < self._probation_ends_s:
            return LaunchAdmission(True, "one run is probing before the others start")
        self._close()
        return LaunchAdmission(False, "the probe is still running")

    def launched(self, run: str) -> None:
        """Record that a run was launched, or queued; if the breaker is half-open, that run is the probe."""
        if self._resumes_at_s is not None and not self._probe:
            self._probe, self._probation_ends_s = run, math.inf

    def started(self, now_s: float, run: str) -> None:
        if run == self._probe:
            self._probation_ends_s = now_s + PROBATION_S

    def withdrawn(self, run: str) -> None:
        """Record that a run ended by a request; if it was the probe, the next one launched is."""
        if run == self._probe:
            self._probe = ""

    def ended(
        self, now_s: float, run: str, *, infrastructure: bool, is_lost: bool = False, message: str = ""
    ) -> None:
        """Record that an attempt of a run ended.

        Args:
            now_s: the caller's clock.
            run: which; the failure of another than the probe is not the probe's.
            infrastructure: whether it failed for infrastructure; any other ending counts as success.
            is_lost: whether with its machine.
            message: the cause, for the reason of later admissions.
        """
        is_probe = run == self._probe
        if run in self._failed and not is_probe:
            return
        if not infrastructure:
            self._close()
            return
        if is_lost and not is_probe:
            if now_s < self._same_loss_until_s:
                return
            self._same_loss_until_s = now_s + self._same_loss_s
        self._failures += 1
        if not is_probe and (self._resumes_at_s is not None or self._failures < self._threshold):
            self._failed.add(run)  # that was started before the pause, or bad luck
            return
        self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s) if is_probe else PAUSE_S
        self._resumes_at_s, self._probe = now_s + self._pause_s, ""
        self._failed.clear()  # a new row begins; after a pause the probe counts, whichever run it is
        self._why = f"{self._failures} attempts in a row failed for infrastructure"
        self._why += f"; last error: {message}" if message else ""
