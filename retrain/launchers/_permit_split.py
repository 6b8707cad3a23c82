"""Permits that are split between the workers of an engine, whose machines may not see each other's locks."""

from __future__ import annotations

from retrain.launchers import Assignment


def workers_at_a_time(assignment: Assignment) -> int:
    """Give how many runs there may be at a time: each needs a permit of its own."""
    if assignment.permits is None or assignment.permits_adapt:
        return assignment.workers
    return min(assignment.workers, assignment.permits)


def own_permits(assignment: Assignment) -> list[str]:
    """Give the line of a script that tells a worker its part."""
    if assignment.permits is None:
        return []
    own = max(1, assignment.permits // workers_at_a_time(assignment))
    return [f"export RETRAIN_OWN_PERMITS={own}"]
