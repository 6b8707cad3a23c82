"""Stops starting runs when one after another fails for the surroundings, not for itself.

Closed: everything is admitted. Open, after `threshold` infrastructure failures in a row: nothing is,
for a pause that doubles each time. Then half-open: one run is admitted as a probe. If it ends in any
other way, or is still alive after `probation_s`, the breaker closes; if it fails like the others,
it opens again.

Source: the circuit breaker pattern, Nygard, Release It! (2007).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.controllers import require


@dataclass(frozen=True, slots=True)
class Admission:
    """May a run be started now, and if not, when to ask again."""

    is_open: bool  # the breaker is: nothing may start
    ask_again_s: float  # on the caller's clock; meaningless when runs may start
    reason: str
    is_probe: bool = False  # one may start, and the next one when that has shown how it goes


class CircuitBreaker:
    """Counts infrastructure failures in a row over a campaign."""

    def __init__(
        self,
        threshold: int = 3,
        *,
        pause_s: float = 60.0,
        longest_pause_s: float = 1800.0,
        probation_s: float = 120.0,
    ) -> None:
        """Start closed.

        Args:
            threshold: failures in a row that open it.
            pause_s: the first pause; doubles while probes fail.
            longest_pause_s: where doubling ends.
            probation_s: a probe that lives this long counts as a success.

        Raises:
            ValueError: a number is out of range.
        """
        require("threshold", threshold, threshold >= 1, "1 or more")
        require("pause_s", pause_s, pause_s > 0, "more than 0")
        require(
            "longest_pause_s", longest_pause_s, longest_pause_s >= pause_s, f"pause_s ({pause_s}) or more"
        )
        require("probation_s", probation_s, probation_s >= 0, "0 or more")
        self._threshold = threshold
        self._first_pause_s, self._longest_pause_s = pause_s, longest_pause_s
        self._probation_s = probation_s
        self._failures = 0
        self._pause_s = pause_s
        self._resumes_at_s: float | None = None  # set: open until then, half-open afterwards
        self._probe_ends_s: float | None = None
        self._why = ""

    def ask(self, now_s: float) -> Admission:
        """Return whether a run may start.

        Args:
            now_s: the caller's clock, the same in all calls.
        """
        if self._resumes_at_s is None:
            return Admission(False, now_s, "closed")
        if now_s < self._resumes_at_s:
            return Admission(True, self._resumes_at_s, self._why)
        if self._probe_ends_s is None:
            return Admission(False, now_s, "one run is tried", is_probe=True)
        if now_s < self._probe_ends_s:
            return Admission(True, self._probe_ends_s, "one run is tried before the others")
        self._close()
        return Admission(False, now_s, "the run that was tried lives")

    def started(self, now_s: float) -> None:
        """A run was started: if the breaker is half-open, it is the probe."""
        if self._resumes_at_s is not None and self._probe_ends_s is None:
            self._probe_ends_s = now_s + self._probation_s

    def ended(self, now_s: float, *, infrastructure: bool, message: str = "") -> bool:
        """A run's attempt ended.

        Args:
            now_s: the caller's clock.
            infrastructure: it failed for its surroundings; anything else counts as success.
            message: why, for people.

        Returns:
            True if this opened the breaker: worth a notice.
        """
        if not infrastructure:
            self._close()
            return False
        self._failures += 1
        is_probe = self._probe_ends_s is not None
        if self._resumes_at_s is not None and not is_probe:
            return False  # a run from before the pause
        if not is_probe and self._failures < self._threshold:
            return False
        self._pause_s = min(self._longest_pause_s, 2 * self._pause_s if is_probe else self._first_pause_s)
        self._resumes_at_s, self._probe_ends_s = now_s + self._pause_s, None
        self._why = f"{self._failures} attempts in a row failed for infrastructure" + (
            f", the last one: {message}" if message else ""
        )
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data; times are on the caller's clock."""
        return {
            "failures": self._failures,
            "pause_s": self._pause_s,
            "resumes_at_s": self._resumes_at_s,
            "probe_ends_s": self._probe_ends_s,
            "why": self._why,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        self._failures = int(state["failures"])
        self._pause_s = float(state["pause_s"])
        self._resumes_at_s, self._probe_ends_s = state["resumes_at_s"], state["probe_ends_s"]
        self._why = str(state["why"])

    def _close(self) -> None:
        self._failures = 0
        self._pause_s = self._first_pause_s
        self._resumes_at_s, self._probe_ends_s = None, None
        self._why = ""
