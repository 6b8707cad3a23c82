"""An event loop of several episodes, which knows how long it was busy.

A time limit that passes in it tells little of an episode if coroutines of others ran meanwhile.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections import deque

from retrain.environments.episode import EpisodeLostError

SLICE_S = 0.05  # between moments at which busy time is written down
KEPT = 20_000  # of these moments: some 17 minutes
HELD_UP_S, HELD_UP_FRACTION = 0.1, 0.02  # of a limit: so much decides nothing
HELD_UP = "coroutines of other episodes held up the event loop"


class _Selector(selectors.DefaultSelector):
    """Waits for the events of a loop, and measures for how long."""

    def __init__(self) -> None:
        super().__init__()
        self._waited_s = 0.0
        self._moments = deque([(time.monotonic(), 0.0)], maxlen=KEPT)  # with the time waited until then

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began_s = time.monotonic()
        found = super().select(timeout)
        now_s = time.monotonic()
        # what is longer than asked for was no wait for events: others had the processor
        self._waited_s += now_s - began_s if timeout is None else min(now_s - began_s, max(timeout, 0.0))
        if now_s - self._moments[-1][0] > SLICE_S:
            self._moments.append((now_s, self._waited_s))
        return found

    def busy_s(self, since_s: float) -> float:
        """Return for how long the loop, which must be running this, did not wait for events."""
        then_s, waited_s = next(
            (one for one in reversed(self._moments) if one[0] <= since_s), self._moments[0]
        )
        return max(0.0, time.monotonic() - then_s - (self._waited_s - waited_s))


class SharedLoop(asyncio.SelectorEventLoop):
    """The loop; nothing differs but what it measures."""

    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)


def check_held_up(since_s: float, limit_s: float | None) -> None:
    """Raise EpisodeLostError if this loop's other episodes may have held up one, for what its limit tells.

    Args:
        since_s: a reading of `time.monotonic`.
        limit_s: the time that the episode had since then; without one, nothing was too late.
    """
    loop = asyncio.get_running_loop()
    if limit_s is None or not isinstance(loop, SharedLoop):
        return
    if loop.selector.busy_s(since_s) > max(HELD_UP_S, HELD_UP_FRACTION * limit_s):
        raise EpisodeLostError(HELD_UP)
