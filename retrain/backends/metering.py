"""Counts the tokens that an API bills, call by call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from retrain.records.tokens import Tokens

NOTHING = Tokens()


@dataclass
class BilledCall:
    """A call under way; whoever makes it sets `billed` once that is known, `NOTHING` if it was refused."""

    billed: Tokens | None = None


class Meter:
    """Counts of one attempt; from any thread."""

    def __init__(self, changed: Callable[[Meter], None] = lambda _: None) -> None:
        """Start at 0; `changed` is called before and after each call."""
        self._changed = changed
        self._lock = threading.Lock()
        self.tokens = self.unsure = self.open = NOTHING

    @contextmanager
    def call(self, at_most: Tokens) -> Iterator[BilledCall]:
        """Count a call that is billed `at_most` so much; so much if nobody learns how much it was."""
        made = BilledCall()
        self._count(open=at_most)
        try:
            yield made
        finally:
            unsure = at_most if made.billed is None else NOTHING
            self._count(open=NOTHING - at_most, tokens=made.billed or NOTHING, unsure=unsure)

    def _count(self, *, open: Tokens, tokens: Tokens = NOTHING, unsure: Tokens = NOTHING) -> None:
        with self._lock:
            self.open, self.tokens, self.unsure = self.open + open, self.tokens + tokens, self.unsure + unsure
            self._changed(self)
