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

from dataclasses import dataclass, field

OVERLOAD = (429, 502, 503, 504)  # HTTP statuses that mean overload
HIGHEST = 64  # permits
WAITED_S = 0.05  # a call that got its permit later than this had to wait
AFTER_OVERLOAD = (1.0, 0.75, 0.5)  # kept, less at least one; by the refusals since a number has worked
MOST_REFUSALS = len(AFTER_OVERLOAD) - 1  # that are told apart
AFTER_SLOWNESS = 0.75  # high latency is a weaker sign than a refusal
CEILING_ROUNDS = 4  # rounds of successful calls until a ceiling is forgotten; one adds a permit elsewhere
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
class LimitDecision:
    """The number of permits from now on."""

    permits: int
    changed: bool
    reason: str


@dataclass
class _Latency:
    recent_s: float
    usual_s: float
    calls: int = 1

    def add(self, latency_s: float) -> None:
        self.recent_s = SMOOTHING * self.recent_s + (1 - SMOOTHING) * latency_s
        self.usual_s = min(self.recent_s, RELAX * self.usual_s)
        self.calls += 1

    @property
    def is_high(self) -> bool:
        return self.calls >= CALLS_TO_JUDGE and self.recent_s > SLOW * self.usual_s


@dataclass
class ConcurrencyLimit:
    """The number of permits of one API, shared by all its callers; the fields are its state, plain data."""

    permits: int
    latencies: dict[str, _Latency] = field(default_factory=dict)  # by kind of call
    good_calls: int = 0  # since the last change or sign of overload
    was_wanted: bool = False  # a caller has waited for a permit since then
    decreased_at_s: float | None = None
    refusals: int = MOST_REFUSALS  # in a row, since a number of permits has worked
    ceiling: int | None = None  # the lowest number at which the API refused
    hold_s: float = FIRST_HOLD_S
    held_since_s: float = 0.0

    def __post_init__(self) -> None:
        """Clip what was stored to its bounds."""
        self.permits = min(max(self.permits, 1), HIGHEST)
        self.refusals = min(max(self.refusals, 0), MOST_REFUSALS)

    def observe(self, now_s: float, call: CallFacts) -> LimitDecision:
        """Record a finished call and decide the number of permits.

        `now_s` is a clock shared by all callers. It may be adjusted: a jump longer than the pause between
        decreases, in either direction, ends that pause early.
        """
        latency = self.latencies.get(call.kind)
        if not call.overloaded and latency is None:
            self.latencies[call.kind] = _Latency(call.latency_s, call.latency_s)
        elif not call.overloaded and latency is not None:
            latency.add(call.latency_s)
        if call.overloaded or (latency is not None and latency.is_high):
            self.good_calls, self.was_wanted = 0, False
            return self._decrease(now_s, call)
        self.good_calls += 1
        self.was_wanted |= call.waited
        is_at_ceiling = self.permits == self.ceiling
        rounds = CEILING_ROUNDS if is_at_ceiling else 1
        if self.good_calls < self.permits * rounds or not self.was_wanted:
            return LimitDecision(self.permits, False, "steady")
        self.refusals = 0
        if is_at_ceiling:
            self.ceiling, self.hold_s = None, FIRST_HOLD_S  # it has risen
        if self.permits + 1 == self.ceiling and abs(now_s - self.held_since_s) < self.hold_s:
            return LimitDecision(self.permits, False, "held below what the API refused")
        if self.permits == HIGHEST:
            return LimitDecision(self.permits, False, "steady")
        self.good_calls, self.was_wanted = 0, False
        self.permits += 1
        return LimitDecision(self.permits, True, "calls succeed and others wait")

    def _decrease(self, now_s: float, call: CallFacts) -> LimitDecision:
        if self.permits == 1:
            return LimitDecision(self.permits, False, "overloaded, already at the lowest number")
        latency = self.latencies.get(call.kind)
        pause_s = max(SHORTEST_PAUSE_S, latency.recent_s if latency else call.latency_s)
        since = self.decreased_at_s
        if since is not None and abs(now_s - since) < pause_s:  # a clock adjustment ends the pause
            return LimitDecision(self.permits, False, "the call began before the last decrease")
        before, self.decreased_at_s = self.permits, now_s
        if call.overloaded:
            # Remember the refusal; another one at the same number lengthens the time until it is tried again.
            is_known = self.permits == self.ceiling
            self.hold_s = min(2 * self.hold_s, LONGEST_HOLD_S) if is_known else FIRST_HOLD_S
            self.ceiling, self.held_since_s = self.permits, now_s
            share = AFTER_OVERLOAD[self.refusals]
            self.refusals = min(self.refusals + 1, MOST_REFUSALS)
        else:
            share = AFTER_SLOWNESS
        self.permits = max(1, min(int(before * share), before - 1))
        if latency is None or call.overloaded:
            return LimitDecision(self.permits, True, "the API said that it is overloaded")
        reason = f"{call.kind} takes {latency.recent_s:.3g} s, usually {latency.usual_s:.3g} s"
        return LimitDecision(self.permits, True, reason)
