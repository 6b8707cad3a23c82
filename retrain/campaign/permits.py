"""Where a campaign's permits lie, and how many there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from retrain.config.schema import FIRST_PERMITS
from retrain.plan.matrix import Plan
from retrain.records.layout import CampaignFiles
from retrain.semaphore import FileSemaphore, lock_sharing_problem


def open_permits(plan: Plan, files: CampaignFiles, say: Callable[[str], None]) -> None:
    """Make each directory hold as many permits as the plan says; what is odd about it is said."""
    for directory, permits, is_shared in permit_directories(plan, files):
        problem = lock_sharing_problem(directory)
        if problem:
            say(f"{problem} Permits will hold on this machine only.")
        semaphore = FileSemaphore(directory, permits or FIRST_PERMITS, allow_unshared=True)
        if permits is None or semaphore.permits == permits:
            continue  # what an earlier attempt found out is kept
        if is_shared:
            say(f"{directory} is shared and has {semaphore.permits} permits, not {permits}")
        else:
            semaphore.set_permits(permits)


def permit_directories(plan: Plan, files: CampaignFiles) -> list[tuple[Path, int | None, bool]]:
    """List directories of permits: how many each is to have (None: that adapts), and whether it is shared."""
    found: dict[Path, tuple[int | None, bool]] = {}
    for run in plan.runs:
        backend = run.config.backend
        directory = Path(backend.throttle_dir) if backend.throttle_dir else files.permits
        permits = None if backend.adapts_permits else backend.first_permits
        found[directory] = (permits, bool(backend.throttle_dir))
    return [(directory, permits, shared) for directory, (permits, shared) in found.items()]
