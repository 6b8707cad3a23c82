"""What a file says of its sampler, which proposes the points of a sweep, and what it has proposed so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from retrain.config.keys import Tables, table_at

Point: TypeAlias = dict[str, Any]  # values by dotted key


@dataclass(frozen=True)
class Proposal:
    """A point that a sampler proposed, of one of the file's conditions."""

    point: Point
    number: int = 1  # of the condition in the file; 1 as well for a file without conditions


def has_sampler(raw: Tables) -> bool:
    """Whether a sampler proposes the points of a file's sweep."""
    return bool(table_at(raw, "campaign", "search").get("sampler"))
