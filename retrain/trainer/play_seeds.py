"""Seeds of the plays of a step's episodes: a play that a stop interrupts is the same when it is repeated."""

from __future__ import annotations

from itertools import count

import numpy as np

from retrain.backends import Backend
from retrain.backends.live_turns import live_sampler
from retrain.config.schema import Config

PLAYS = 0x706C6179  # keeps the random numbers of episodes apart from all others of the run


class PlaySeeds:
    """The seeds of a run, if there are episodes and the backend's samples are determined by a seed."""

    def __init__(self, config: Config, backend: Backend) -> None:
        self._seed = config.training.seed
        is_determined = backend.info.deterministic or live_sampler(backend) is not None
        self._applies = not config.environment.is_single_turn and is_determined and self._seed >= 0
        self._place = (0, count())  # one value, because threads of their own may sample

    def begin(self, step: int) -> None:
        """Begin the step after `step` complete ones, or begin it again."""
        self._place = (step, count())

    def next(self) -> int | None:
        """Return the seed of the next play; None: the backend's own generator decides."""
        if not self._applies:
            return None
        step, plays = self._place
        return int(np.random.SeedSequence([PLAYS, self._seed, step, next(plays)]).generate_state(1)[0])
