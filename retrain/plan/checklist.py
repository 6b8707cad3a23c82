"""The checklist before a full run, answered from data where there is any."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from retrain.plan.matrix import Plan
from retrain.records.layout import CALIBRATIONS
from retrain.records.text import about, first_of

if TYPE_CHECKING:
    from retrain.plan.estimate import Change
    from retrain.plan.estimate.learned import ConditionSummary
    from retrain.plan.estimate.wall_time import WallTime

CheckState = Literal["pass", "warn", "unknown"]
Answer = tuple[CheckState, str, str]  # the state, the answer and the command of a check

SMOKE_BATCH, SMOKE_GROUP, SMOKE_TOKENS, SMOKE_STEPS = 2, 8, 1024, 5
SUGGESTED = (  # keys that a suggested command may set
    "training.batch_size",
    "training.group_size",
    "training.max_tokens",
    "training.max_steps",
    "campaign.max_steps",
)
PILOT_STEPS = 20  # per condition; the mean's standard error is then under a quarter of a step's deviation
GENEROUS = 8  # times the longest answer: more than any completion needs
OFTEN_CUT = 0.05  # fraction of completions: above it, the policy mainly learns to be short
CALIBRATED = ("training.max_tokens = ", "training.batch_size = ")  # what calibration changes of a step's time
LONG_WAIT = 0.2  # fraction of a step: too many workers for the permits


@dataclass(frozen=True)
class ChecklistLine:
    """One line: the question, the answer, and the command that answers it."""

    question: str
    state: CheckState
    answer: str
    command: str  # "" if it is settled


@dataclass(frozen=True)
class Decisions:
    """The data that the answers are based on."""

    plan: Plan
    longest_answers: Mapping[str, int]  # characters, by condition
    time: WallTime | None
    cores: float
    file_name: str
    pilot_command: str
    learned_from: str  # the argument of --from
    fixed: Collection[str] = ()  # keys that --set cannot change

    def checklist(self, budget_s: float | None, *, sets_max_tokens: bool) -> tuple[ChecklistLine, ...]:
        return (
            ChecklistLine("smoke test or full run", *self._smoke_or_full()),
            ChecklistLine("max_tokens set on purpose", *self._chosen_max_tokens(sets_max_tokens)),
            ChecklistLine("parallelism within limits", *self._parallelism()),
            ChecklistLine("pilot confirms throughput", *self._throughput()),
            ChecklistLine("wall time acceptable", *self._wall_time(budget_s)),
        )

    def _smoke_or_full(self) -> Answer:
        runs = [run.config.training for run in self.plan.first_runs.values()]
        is_small = all(run.batch_size <= SMOKE_BATCH and run.group_size <= SMOKE_GROUP for run in runs)
        if is_small and all(run.max_tokens <= SMOKE_TOKENS for run in runs):
            return "pass", "smoke test: at most 2 x 8 rollouts of 1024 tokens per step", ""
        sets = [f" --set {key}={value}" for key, value in self._smoke().items() if key not in self.fixed]
        command = f"retrain {self.file_name}{''.join(sets)}"
        if self.time is None:
            return "unknown", "full run; no earlier run is known", command
        never = [one.condition for one in self.time.conditions if not one.is_finished]
        if never:
            return "warn", f"full run, but {first_of(never, 3)} never finished a run", command
        return "pass", "full run; every condition has finished a run before", ""

    def _smoke(self) -> dict[str, int]:
        """Return the values of keys for a smoke test, as small as the other keys allow."""
        configs = [run.config for run in self.plan.first_runs.values()]
        least = [config.backpressure.min_batch_size for config in configs if config.backpressure.enabled]
        parts = [config.training.minibatches for config in configs]
        return {
            "training.batch_size": max(SMOKE_BATCH, *parts, *least),
            "training.group_size": SMOKE_GROUP,
            "training.max_tokens": min(SMOKE_TOKENS, *(config.training.max_tokens for config in configs)),
            steps_key(self.plan): enough_steps(self.plan, SMOKE_STEPS),
        }

    @property
    def _is_calibrated(self) -> bool:
        """Whether the earlier runs are those of `retrain calibrate`, which has judged what it can."""
        return CALIBRATIONS in PurePath(self.learned_from).parts

    @property
    def _calibrate(self) -> str:
        return f"retrain calibrate {self.file_name}"

    def _chosen_max_tokens(self, is_set: bool) -> Answer:
        state, answer, command = self._max_tokens(is_set)
        if self._is_calibrated and command == self._calibrate:
            return "pass", f"{answer}; as calibrated", ""
        return state, answer, command

    def _max_tokens(self, is_set: bool) -> Answer:
        limits = {name: run.config.training.max_tokens for name, run in self.plan.first_runs.items()}
        allowed, least = max(limits.values()), min(limits.values())
        if not is_set:
            return "warn", f"not set: {allowed} is the default", self._calibrate
        alone = all(run.answers_alone for run in self.plan.first_runs.values())
        need = max(self.longest_answers.values(), default=0) if alone else 0
        short = next((name for name, most in limits.items() if self.longest_answers.get(name, 0) > most), "")
        if alone and short:
            longer = f"retrain explain {self.file_name} --set training.max_tokens={need + 1}"
            answer = (
                f"{limits[short]}; the longest answer of {short} has {self.longest_answers[short]} characters"
            )
            return "warn", answer, "" if "training.max_tokens" in self.fixed else longer
        if need and allowed > GENEROUS * (need + 1):
            return "warn", f"{allowed}; the longest answer has {need} characters", self._calibrate
        return self._cut_off(allowed, least, need)

    def _cut_off(self, allowed: int, least: int, need: int) -> Answer:
        """Judge limits of tokens by how often earlier runs hit them."""
        measured = self.time.conditions if self.time else ()
        rates = {one.condition: one.max_token_hit_rate or 0.0 for one in measured}
        if not rates:
            return "pass", f"{allowed}; no earlier run shows how often completions are cut off", ""
        condition, rate = max(rates.items(), key=lambda item: item[1])
        if rate <= OFTEN_CUT:
            return "pass", f"{allowed}; at most {rate:.1%} of completions are cut off", ""
        run = self.plan.first_runs[condition]
        if not run.config.environment.is_single_turn:  # a limit may be that of turns
            return "pass", f"{allowed}; {rate:.0%} of {condition}'s episodes are ended by a limit", ""
        if not 0 < need < least:
            return "warn", f"{rate:.0%} of {condition}'s completions are cut off", self._calibrate
        rambling = f"{rate:.0%} of {condition}'s completions hit the limit without ending"
        return "pass", f"{least}; every correct answer fits; {rambling}", ""

    def _parallelism(self) -> Answer:
        workers, on_cores, cores = self.plan.workers, self.plan.shares_cores, self.cores
        slowdown = self.time.slowdown if self.time else None
        if on_cores and workers > cores and slowdown is not None and slowdown < workers / cores:
            measured = f"a step takes {slowdown:.2g} times as long as alone, as a calibration measured"
            return "pass", f"{workers} workers share {cores:g} CPU cores: {measured}", ""
        if on_cores and workers > cores:
            command = f"retrain explain {self.file_name} --set campaign.max_workers={max(1, int(cores))}"
            slower = "steps will be slower than measured alone; with fewer workers, each has its own core"
            return "warn", f"{workers} workers share {cores:g} CPU cores: {slower}", command
        if self.time is not None and self.time.permit_wait_fraction > LONG_WAIT:
            waits = f"a step would wait {self.time.permit_wait_fraction:.0%} of its time for permits"
            sets = _first_options([c for c in self.time.changes if c.limit == "permits"])
            return "warn", waits, f"{self._explain}{sets}"
        if self.time is not None and self.time.slowest_p50_s is not None and self.time.holds_permits:
            answer = 'max_concurrent = "auto": no earlier run shows how many calls the API takes at a time'
            return "unknown", answer, self.pilot_command if self._is_calibrated else self._calibrate
        if workers == 1 or on_cores:
            return "pass", f"{workers} at a time on {cores:g} CPU cores", ""
        if self.time is not None and self.time.holds_permits:
            return "pass", f"{workers} workers hardly wait for {self.plan.permits} permits", ""
        if self._is_calibrated:
            return "pass", f"{workers} at a time, as calibrated", ""
        return "unknown", f"not measured whether {workers} workers slow each other down", self._calibrate

    def _throughput(self) -> Answer:
        if self.time is None:
            return "unknown", "nothing was measured", self.pilot_command
        measured = self.time.conditions
        if others := [one.condition for one in measured if not self._is_measured(one)]:
            return "warn", f"not measured with these settings: {first_of(others, 3)}", self.pilot_command
        # each run's first step counts as start-up
        needed = min(PILOT_STEPS, _longest(self.plan))
        if few := [one.condition for one in measured if one.steps < needed - one.runs]:
            return "warn", f"fewer than {needed} steps of {first_of(few, 3)}", self.pilot_command
        if self.time.tail == "heavy":
            return "warn", self.time.notes[0], self.pilot_command
        answer = f"{self.time.measured_steps} steps of {self.time.measured_runs} runs"
        if changes := dict.fromkeys(chain.from_iterable(one.differs for one in measured)):
            answer += f", calibrated with {'; '.join(changes)}"
        return "pass", answer, ""

    def _is_measured(self, condition: ConditionSummary) -> bool:
        """Whether a condition's steps were measured as planned, up to what calibration has changed since."""
        known = self._is_calibrated and all(change.startswith(CALIBRATED) for change in condition.differs)
        return condition.match == "same" or (condition.match == "other settings" and known)

    def _wall_time(self, budget_s: float | None) -> Answer:
        if self.time is None:
            return "unknown", "no step time is known", self.pilot_command
        answer = f"P50 {about(self.time.p50_s)}, P90 {about(self.time.p90_s)}"
        if budget_s is None:
            return "unknown", f"{answer}; no time budget was given", f"{self._explain} --budget 6h"
        answer += f" of {about(budget_s)}"
        if self.time.p90_s <= budget_s:
            return "pass", answer, ""
        return "warn", answer, f"{self._explain}{_first_options(self.time.changes)} --budget {budget_s:g}s"

    @property
    def _explain(self) -> str:
        return f"retrain explain {self.file_name} --from {self.learned_from}"


def _first_options(changes: Sequence[Change]) -> str:
    """Return the first change's settings as command-line options; empty if they are not keys."""
    pairs = [pair.split(" = ") for pair in changes[0].setting.split(", ") if " = " in pair] if changes else []
    return "".join(f" --set {key}={value}" for key, value in pairs)


def steps_key(plan: Plan) -> str:
    """Return the key that decides how many steps all runs take."""
    return f"{'training' if plan.is_single_run else 'campaign'}.max_steps"


def enough_steps(plan: Plan, wanted: int) -> int:
    """Return the steps of a short run: at most those of the plan, and above the last rung of its search."""
    search = plan.campaign.search
    return max(min(wanted, _longest(plan)), search.rungs[-1] + 1 if search and search.rungs else 0)


def _longest(plan: Plan) -> int:
    return max((run.max_steps for run in plan.runs), default=PILOT_STEPS)
