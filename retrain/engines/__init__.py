"""Engines: servers that sample for a backend.

The backend trains the adapters and hands them over by directory; the engine samples token ids with
the log-probabilities that they were drawn with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.errors import ConfigError

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion: token ids with the log-probabilities that they were drawn with."""

    tokens: Ids
    logprobs: NDArray[np.float64]
    entropy: float  # mean nats of the distributions they were drawn from; NaN if unknown
    ended: bool  # by an end token or a stop string


@dataclass(frozen=True, slots=True)
class Request:
    """What one call samples: `count` completions of each prompt."""

    prompts: Sequence[Ids]
    count: int
    max_tokens: int
    temperature: float
    end_ids: Ids
    stop: tuple[str, ...]
    seed: int


class RefusedError(ConfigError):
    """The server does not do what it is asked to, and another attempt would not help."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_missing(self) -> bool:
        """Whether the server does not know the path or the adapters."""
        return self.code == 404
