"""How machines share permits: each worker gets a part, or all use one semaphore if file locks are shared."""

from __future__ import annotations

from retrain.launchers import Assignment

SHARED = "shared"


def workers_at_a_time(assignment: Assignment, permits: str) -> int:
    """Return how many runs may execute at a time: with split permits, each needs at least one."""
    if permits == SHARED or assignment.permits is None or assignment.permits_adapt:
        return assignment.workers
    return min(assignment.workers, assignment.permits)


def own_permits(assignment: Assignment, permits: str) -> list[str]:
    """Return the script line that sets a worker's own permits, if it has any."""
    if permits == SHARED or assignment.permits is None:
        return []
    own = max(1, assignment.permits // workers_at_a_time(assignment, permits))
    return [f"export RETRAIN_OWN_PERMITS={own}"]


def sharing_problems(assignment: Assignment, permits: str, table: str) -> list[str]:
    """Return a problem if split permits are to be shared with other campaigns."""
    if permits == SHARED or not assignment.permit_directories:
        return []
    return [
        "[backend].throttle_dir: permits shared through a directory may be given out twice by machines "
        f'that do not see each other\'s file locks; with [{table}].permits = "shared", two nodes '
        "first test that they do"
    ]
