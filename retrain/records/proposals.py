"""proposals.jsonl: what the sampler of a search proposed, and by which values; written before any of it runs.

Proposals stand, and so do the values that they followed from: a sampler that is asked again, from the first
value on, proposes the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.config.sampler import Proposal
from retrain.records.lines import append_line, read_records


@dataclass(frozen=True)
class Proposed:
    """One round of proposals."""

    told: Mapping[str, float | None]  # by condition, what the sampler learned before; None: without a value
    proposals: tuple[Proposal, ...]  # none: it had nothing else to propose


def read_proposals(path: Path) -> tuple[Proposed, ...]:
    """Read proposals.jsonl; lines that are no round are skipped."""
    return read_records(path, Proposed)


def append_proposals(path: Path, one: Proposed) -> None:
    """Write a round."""
    append_line(path, asdict(one))


def all_of(rounds: Sequence[Proposed]) -> tuple[Proposal, ...]:
    """Return the proposals of all rounds."""
    return tuple(proposal for one in rounds for proposal in one.proposals)
