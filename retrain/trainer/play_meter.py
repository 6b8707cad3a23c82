"""How far the episodes of a play are, and how long nothing was sampled."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from retrain.backends import EpisodeProgress
from retrain.backends.live_turns import Taken
from retrain.rollouts import NextTurn
from retrain.trainer.desk import Request


class PlayMeter:
    """Counts of one play; from any thread."""

    def __init__(self, episodes: int, observe: Callable[[EpisodeProgress], None]) -> None:
        self._episodes, self._observe = episodes, observe
        self._lock = threading.Lock()  # guards what follows
        self._began_s = self._idle_since_s = time.monotonic()
        self._running = 0  # calls of the sampler
        self._finished = self._turns = self._tokens = 0
        self._idle_s = 0.0

    @property
    def idle_s(self) -> float:
        """For how long no turn was sampled, because every episode waited for its environment."""
        with self._lock:
            return self._idle_s + (0.0 if self._running else time.monotonic() - self._idle_since_s)

    def begin(self) -> None:
        """Count a call that samples."""
        with self._lock:
            if self._running == 0:
                self._idle_s += time.monotonic() - self._idle_since_s
            self._running += 1

    def end(self) -> None:
        """Count the end of a call, or a pause of it."""
        with self._lock:
            self._running -= 1
            self._idle_since_s = time.monotonic()

    def count(self, requests: Sequence[Request], taken: Sequence[Taken]) -> None:
        """Count turns that were sampled."""
        before = (len(one.asked.rollout.tokens) if isinstance(one.asked, NextTurn) else 0 for one in requests)
        lengths = [len(getattr(one, "tokens", ())) for one in taken]
        with self._lock:
            self._turns += sum(map(bool, lengths))
            self._tokens += sum(max(0, after - own) for after, own in zip(lengths, before, strict=True))

    def episode_ended(self) -> None:
        """Count an episode that is over."""
        with self._lock:
            self._finished += 1
        self.show()

    def show(self) -> None:
        """Report how far the play is."""
        took_s = time.monotonic() - self._began_s
        self._observe(EpisodeProgress(self._episodes, self._finished, self._turns, self._tokens, took_s))
