"""One run of a campaign -> one row."""

from __future__ import annotations

from retrain.errors import RecordsError
from retrain.records.layout import RunFiles
from retrain.records.manifest import RunEntry
from retrain.records.run_state import UNREADABLE
from retrain.records.run_summary import RunSummary, summarize_run
from retrain.records.settled import is_still
from retrain.records.text import plain
from retrain.status.rows import RunStatus

NAME_LIMIT = 64


def read_run(files: RunFiles, planned: RunEntry) -> RunStatus:
    """Read one run; files that cannot be read make it `UNREADABLE`, with the reason as its message.

    Of a run that was over when the manifest was written, no file is opened unless one changed since.
    """
    try:
        if planned.settled is not None and is_still(planned.settled, files):
            return row_of(planned, planned.settled.summary)
        return row_of(planned, summarize_run(files, planned.config_hash))
    except RecordsError as error:
        return unreadable(planned, error)


def unreadable(planned: RunEntry, error: RecordsError) -> RunStatus:
    """Return the row of a run whose files cannot be read."""
    return row_of(planned, RunSummary(UNREADABLE, message=str(error)))


def row_of(planned: RunEntry, found: RunSummary) -> RunStatus:
    """Put what was planned beside what was found."""
    return RunStatus(
        run_id=plain(planned.run_id, NAME_LIMIT),
        condition=plain(planned.condition, NAME_LIMIT),
        seed=planned.seed if planned.seed >= 0 else None,
        state=found.state,
        phase=plain(found.phase, NAME_LIMIT),
        step=found.step,
        max_steps=planned.max_steps or found.max_steps,
        attempt=found.attempt,
        reward_first=found.reward_first,
        reward_last=found.reward_last,
        reward_mean=found.reward_mean,
        eval_reward=found.eval_reward,
        step_time_s=found.step_time_s,
        batch_size=found.batch_size,
        permit_wait_s=found.permit_wait_s,
        bp_regime=plain(found.bp_regime, NAME_LIMIT),
        bp_p_star=found.bp_p_star,
        bp_utilization=found.bp_utilization,
        throttle_level=plain(found.throttle_level, NAME_LIMIT),
        message=plain(found.message),
        pace=found.pace,
    )
