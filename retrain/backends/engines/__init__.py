"""Engines: servers that sample for a backend.

The backend trains the adapters and passes them in a directory; the engine returns sampled token ids with
their log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.base.errors import ConfigError

if TYPE_CHECKING:  # planning imports this module
    import numpy as np
    from numpy.typing import NDArray

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """One completion: token ids with their log-probabilities in sampling."""

    tokens: Ids
    logprobs: NDArray[np.float64]
    entropy: float  # mean nats of the tokens' distributions; NaN if unknown
    ended: bool  # with an end token or a stop string

    def cut(self, limit: int) -> Drawn:
        """Return its first tokens, at most `limit`; their entropy is unknown if some are left out."""
        if len(self.tokens) <= limit:
            return self
        return Drawn(self.tokens[:limit], self.logprobs[:limit], float("nan"), ended=False)


class RefusedError(ConfigError):
    """The server rejects the request, and a retry would not help."""


class LostAdaptersError(RefusedError):
    """The server does not know the adapters that a call names: it was restarted."""
