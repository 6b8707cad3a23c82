"""Circuit breaker: pause launching after consecutive infrastructure failures.

Closed: every run is admitted. Open, after `threshold` consecutive infrastructure failures: no run is
admitted for a pause that doubles each time. Then half-open: one run is admitted as a probe. If the probe
fails for infrastructure, the breaker opens again; if it ends in any other way, or is still running after
`probation_s`, the breaker closes.

Source: the circuit breaker pattern, Nygard, Release It! (2007).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from retrain.controllers import StateDict, require


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a run may start now, and if not, when to ask again."""

    is_open: bool  # of the breaker: no run may start
    ask_again_s: float  # on the caller's clock; only meaningful if the breaker is open
    reason: str
    is_probe: bool = False  # half-open: one run may start, the next after its outcome is known


@dataclass
class _State:
    """Of a breaker; times are on the caller's clock."""

    pause_s: float
    failures: int = 0
    resumes_at_s: float | None = None  # set: open until then, half-open afterwards
    probe_ends_s: float | None = None
    why: str = ""


class CircuitBreaker:
    """Count consecutive infrastructure failures over a campaign."""

    def __init__(
        self,
        threshold: int = 3,
        *,
        pause_s: float = 60.0,
        longest_pause_s: float = 1800.0,
        probation_s: float = 120.0,
    ) -> None:
        """Start closed; ValueError if a number is out of range.

        Args:
            threshold: consecutive failures that open the breaker.
            pause_s: the first pause; doubled after each failed probe, up to `longest_pause_s`.
            longest_pause_s: upper limit of the pause.
            probation_s: a probe that runs this long counts as a success.
        """
        require("threshold", threshold, threshold >= 1, "1 or more")
        require("pause_s", pause_s, pause_s > 0, "more than 0")
        is_longer = longest_pause_s >= pause_s
        require("longest_pause_s", longest_pause_s, is_longer, f"pause_s ({pause_s}) or more")
        require("probation_s", probation_s, probation_s >= 0, "0 or more")
        self._threshold = threshold
        self._first_pause_s, self._longest_pause_s = pause_s, longest_pause_s
        self._probation_s = probation_s
        self._state = _State(pause_s)

    def ask(self, now_s: float) -> Admission:
        """Return whether a run may start; `now_s` is the caller's clock, the same in all calls."""
        state = self._state
        if state.resumes_at_s is None:
            return Admission(False, now_s, "closed")
        if now_s < state.resumes_at_s:
            return Admission(True, state.resumes_at_s, state.why)
        if state.probe_ends_s is None:
            return Admission(False, now_s, "one run is started as a probe", is_probe=True)
        if now_s < state.probe_ends_s:
            return Admission(True, state.probe_ends_s, "one run is probing before the others start")
        self._state = _State(self._first_pause_s)
        return Admission(False, now_s, "the probe is still running")

    def started(self, now_s: float) -> None:
        """Record that a run was started; if the breaker is half-open, that run is the probe."""
        if self._state.resumes_at_s is not None and self._state.probe_ends_s is None:
            self._state.probe_ends_s = now_s + self._probation_s

    def ended(self, now_s: float, *, infrastructure: bool, message: str = "") -> bool:
        """Record that an attempt of a run ended; return whether this opened the breaker.

        Args:
            now_s: the caller's clock.
            infrastructure: whether it failed for infrastructure; any other ending counts as success.
            message: the cause, for the reason of later admissions.
        """
        if not infrastructure:
            self._state = _State(self._first_pause_s)
            return False
        state = self._state
        state.failures += 1
        is_probe, is_paused = state.probe_ends_s is not None, state.resumes_at_s is not None
        if not is_probe and (is_paused or state.failures < self._threshold):
            return False  # a run that was started before the pause, or bad luck
        state.pause_s = min(self._longest_pause_s, 2 * state.pause_s if is_probe else self._first_pause_s)
        state.resumes_at_s, state.probe_ends_s = now_s + state.pause_s, None
        state.why = f"{state.failures} attempts in a row failed for infrastructure"
        state.why += f"; last error: {message}" if message else ""
        return True

    def state_dict(self) -> StateDict:
        """Return everything as plain data; times are on the caller's clock."""
        return asdict(self._state)

    def load_state_dict(self, state: StateDict) -> None:
        self._state = _State(**state)
