"""Counts the tokens that an API bills, call by call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass

from retrain.records.spending import Tokens

NOTHING = Tokens()


@dataclass
class BilledCall:
    """A call under way; whoever makes it sets `billed` once that is known, `NOTHING` if it was refused."""

    billed: Tokens | None = None


@dataclass
class Tally:
    """What calls for one purpose were billed."""

    tokens: Tokens = NOTHING

    def by_kind(self) -> dict[str, int]:
        """Return the tokens of each kind that there are any of."""
        return {kind: count for kind, count in asdict(self.tokens).items() if count}


TALLY: ContextVar[Tally | None] = ContextVar("TALLY", default=None)


@contextmanager
def tally() -> Iterator[Tally]:
    """Add up, beside the meter, what the calls of this context are billed; calls of others do not count."""
    total = Tally()
    before = TALLY.set(total)
    try:
        yield total
    finally:
        TALLY.reset(before)


class Meter:
    """Counts of one attempt; from any thread."""

    def __init__(
        self, changed: Callable[[Meter], None] = lambda _: None, check: Callable[[], None] = lambda: None
    ) -> None:
        """Start at 0; `check` raises before a call that is not to be made, `changed` is called around one."""
        self._changed, self._check = changed, check
        self._lock = threading.Lock()
        self.tokens = self.unsure = self.open = NOTHING

    @contextmanager
    def call(self, at_most: Tokens) -> Iterator[BilledCall]:
        """Count a call that is billed `at_most` so much; so much if nobody learns how much it was."""
        self._check()
        billed_call = BilledCall()
        self._count(open=at_most)
        try:
            yield billed_call
        finally:
            unsure = at_most if billed_call.billed is None else NOTHING
            self._count(open=NOTHING - at_most, tokens=billed_call.billed or NOTHING, unsure=unsure)

    def _count(self, *, open: Tokens, tokens: Tokens = NOTHING, unsure: Tokens = NOTHING) -> None:
        apart = TALLY.get()
        with self._lock:
            if apart is not None:
                apart.tokens += tokens
            self.open, self.tokens, self.unsure = self.open + open, self.tokens + tokens, self.unsure + unsure
            self._changed(self)
