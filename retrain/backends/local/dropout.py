"""Dropout of adapters: on while a gradient is computed, with masks that a resumed run repeats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from retrain.backends.local.loading import Policy


class Dropout:
    """The dropout layers of a policy's adapters, which are off outside of `masks`."""

    def __init__(self, policy: Policy, seed: int) -> None:
        found = policy.adapters.modules() if policy.adapters is not None else ()
        self._layers = [layer for layer in found if isinstance(layer, torch.nn.Dropout) and layer.p > 0]
        self._seed = seed
        device = policy.device
        self._devices = [device] if device.type == "cuda" else []

    @property
    def is_on(self) -> bool:
        """Whether adapters have dropout at all."""
        return bool(self._layers)

    @contextmanager
    def masks(self, step: int, micro_batch: int) -> Iterator[None]:
        """Switch dropout on for a micro-batch; its masks depend on the seed and these two numbers alone."""
        if not self._layers:
            yield
            return
        words = np.random.SeedSequence([self._seed, step, micro_batch]).generate_state(1, np.uint64)
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(int(words[0]))
            self._switch(True)
            try:
                yield
            finally:
                self._switch(False)

    def _switch(self, on: bool) -> None:
        for layer in self._layers:
            layer.train(on)
