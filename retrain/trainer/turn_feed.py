"""Feeds a backend with turns while it samples others, so that no episode waits for another one's turn.

Turns of coroutines, threads and processes are fed as they come. Plain functions are waited for at moments
that depend on nothing but the turns, so that the same turns are sampled together each time.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b

from retrain.backends import Sampling
from retrain.backends.live_turns import LiveTurn, Taken
from retrain.rollouts import FirstTurn, Prompt
from retrain.trainer.desk import Desk, Request
from retrain.trainer.play_meter import PlayMeter


class ClosedError(Exception):
    """The play ended while turns were sampled, because it failed."""


class TurnFeed:
    """The turns of one play; implements `retrain.backends.live_turns.TurnFeed`."""

    def __init__(self, desk: Desk, how: Sampling, max_turn_tokens: int, meter: PlayMeter) -> None:
        """Prepare; 0 is no limit of a turn's own."""
        self._desk, self._meter = desk, meter
        self._first_limit = min(how.max_tokens, max_turn_tokens or how.max_tokens)
        self._seed = secrets.randbits(63) if how.seed is None else how.seed
        self._requests: dict[LiveTurn, Request] = {}
        self._answered = 0  # turns since plain functions were waited for

    def serve(self, sample: Callable[[TurnFeed], object]) -> None:
        """Have turns sampled until the desk is closed."""
        self._meter.begin()
        try:
            with suppress(ClosedError):
                sample(self)
        finally:
            self._meter.end()

    def take(self, under_way: int) -> Sequence[LiveTurn]:
        self._desk.check_stop()
        if self._desk.is_free and under_way:
            found = self._desk.come()
        elif self._answered >= under_way:
            found = self._waited_for(under_way)
        else:
            return ()
        if under_way and self._desk.is_closed:
            raise ClosedError
        wanted = [request for request in found if not request.answer.done()]
        turns = [self._turn(one) for one in sorted(wanted, key=lambda one: one.place)]
        return turns if turns or under_way or self._desk.is_closed else self.take(under_way)

    def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
        requests = [self._requests.pop(turn) for turn, _ in taken]
        rollouts = [rollout for _, rollout in taken]
        self._answered += len(requests)
        self._meter.count(requests, rollouts)
        self._desk.answer(requests, rollouts)
        self._meter.show()

    def _waited_for(self, under_way: int) -> list[Request]:
        """Wait for what plain functions answer; with no turn under way, for any."""
        with self._paused():
            found = self._desk.settled() if self._answered else []
            self._answered = 0
            return found or ([] if under_way else self._desk.next_batch())

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._meter.end()
        try:
            yield
        finally:
            self._meter.begin()

    def _turn(self, request: Request) -> LiveTurn:
        asked = request.asked
        turn = FirstTurn(asked, self._first_limit) if isinstance(asked, Prompt) else asked
        # ten times faster than numpy's SeedSequence, and a step may have thousands of turns
        named = blake2b(repr((self._seed, *request.place)).encode(), digest_size=8).digest()
        live = LiveTurn(turn, int.from_bytes(named) >> 1)
        self._requests[live] = request
        return live
