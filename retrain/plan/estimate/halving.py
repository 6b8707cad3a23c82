"""How far the runs of a search are expected to go: how many conditions go on is planned, only not which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from retrain.records.run_row import RunRow
from retrain.records.rungs import Searched


def as_expected(rows: Sequence[RunRow], searched: Searched | None) -> list[RunRow]:
    """Return the rows of runs with the step to which each is expected to go as its `max_steps`.

    Of the conditions left, those that ranked first are expected to go on, before the first rung those that
    were planned first. Fresh runs, which decide, and those of a campaign without a search go to their ends.
    """
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
