"""Engines: servers that sample for a backend.

The backend trains the adapters and passes them in a directory; the engine returns sampled token ids with
their log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retrain.errors import ConfigError

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion: token ids with their log-probabilities in sampling."""

    tokens: Ids
    logprobs: NDArray[np.float64]
    entropy: float  # mean nats of the tokens' distributions; NaN if unknown
    ended: bool  # with an end token or a stop string


class RefusedError(ConfigError):
    """The server rejects the request, and a retry would not help."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code  # HTTP status; 404: the path or the adapters are unknown to the server
