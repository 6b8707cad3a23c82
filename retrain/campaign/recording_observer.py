"""Keeps a campaign's own records fresh while its runs come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from retrain.campaign.endings import Ending
from retrain.campaign.events import Observer
from retrain.campaign.rollup import RollUp
from retrain.errors import RecordsError
from retrain.plan.matrix import RunPlan
from retrain.records.notices import NoticeBook


class RecordingObserver:
    """Passes events on, keeps the manifest fresh, and writes notices down."""

    def __init__(self, observer: Observer, roll_up: RollUp, notices: NoticeBook) -> None:
        self._observer = observer
        self._roll_up = roll_up
        self._notices = notices
        self.begun = observer.begun

    def notice(self, text: str) -> None:
        self._observer.notice(text)
        with contextlib.suppress(RecordsError):  # it was said; a full disk is told of by what needs it
            self._notices.write(text)

    def started(self, run: RunPlan) -> None:
        self._observer.started(run)
        self._roll_up.changed(run.run_id)

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        self._observer.retrying(run, ending, delay_s)
        self._roll_up.changed(run.run_id)

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._observer.ended(run, ending, tail)
        self._roll_up.changed(run.run_id)
        try:
            self._roll_up.keep()
        except RecordsError as error:
            self._observer.notice(str(error))
