"""How often a process of ours searches for garbage."""

from __future__ import annotations

import gc

ALLOCATIONS = 100_000  # between two searches: the some 50,000 objects of our own imports all stay


def search_rarely() -> None:
    """Search for garbage seldom enough that imports cost no search: with PyTorch, a fifth of their time."""
    gc.set_threshold(ALLOCATIONS)
