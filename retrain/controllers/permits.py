"""Adaptive number of permits for an API: additive increase, multiplicative decrease (AIMD).

AIMD lets many senders share a link without coordination. There are two signs of overload: the API refused
a call (429, 502, 503, 504), or calls of a kind take much longer than usual. The number grows only while
callers wait for a permit, since unused permits prove nothing.

The number at which the API refused is remembered as its ceiling, and growth ends one below it. The ceiling is
tried again after a hold that grows with each refusal, so that a limit that stays costs few refusals, to less
than a minute, so that one that rises is soon found. A refusal one above a number that has just worked takes
one permit; if that does not help, a quarter, then halves.

Source: Chiu and Jain, Analysis of the increase and decrease algorithms for congestion avoidance in computer
networks (1989); remembering the number at the last refusal as in CUBIC, Ha, Rhee and Xu (2008).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from retrain.controllers import StateDict

OVERLOAD = (429, 502, 503, 504)  # HTTP statuses that mean overload
WAITED_S = 0.05  # a call that got its permit later than this had to wait
AFTER_OVERLOAD = (1.0, 0.75, 0.5)  # kept, less at least one; by the refusals since a number has worked
AFTER_SLOWNESS = 0.75  # high latency is a weaker sign than a refusal
TRIAL_ROUNDS = 4  # rounds of successful calls until a ceiling is forgotten; one adds a permit elsewhere
FIRST_HOLD_S, LONGEST_HOLD_S = 30.0, 55.0  # below a ceiling, until it is tried again
SLOW = 3.0  # times the usual latency: a sign of overload
SMOOTHING = 0.8  # of a kind's recent latency, over about five calls
RELAX = 1.02  # fastest growth of the usual latency per call, so that a lasting change is accepted
CALLS_TO_JUDGE = 10  # of a kind, before its latency is judged
SHORTEST_PAUSE_S = 1.0  # between decreases, so that one burst of refusals counts once


@dataclass(frozen=True, slots=True)
class CallFacts:
    """A call that the API answered or refused; a lost call is no evidence of load."""

    kind: str  # calls of a kind take about equally long
    latency_s: float  # from acquiring the permit to the result
    overloaded: bool = False  # the API refused it at least once
    waited: bool = False  # had to wait for its permit


@dataclass(frozen=True, slots=True)
class PermitDecision:
    """The number of permits from now on."""

    permits: int
    changed: bool
    reason: str


@dataclass
class _Latency:
    """Latency of one kind of call, in seconds."""

    recent_s: float
    usual_s: float
    calls: int = 1

    def add(self, latency_s: float) -> None:
        self.recent_s = SMOOTHING * self.recent_s + (1 - SMOOTHING) * latency_s
        self.usual_s = min(self.recent_s, RELAX * self.usual_s)
        self.calls += 1


class AdaptivePermits:
    """The number of permits of one API, shared by all its callers."""

    def __init__(self, permits: int = 4, *, highest: int = 64) -> None:
        """Start with `permits`, from 1 to `highest`."""
        self.permits, self._highest = permits, highest
        self._latencies: dict[str, _Latency] = {}
        self._good_calls = 0  # since the last change or sign of overload
        self._was_wanted = False  # a caller has waited for a permit since then
        self._decreased_at_s: float | None = None
        self._refusals = len(AFTER_OVERLOAD) - 1  # in a row, since a number of permits has worked
        self._ceiling: int | None = None  # the lowest number at which the API refused
        self._hold_s = FIRST_HOLD_S
        self._held_since_s = 0.0

    def observe(self, now_s: float, call: CallFacts) -> PermitDecision:
        """Record a finished call and decide the number of permits.

        `now_s` is a clock shared by all callers. It may be adjusted: a jump longer than the pause between
        decreases, in either direction, ends that pause early.
        """
        if call.overloaded or self._is_slow(call):
            self._good_calls, self._was_wanted = 0, False
            return self._decrease(now_s, call)
        self._good_calls += 1
        self._was_wanted |= call.waited
        is_trial = self.permits == self._ceiling
        rounds = TRIAL_ROUNDS if is_trial else 1
        if self._good_calls < self.permits * rounds or not self._was_wanted:
            return PermitDecision(self.permits, False, "steady")
        self._refusals = 0
        if is_trial:
            self._ceiling, self._hold_s = None, FIRST_HOLD_S  # it has risen
        if self.permits + 1 == self._ceiling and abs(now_s - self._held_since_s) < self._hold_s:
            return PermitDecision(self.permits, False, "held below what the API refused")
        if self.permits == self._highest:
            return PermitDecision(self.permits, False, "steady")
        self._good_calls, self._was_wanted = 0, False
        self.permits += 1
        return PermitDecision(self.permits, True, "calls succeed and others wait")

    def state_dict(self) -> StateDict:
        return {
            "permits": self.permits,
            "latencies": {kind: asdict(latency) for kind, latency in self._latencies.items()},
            "good_calls": self._good_calls,
            "was_wanted": self._was_wanted,
            "decreased_at_s": self._decreased_at_s,
            "refusals": self._refusals,
            "ceiling": self._ceiling,
            "hold_s": self._hold_s,
            "held_since_s": self._held_since_s,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore a `state_dict`; the number is clipped to its bounds."""
        self.permits = min(max(int(state["permits"]), 1), self._highest)
        self._latencies = {kind: _Latency(**latency) for kind, latency in state["latencies"].items()}
        self._good_calls, self._was_wanted = int(state["good_calls"]), bool(state["was_wanted"])
        self._decreased_at_s, self._ceiling = state["decreased_at_s"], state["ceiling"]
        self._refusals = min(int(state["refusals"]), len(AFTER_OVERLOAD) - 1)
        self._hold_s, self._held_since_s = float(state["hold_s"]), float(state["held_since_s"])

    def _is_slow(self, call: CallFacts) -> bool:
        """Record the latency of a call that was not refused, and return whether its kind has become slow."""
        known = self._latencies.get(call.kind)
        if known is None:
            self._latencies[call.kind] = _Latency(call.latency_s, call.latency_s)
            return False
        known.add(call.latency_s)
        return known.calls >= CALLS_TO_JUDGE and known.recent_s > SLOW * known.usual_s

    def _decrease(self, now_s: float, call: CallFacts) -> PermitDecision:
        if self.permits == 1:
            return PermitDecision(self.permits, False, "overloaded, already at the lowest number")
        known = self._latencies.get(call.kind)
        pause_s = max(SHORTEST_PAUSE_S, known.recent_s if known else call.latency_s)
        since = self._decreased_at_s
        if since is not None and abs(now_s - since) < pause_s:  # a clock adjustment ends the pause
            return PermitDecision(self.permits, False, "the call began before the last decrease")
        before, self._decreased_at_s = self.permits, now_s
        if call.overloaded:
            self._lower_ceiling(now_s)
            share = AFTER_OVERLOAD[self._refusals]
            self._refusals = min(self._refusals + 1, len(AFTER_OVERLOAD) - 1)
        else:
            share = AFTER_SLOWNESS
        self.permits = max(1, min(int(before * share), before - 1))
        if known is None or call.overloaded:
            return PermitDecision(self.permits, True, "the API said that it is overloaded")
        reason = f"{call.kind} takes {known.recent_s:.3g} s, usually {known.usual_s:.3g} s"
        return PermitDecision(self.permits, True, reason)

    def _lower_ceiling(self, now_s: float) -> None:
        """Remember a refusal; another one at the same number lengthens the time until it is tried again."""
        is_known = self.permits == self._ceiling
        self._hold_s = min(2 * self._hold_s, LONGEST_HOLD_S) if is_known else FIRST_HOLD_S
        self._ceiling, self._held_since_s = self.permits, now_s
