"""decision.jsonl: what a campaign with `[decision]` has looked at, under which design; only added to.

What was once looked at cannot be looked at again as if for the first time. So the design is written before
the first look, and each round with the values that its look used: a run that is repaired later, or runs
again, changes no verdict. A line for a changed design begins the decision anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.records.decision import DROPPED, ConditionDecision, Decision
from retrain.records.files import record_of
from retrain.records.lines import append_line, parse_line, read_lines

GONE = "decision: the table is gone"
ADDED = "decision: the table was added when runs had begun, so their number was not planned"
TOLD = ("metric", "reference", "error", "smallest_difference", "max_seeds")  # keys that verdicts tell


@dataclass(frozen=True)
class Round:
    """One round that was looked at."""

    asked: Mapping[str, int]  # seeds of each condition but the reference, from the first round on
    values: Mapping[str, float | None]  # of the runs that are new in it, by id; None: ended without one
    decided: tuple[ConditionDecision, ...] = ()  # conditions that are closed since
    ended: str = ""  # "budget": no further round begins


@dataclass(frozen=True)
class Looks:
    """What a campaign has looked at so far."""

    design: Mapping[str, object]  # keys of `[decision]`; empty before the first look
    rounds: tuple[Round, ...] = ()
    changes: tuple[str, ...] = ()  # to the design after a look, each with when
    is_lost: bool = False  # there were looks, and their file is gone

    @property
    def was_begun(self) -> bool:
        """Whether there ever was a look."""
        return bool(self.design or self.changes)

    @property
    def values(self) -> dict[str, float | None]:
        """The value of each run that was looked at."""
        return {run_id: value for one in self.rounds for run_id, value in one.values.items()}

    @property
    def seeds(self) -> int:
        """Most seeds of a condition that were looked at."""
        return max((count for one in self.rounds for count in one.asked.values()), default=0)

    def differs(self, design: Mapping[str, object]) -> Iterator[str]:
        """Iterate over the keys in which a design differs from the one that was looked at."""
        if self.design and not design:
            yield GONE
        if design and self.was_begun and not self.design:
            yield "decision: the table is there again"
        for key, value in design.items():
            if key in self.design and self.design[key] != value:
                yield f"decision.{key}: {self.design[key]!r} -> {value!r}"


def read_looks(path: Path) -> Looks:
    """Read decision.jsonl; lines that are neither a design nor a round are skipped."""
    found = Looks({})
    for line in read_lines(path):
        row = parse_line(line) or {}
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            if row.get("event") == "design":
                found = record_of(Looks, {"design": row["design"], "changes": row["changes"]})
            elif row.get("event") == "round":
                found = Looks(found.design, (*found.rounds, record_of(Round, row)), found.changes)
    return found


def known_looks(path: Path, told: Decision | None) -> Looks:
    """Read decision.jsonl; if it is lost, its design is known by the verdicts that were told."""
    found = read_looks(path)
    if found.was_begun or told is None:
        return found
    if told.ended == DROPPED:
        return Looks({}, changes=(GONE,))
    is_looked_at = told.ended or any(one.seeds for one in told.conditions)
    return Looks({key: getattr(told, key) for key in TOLD}, is_lost=True) if is_looked_at else found


def begin_design(path: Path, design: Mapping[str, object], changes: Sequence[str]) -> None:
    """Write the design of the looks that follow, and how it differs from those before."""
    append_line(path, {"event": "design", "design": dict(design), "changes": list(changes)})


def append_round(path: Path, one: Round) -> None:
    """Write a round."""
    append_line(path, {"event": "round", **asdict(one)})
