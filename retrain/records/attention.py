"""What about a live campaign needs somebody: a worker that is silent, runs without a signal, a long pause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrain.base.clock import utc_now
from retrain.records.run_row import RunRow, without_signal
from retrain.records.run_state import API_OUT, RunState
from retrain.records.text import about

KINDS = ("stalled", "no_signal", "paused", "unsupervised")
STOOD_STILL = ("paused", *API_OUT)  # beginnings of phases: a loaded machine, or an API that takes no calls
LONGEST_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Attention:
    """Something that a campaign does not overcome by itself, or that costs much until it does."""

    kind: str  # one of KINDS
    run: str  # its name as tables show it, several where a reason is the same; "" for the campaign
    condition: str  # of these runs; "" for the campaign
    what: str


class AttentionWatch:
    """Looks at the runs of a live campaign again and again; patient for so long with pauses."""

    def __init__(self, patience_s: float, *, has_queue: bool) -> None:
        """Begin; in a cluster that `has_queue`, runs may wait for long before any of them is alive."""
        self._patience_s, self._has_queue = patience_s, has_queue
        self._since_s: dict[str, float] = {}  # since when runs are paused, by run; of the campaign: ""

    def look(self, runs: Sequence[RunRow], now_s: float, notice: str = "") -> Iterator[Attention]:
        """Iterate over what needs attention now, `now_s` on a monotonic clock.

        `notice` is the orchestrator's last one: where no run is alive it says why.
        """
        now, longest_s = utc_now(), min(self._patience_s, LONGEST_SILENCE_S)
        for run in runs:
            silent_s = run.silent_s(now)
            if silent_s is not None and silent_s >= longest_s:
                what = f"nothing has happened for {about(silent_s)}; is its worker suspended?"
                yield Attention("stalled", run.name, run.condition, what)
        alive = [run for run in runs if run.state == RunState.RUNNING]
        for condition in dict.fromkeys(run.condition for run in alive):
            for names, why in without_signal(run for run in alive if run.condition == condition).items():
                yield Attention("no_signal", names, condition, why)
        paused = {run.name: (run.condition, run.phase) for run in alive if run.phase.startswith(STOOD_STILL)}
        if not alive and not self._has_queue:
            paused[""] = "", f"no run is alive; last notice: {notice}" if notice else "no run is alive"
        self._since_s = {name: self._since_s.get(name, now_s) for name in paused}
        for name, (condition, why) in paused.items():
            if now_s - self._since_s[name] >= self._patience_s:
                what = f"{why} (for {about(now_s - self._since_s[name])} or longer)"
                yield Attention("paused", name, condition, what)
