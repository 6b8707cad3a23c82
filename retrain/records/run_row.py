"""A run as one row, as `status`, its live view, `report`, `compare` and `--json` show it.

Each column is declared once, in `RunRow`, with its unit and meaning; `reading` reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from retrain.base.clock import seconds_between
from retrain.records.pace import PACE_KEYS, Pace
from retrain.records.row_parts import column
from retrain.records.run_state import API_OUT, UNREADABLE, WAITING, RunState
from retrain.records.text import first_of, name_of_run, plain, without_score

TAIL_ROWS = 10  # whose step times are shown
NAME_LIMIT = 200  # characters of an id, a condition (as many as its key allows), a phase or a regime
MESSAGE_LIMIT = 500  # characters; a damaged record names its path twice and the command that repairs it
CALM = (RunState.PENDING, RunState.RUNNING, RunState.DONE, RunState.INTERRUPTED, WAITING)
_FINAL = (RunState.DONE, RunState.FAILED, UNREADABLE)  # these take no more steps
AT_RUNG = "at rung "  # phase of a run that waits at a rung of a search; then the step


@dataclass(frozen=True)
class PlannedRun:
    """A run as the campaign planned it."""

    run_id: str
    condition: str
    seed: int  # -1 for none
    max_steps: int
    config_hash: str = ""  # of the run's resolved config; "" accepts any done.json

    @property
    def name(self) -> str:
        """What it is called wherever it is shown."""
        return name_of_run(self.run_id, self.condition, self.seed)


def _of_last_step(unit: str, meaning: str, **default: Any) -> Any:
    """Declare a column that holds the value of the same name in the last row of metrics.jsonl."""
    return field(metadata={**column(unit, meaning).metadata, "is_of_last_step": True}, **default)


NAMED_RUNS = 3  # of those that have no signal for the same reason; the others are counted
FIGURE = re.compile(r"\d[\d.]*(?:e[+-]?\d+)?")
LONG_SILENCE = 10.0  # usual steps
LEAST_SILENCE_S = 5.0  # a worker says every second where it is; a loaded machine may delay that
ELSEWHERE_S = 60.0  # likewise, of another machine: clocks differ, and NFS shows a file as late as this


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """One run. Figures are null until the run has rows with them.

    Every text is safe to print (see `records.text`).
    """

    run_id: str = column("", "name of its directory")
    condition: str = column("", "its name")
    seed: int | None = column("", "null if it has none, or neither manifest nor name gives it")
    state: str = column(
        "",
        "pending, running, done, failed, infrastructure, timeout, stalled, interrupted, "
        "waiting (at a rung of a search), died or unreadable",
    )
    phase: str = column(
        "",
        "last known phase of a running run; where a waiting one waits; from where a pending one goes on; "
        "whether a search has dropped one that is done, or ended it since it won",
        default="",
    )
    detail: str = column("", "how far a long phase is", default="")
    updated_at: str = column("", "when the worker of a running run last said where it is, UTC", default="")
    engine: str = column("", "load of the server that samples, as it said last", default="")
    engine_server: str = column("", "its log; its address if others started it", default="")
    step: int = column("steps", "steps that are complete", default=0)
    max_steps: int | None = column("steps", "steps of the whole run")
    attempt: int = column("", "number of its last attempt; 0 before the first", default=0)
    host: str = column("", "the machine of that attempt", default="")
    reward_first: float | None = column("reward", "mean reward of the first step", default=None)
    reward_last: float | None = column("reward", "mean reward of the last step", default=None)
    reward_mean: float | None = column("reward", "mean over the last `reward_steps` steps", default=None)
    reward_steps: int | None = column("steps", "a tenth of those taken, at least 10 or all", default=None)
    eval_reward: float | None = column("reward", "of the last evaluation on held-out prompts", default=None)
    eval_falling: str = column("", "each `[[eval]]` that fell although the reward rose", default="")
    step_time_s: float | None = column("s", "median over the last 10 steps", default=None)
    batch_size: int | None = _of_last_step("prompts", "prompts in the last step", default=None)
    permit_wait_s: float | None = _of_last_step(
        "s", "wait for permits in the last step, summed over calls", default=None
    )
    bp_regime: str = _of_last_step("", 'regime of back pressure in the last step; "" without it', default="")
    bp_p_star: float | None = _of_last_step(
        "rollouts", "best concurrency; null: none, not determined, or no back pressure", default=None
    )
    bp_utilization: float | None = _of_last_step(
        "ratio", "expected throughput over that of the best size allowed", default=None
    )
    throttle_level: str = _of_last_step(
        "", 'level that the load allowed in the last step; "" without a throttle', default=""
    )
    unscored_fraction: float | None = _of_last_step(
        "fraction", "share of its completions so far that have no score; null if all have one", default=None
    )
    unscored_outage_fraction: float | None = _of_last_step(
        "fraction",
        "part of that share whose scorer failed or timed out; the rest cannot be judged",
        default=None,
    )
    unscored_reason: str = _of_last_step("", "why the first of them has none", default="")
    mismatch_rise: str = _of_last_step("", 'last steady rise of `mismatch_kl`; "" without any', default="")
    no_signal: str = _of_last_step("", 'how long and why steps had no signal; "" if they had', default="")
    runaway: str = _of_last_step(
        "", 'what computed on, so that processes play episodes; "" if nothing did', default=""
    )
    first_steps: str = _of_last_step(
        "", 'digest of the results of its first 10 steps with updates; "" before', default=""
    )
    sandbox: str = _of_last_step("", 'where programs of the policy ran; "" without any', default="")
    cost_usd: float | None = column(
        "$", "what all of its attempts cost; null where the price is not known", default=None
    )
    unsure_usd: float | None = column(
        "$", "part of it that is at most so much: calls that a kill or a failure cut off", default=None
    )
    prefill_tokens: int | None = column(
        "tokens", "billed for prompts read in full; null where none are billed", default=None
    )
    cached_tokens: int | None = column("tokens", "billed for prompts read before", default=None)
    sampled_tokens: int | None = column("tokens", "billed for sampling", default=None)
    trained_tokens: int | None = column("tokens", "billed for training", default=None)
    message: str = column(
        "", "why it failed or cannot be read: last line of the error; or rows that loggers lack", default=""
    )
    pace: Pace | None = column("", "[its pace](json.md#pace) so far", default=None)  # noqa: RUF009 - it is a field

    def silent_s(self, now: str) -> float | None:
        """Return for how long a running run has said nothing, once that is long for it; None before.

        A worker says where it is every second; one that is suspended, or whose process is stuck, does not.
        """
        if self.state != RunState.RUNNING:
            return None
        silent_s, usual_s = seconds_between(self.updated_at, now), self.step_time_s
        is_on_time = self.host == os.uname().nodename and usual_s is not None  # to load a model blocks it
        long_s = max(LONG_SILENCE * (usual_s or 0.0), LEAST_SILENCE_S if is_on_time else ELSEWHERE_S)
        return silent_s if silent_s is not None and silent_s >= long_s else None

    @property
    def name(self) -> str:
        """What it is called wherever it is shown."""
        return name_of_run(self.run_id, self.condition, self.seed)

    @property
    def steps_left(self) -> int:
        """Steps that an orchestrator would still have it take."""
        return 0 if self.state in _FINAL else max(0, (self.max_steps or 0) - self.step)

    @property
    def is_done(self) -> bool:
        return self.state == RunState.DONE

    @property
    def unscored(self) -> str:
        """Which share of its completions has no score and why; "" if all have one."""
        if not self.unscored_fraction:
            return ""
        return without_score(self.unscored_fraction, self.unscored_outage_fraction, self.unscored_reason)

    @property
    def waits_for_api(self) -> bool:
        """Whether the API that it calls has paused its calls, or is down."""
        return self.state == RunState.RUNNING and self.phase.startswith(API_OUT)

    @property
    def ended_badly(self) -> bool:
        """Whether it failed, died or cannot be read."""
        return self.state not in CALM


OF_LAST_STEP = {each.name: str(each.type) for each in fields(RunRow) if "is_of_last_step" in each.metadata}
OF_PROGRESS = ("phase", "detail", "updated_at", "engine", "engine_server")  # of status.json of a running run
KEYS = (*PACE_KEYS, "mean_reward", "eval_reward", "eval_falling", *OF_LAST_STEP)  # of metrics.jsonl
_TEXTS = [c.name for c in fields(RunRow) if c.type == "str" and c.name != "message"]


def without_signal(runs: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Return why runs have no learning signal, once for each condition and reason, by the runs' names.

    Each run is its name, its condition, and what its last row says; "" has a signal. A reason is the same
    with other figures: those shown are the first run's.
    """
    alike: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for name, condition, sentence in runs:
        if sentence:
            reason = FIGURE.sub("", sentence.partition(": ")[2])
            alike.setdefault((condition, reason), []).append((name, sentence))
    return {first_of([name for name, _ in same], NAMED_RUNS): same[0][1] for same in alike.values()}


