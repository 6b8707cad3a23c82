"""Calls between two sandboxes."""

from __future__ import annotations

from typing import Any


class Peer:
    """One end of a conversation."""

    def __init__(self, reads: int, writes: int, names: dict[str, Any]) -> None: ...
    def serve(self) -> None:
        """Answer requests until the other side ends."""
