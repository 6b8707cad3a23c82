"""How many permits an API bears: one more while calls go well, far fewer when it says it is too many.

Additive increase, multiplicative decrease, the rule that lets many senders share a link without
talking to each other. Two signs of overload count: the API said so (429, 502, 503, 504), or calls of
a kind take much longer than they usually do. The number grows only while somebody waits for a
permit: what is not used proves nothing. It grows slowly where the API refused last time, so that
most of the time is spent just below what it bears.

Source: Chiu and Jain, Analysis of the increase and decrease algorithms for congestion avoidance
in computer networks (1989); the slow growth near the last refusal as in CUBIC, Ha, Rhee and Xu (2008).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from retrain.controllers import require

OVERLOAD = (429, 502, 503, 504)  # HTTP statuses by which an API says that it has too much to do
WAITED_S = 0.05  # a permit that took longer was waited for
AFTER_OVERLOAD = 0.5  # of the permits stay: the usual halving
AFTER_SLOWNESS = 0.75  # latency is a weaker sign than a refusal
NEAR_REFUSAL = 0.75  # of the number that was refused last: from there on the number grows slowly
SLOW_ROUNDS = 4  # rounds of good calls for one more permit there; elsewhere one
SMOOTHING = 0.8  # of a kind's recent latency; the last five calls or so count
RELAX = 1.02  # what a call usually takes may rise so fast per call, so that a lasting change is accepted
CALLS_TO_JUDGE = 10  # of a kind, before its latency means anything
SHORTEST_PAUSE_S = 1.0  # between decreases, so that one burst of refusals counts once


@dataclass(frozen=True, slots=True)
class CallFacts:
    """One call of the API that was answered or refused; one that got lost tells nothing of its load."""

    kind: str  # calls of a kind take about equally long
    latency_s: float  # from the permit to the result
    overloaded: bool = False  # the API refused at least once that it could do it now
    waited: bool = False  # for its permit


@dataclass(frozen=True, slots=True)
class PermitDecision:
    """How many permits there are to be from now on."""

    permits: int
    changed: bool
    reason: str


@dataclass
class _Latency:
    """Of one kind of call, in seconds."""

    recent_s: float
    usual_s: float
    calls: int = 1

    def add(self, latency_s: float) -> None:
        self.recent_s = SMOOTHING * self.recent_s + (1 - SMOOTHING) * latency_s
        self.usual_s = min(self.recent_s, RELAX * self.usual_s)
        self.calls += 1


class AdaptivePermits:
    """The number of permits of one API, for all its callers together."""

    def __init__(
        self, permits: int = 4, *, lowest: int = 1, highest: int = 64, latency_factor: float = 3.0
    ) -> None:
        """Start with some permits.

        Args:
            permits: to begin with.
            lowest, highest: never fewer, never more.
            latency_factor: calls this much slower than usual are a sign of overload.

        Raises:
            ValueError: a number is out of range.
        """
        require("lowest", lowest, lowest >= 1, "1 or more")
        require("highest", highest, lowest <= highest, f"at least lowest ({lowest})")
        require("permits", permits, lowest <= permits <= highest, f"{lowest} to {highest}")
        require("latency_factor", latency_factor, latency_factor > 1, "more than 1")
        self.permits = permits
        self._lowest, self._highest = lowest, highest
        self._factor = latency_factor
        self._latencies: dict[str, _Latency] = {}
        self._good_calls = 0  # since the last change or sign of overload
        self._was_wanted = False  # somebody waited for a permit meanwhile
        self._decreased_at_s: float | None = None
        self._refused: int | None = None  # permits there were when the API refused last

    def observe(self, now_s: float, call: CallFacts) -> PermitDecision:
        """Take a finished call into account.

        Args:
            now_s: any clock that all callers share. It may be set: a step longer than the pause between
                decreases, in either direction, ends that pause early.
            call: what happened.
        """
        slow = not call.overloaded and self._is_slow(call)
        if call.overloaded or slow:
            self._good_calls, self._was_wanted = 0, False
            return self._decrease(now_s, call)
        self._good_calls += 1
        self._was_wanted |= call.waited
        is_proven = self._good_calls >= self.permits * self._rounds()
        if not is_proven or not self._was_wanted or self.permits == self._highest:
            return PermitDecision(self.permits, False, "steady")
        self._good_calls, self._was_wanted = 0, False
        self.permits += 1
        if self._refused is not None and self.permits > self._refused:
            self._refused = None  # the API bears more than it did
        return PermitDecision(self.permits, True, "calls go well and some wait")

    def state_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "permits": self.permits,
            "latencies": {kind: asdict(latency) for kind, latency in self._latencies.items()},
            "good_calls": self._good_calls,
            "was_wanted": self._was_wanted,
            "decreased_at_s": self._decreased_at_s,
            "refused": self._refused,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave; a number out of today's range is moved into it."""
        self.permits = min(max(int(state["permits"]), self._lowest), self._highest)
        self._latencies = {kind: _Latency(**latency) for kind, latency in state["latencies"].items()}
        self._good_calls = int(state["good_calls"])
        self._was_wanted = bool(state["was_wanted"])
        self._decreased_at_s = state["decreased_at_s"]
        self._refused = state["refused"]

    def _rounds(self) -> int:
        """Rounds of `permits` good calls that prove that there may be one more."""
        is_near = self._refused is not None and self.permits >= NEAR_REFUSAL * self._refused
        return SLOW_ROUNDS if is_near else 1

    def _is_slow(self, call: CallFacts) -> bool:
        """Learn how long calls of this kind take. Not of one that was refused: it may end in no time."""
        known = self._latencies.get(call.kind)
        if known is None:
            self._latencies[call.kind] = _Latency(call.latency_s, call.latency_s)
            return False
        known.add(call.latency_s)
        return known.calls >= CALLS_TO_JUDGE and known.recent_s > self._factor * known.usual_s

    def _decrease(self, now_s: float, call: CallFacts) -> PermitDecision:
        if self.permits == self._lowest:
            return PermitDecision(self.permits, False, "overloaded at the lowest number")
        known = self._latencies.get(call.kind)
        pause_s = max(SHORTEST_PAUSE_S, known.recent_s if known else call.latency_s)
        since = self._decreased_at_s
        if since is not None and abs(now_s - since) < pause_s:  # a clock that was set ends the pause
            return PermitDecision(self.permits, False, "calls from before the last decrease")
        self._refused = self.permits if call.overloaded else self._refused
        share = AFTER_OVERLOAD if call.overloaded else AFTER_SLOWNESS
        self.permits = max(self._lowest, int(self.permits * share))
        self._decreased_at_s = now_s
        if known is None or call.overloaded:
            return PermitDecision(self.permits, True, "the API said that it is overloaded")
        reason = f"{call.kind} takes {known.recent_s:.3g} s, usually {known.usual_s:.3g} s"
        return PermitDecision(self.permits, True, reason)
