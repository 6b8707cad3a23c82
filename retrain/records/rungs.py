"""What a search has found: search.jsonl, proposals.jsonl and, in the directory of a run, rung.json.

A rung that was decided stands, as a look of a `[decision]` does: runs that are repaired later change nothing.
Proposals stand as well, and so do the values that they followed from: a sampler that is asked again, from the
first value on, proposes the same. They are written before any of them runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from retrain.config.keys import Proposal
from retrain.records.decision import OPEN, Decision
from retrain.records.files import read_json, readable, remove_file, write_json
from retrain.records.layout import RunFiles
from retrain.records.lines import read_records
from retrain.records.run_row import AT_RUNG, RunEntry, RunRow
from retrain.records.run_state import WAITING, WAITS, RunState, read_attempts, read_progress, rung_of
from retrain.records.text import count_of, number, plain
from retrain.records.windows import STEPS

STOPPED = "dropped"  # key of the result of a run that goes no further, at a rung


@dataclass(frozen=True)
class Rung:
    """What a search found at one step."""

    step: int
    scores: Mapping[str, float | None]  # by condition: mean over seeds; None if a run has no value
    kept: tuple[str, ...]  # conditions that went on, the best first

    def __post_init__(self) -> None:
        if not self.kept:
            raise ValueError("nothing was kept")

    @property
    def tied(self) -> tuple[str, ...]:
        """Conditions equal to the last that went on, of which only some did; none where scores decided."""
        last = self.scores.get(self.kept[-1])
        equal = tuple(name for name, score in self.scores.items() if score == last)
        return equal if set(equal) - set(self.kept) else ()


@dataclass(frozen=True)
class Searched:
    """What a campaign's search has found so far."""

    metric: str
    reference: str
    seeds: tuple[int, ...]  # that choose; others decide
    rungs: tuple[Rung, ...] = ()
    winner: str = ""  # "" until it is known
    stages: tuple[tuple[int, int], ...] = ()  # how many conditions run to which step; 0: to their ends
    sampler: str = ""  # that proposes conditions
    proposed: int = 0  # so far
    to_come: int = 0

    @property
    def decides(self) -> bool:
        """Whether the winner is compared with the reference, which it is not itself."""
        return self.winner not in ("", self.reference)


def is_settled(searched: Searched | None, decision: Decision | None) -> bool:
    """Whether a campaign, all of whose runs so far are done, needs no further ones."""
    if searched is not None and not searched.decides:
        return bool(searched.winner)
    return decision.ended != "" if decision else searched is None


@dataclass(frozen=True)
class Proposed:
    """One round of proposals."""

    told: Mapping[str, float | None]  # by condition, what the sampler learned before; None: without a value
    proposals: tuple[Proposal, ...]  # none: it had nothing else to propose


def read_proposals(path: Path) -> tuple[Proposed, ...]:
    """Read proposals.jsonl; lines that are no round are skipped."""
    return read_records(path, Proposed)


def all_of(rounds: Sequence[Proposed]) -> tuple[Proposal, ...]:
    """Return the proposals of all rounds."""
    return tuple(proposal for one in rounds for proposal in one.proposals)


def write_wait(path: Path, rung: float, per: str = STEPS) -> bool:
    """Set the rung at which a run waits, 0 for none, on an axis; return whether that changes anything."""
    if readable(partial(read_wait, per=per), path) == rung:  # a damaged one is written again
        return False
    if rung:
        write_json(path, {"step": int(rung)} if per == STEPS else {per: rung})
    else:
        remove_file(path)
    return True


def read_wait(path: Path, per: str = STEPS) -> float:
    """Return the rung at which a run waits on an axis; 0 for none."""
    rung = (read_json(path) or {}).get("step" if per == STEPS else per, 0)
    return rung if isinstance(rung, (int, float)) else 0


def why_to_wait(path: Path, reached: float, per: str = STEPS) -> str:
    """Return why a run that has come to an amount of an axis goes no further for now; "" if it does."""
    rung = read_wait(path, per)
    return f"{WAITS}{rung:.15g} until it is known whether it goes on" if 0 < rung <= reached else ""


def is_waiting(files: RunFiles) -> bool:
    """Whether a run has ended its last attempt to wait at a rung."""
    progress = readable(read_progress, files.status)
    if progress is not None and why_to_wait(files.rung, progress.step):
        return True
    attempts = readable(read_attempts, files.attempts)  # of other axes, its message alone tells
    return rung_of(attempts[-1].message) != "" if attempts else False