def identical_runs(runs: Iterable[tuple[str, int | None, str]]) -> dict[str, str]:
    """Return what is to be known of conditions whose runs agree to the last digit, by these conditions.

    Each run is its condition, its seed, and the digest of its first steps; "" is not known.
    """
    alike: dict[tuple[int | None, str], dict[str, None]] = {}
    for condition, seed, digest in runs:
        if digest:
            alike.setdefault((seed, digest), {})[condition] = None
    seeds: dict[str, list[int | None]] = {}
    for (seed, _), conditions in alike.items():
        if len(conditions) > 1:
            seeds.setdefault(first_of(list(conditions), NAMED_RUNS), []).append(seed)
    return {
        names: f"10 steps of seed {first_of(list(map(str, equal)), NAMED_RUNS)} agree to the last digit: "
        "what sets these conditions apart has no effect"
        for names, equal in seeds.items()
    }


def row_of(planned: PlannedRun, columns: Mapping[str, Any]) -> RunRow:
    """Return the row of a planned run; texts are made safe to print."""
    row = {**columns, "run_id": planned.run_id, "condition": planned.condition}
    row |= {name: plain(row[name], NAME_LIMIT) for name in _TEXTS if name in row}
    row["message"] = plain(row.get("message", ""), MESSAGE_LIMIT)
    row["seed"] = planned.seed if planned.seed >= 0 else None
    row["max_steps"] = planned.max_steps or row.get("max_steps")
    return RunRow(**row)
