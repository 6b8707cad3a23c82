"""The rows that `status` is made of. Every text in them is safe to print (see `records.text`)."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.records.manifest import Expectation
from retrain.records.run_row import RunRow


@dataclass(frozen=True)
class ConditionStatus:
    """One condition over its seeds."""

    condition: str
    runs: int
    done: int
    running: int
    failed: int  # ended badly: failed, infrastructure, timeout, stalled, died, unreadable
    reward_mean: float | None  # over seeds that are done or running, of each one's last rows
    reward_std: float | None  # sample standard deviation over those seeds; None below two
    step_time_s: float | None  # median over seeds


@dataclass(frozen=True)
class PermitHolder:
    """Who has an API call in flight."""

    pid: int
    host: str
    label: str
    held_s: float


@dataclass(frozen=True)
class PermitStatus:
    """A campaign's permits as they are now."""

    permits: int
    holders: tuple[PermitHolder, ...]
    waiting: int
    change: str  # why their number last changed by itself; "" if it never did


@dataclass(frozen=True)
class CampaignStatus:
    """One campaign, or one single run."""

    id: str  # name of its directory
    name: str
    state: str  # pending, running, done, failed (ended, not all done), interrupted (work left, nobody at it)
    started_at: str
    ended_at: str  # "" while it goes on
    conditions: tuple[ConditionStatus, ...]  # the matrix: these rows ...
    seeds: tuple[int | None, ...]  # ... and these columns
    runs: tuple[RunRow, ...]
    step_time_s: float | None  # median over runs
    steps_done: int
    steps_total: int | None
    eta_s: float | None  # time left, P50; None unless something is running
    permits: PermitStatus | None
    problem: str  # what of the campaign's own files cannot be read
    eta_p90_s: float | None = None  # time left, P90
    expected: Expectation | None = None  # of the whole campaign, and what it took
    is_supervised: bool = False  # whether its orchestrator lives
    resume_with: str = ""  # the command that goes on with it, where work is left and nobody supervises it

    def run(self, condition: str, seed: int | None) -> RunRow | None:
        """Return the matrix's cell, or None if that run was never planned."""
        return next((r for r in self.runs if (r.condition, r.seed) == (condition, seed)), None)