def is_out(run: RunEntry | RunRow, searched: Searched | None) -> bool:
    """Whether a search goes on without a run, however it ended: no resume tries it again."""
    if searched is None or run.seed not in searched.seeds:
        return False
    is_dropped = bool(searched.rungs) and run.condition not in searched.rungs[-1].kept
    return is_dropped or searched.winner != ""


def as_decided(row: RunRow, searched: Searched | None, decision: Decision | None = None) -> RunRow:
    """Return a run's row; one that waited at a rung, and goes on, is pending until its worker starts.

    One that ended early says why it did.
    """
    rungs = searched.rungs if searched else ()
    if searched and row.is_done and row.step < (row.max_steps or 0) and is_out(row, searched):
        return replace(row, phase="won" if row.condition == searched.winner else "dropped")
    if decision and decision.rungs and row.is_done and row.step < (row.max_steps or 0):
        return replace(row, phase="stopped")
    if row.state != WAITING:
        return row
    is_over = row.phase in [f"{AT_RUNG}{one.step}" for one in rungs] and row.condition in rungs[-1].kept
    next_rung = _next_rungs(decision).get(row.condition, 0.0)
    if not is_over and next_rung <= float(row.phase.removeprefix(AT_RUNG)):
        return row
    return replace(row, state=RunState.PENDING, phase=row.phase.replace("at", "after", 1))


def lines_of_search(found: Searched | None) -> Iterator[str]:
    """Iterate over what a search found, a sentence each, safe to print."""
    if found is None:
        return
    if found.proposed:
        more = f", {found.to_come} more follow" if found.to_come else ""
        yield f"search: {found.sampler} proposed {count_of(found.proposed, 'condition')}{more}"
    order = "the file's order"
    for rung in found.rungs:
        best, names = rung.scores.get(rung.kept[0]), count_of(len(rung.scores), "condition")
        score = "" if best is None else f", {found.metric} {number(best)}"
        tied = count_of(len(rung.tied), "condition")
        tie = f"; {tied} were equal, so {order} decided" if rung.tied else ""
        went = f"{len(rung.kept)} of {names} went on; best: {rung.kept[0]}"
        yield plain(f"search, step {rung.step}: {went}{score}{tie}", 500)
        order = "their rank at the rung before"
    if found.decides:
        seeds = f"seeds {', '.join(map(str, found.seeds))} chose it, so others decide"
        yield plain(
            f"search: {found.winner} won, compared with {found.reference} on fresh seeds ({seeds})", 500
        )
    elif found.winner:
        yield plain(f"search: {found.winner} won; it is the reference, so no fresh seeds compare it", 500)


def _next_rungs(decision: Decision | None) -> dict[str, float]:
    """Return the rung to which each condition that is open goes now, and the reference."""
    if decision is None or decision.ended or not decision.rungs:
        return {}
    rungs = {one.condition: one.rung for one in decision.conditions if one.verdict == OPEN}
    return {decision.reference: max(rungs.values(), default=0.0)} | rungs


def as_expected(
    rows: Sequence[RunRow], searched: Searched | None, decision: Decision | None = None
) -> list[RunRow]:
    """Return the rows of runs with the step to which each is expected to go as its `max_steps`.

    Of the conditions left, those that ranked first are expected to go on, before the first rung those that
    were planned first. Fresh runs, which decide, go to their ends, or to the rung that is open.
    """
    if (rungs := _next_rungs(decision)) and decision and decision.window.per == STEPS:
        chosen = searched.seeds if searched else ()
        rows = [r if r.seed in chosen else _until(r, int(rungs.get(r.condition, 0))) for r in rows]
    if searched is None:
        return list(rows)
    ends, seeds = _ends(rows, searched), searched.seeds
    return [_until(row, ends.get(row.condition, 0)) if row.seed in seeds else row for row in rows]


def _ends(rows: Sequence[RunRow], searched: Searched) -> dict[str, int | None]:
    """Return the last step of each condition that goes on from where it is; None: the end of its runs."""
    rungs, stages = searched.rungs, searched.stages
    if searched.winner:
        return {}
    alive = rungs[-1].kept if rungs else tuple(dict.fromkeys(row.condition for row in rows))
    ends: dict[str, int | None] = {} if stages else dict.fromkeys(alive)
    for count, step in stages[len(rungs) :]:
        ends |= dict.fromkeys(alive[:count], step or None)
    return ends


def _until(row: RunRow, step: int | None) -> RunRow:
    if step is None or row.max_steps is None:
        return row
    return replace(row, max_steps=max(row.step, min(step, row.max_steps)))
