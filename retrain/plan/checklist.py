"""The checklist before a full run, answered from data where there is any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from retrain.plan.durations import about
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.warnings import GENEROUS, answers_alone, shares_cores

if TYPE_CHECKING:
    from retrain.plan.estimate.learned import Learned
    from retrain.plan.estimate.limits import Change
    from retrain.plan.estimate.wall_time import WallTime

State = Literal["pass", "warn", "unknown"]

SMOKE_BATCH, SMOKE_GROUP, SMOKE_TOKENS, SMOKE_STEPS = 2, 8, 1024, 5
PILOT_STEPS = 20  # per condition; the mean's standard error is then under a quarter of a step's deviation
MAX_TOKENS = "max_tokens set on purpose"
OFTEN_CUT = 0.05  # fraction of completions: above it, the policy mainly learns to be short
LONG_WAIT = 0.2  # fraction of a step: too many workers for the permits


@dataclass(frozen=True)
class Check:
    """One line: the question, the answer, and the command that answers it."""

    question: str
    state: State
    answer: str
    command: str  # "" if it is settled


@dataclass(frozen=True)
class Decisions:
    """The data that the answers are based on."""

    plan: Plan
    longest_answers: Mapping[str, int]  # characters, by condition
    learned: Learned | None
    time: WallTime | None
    cores: float
    file_name: str
    pilot_command: str
    learned_from: str  # the argument of --from

    def checklist(self, budget_s: float | None, *, sets_max_tokens: bool) -> tuple[Check, ...]:
        """Return the answer to every question."""
        return (
            self._smoke_or_full(),
            self._max_tokens(sets_max_tokens),
            self._parallelism(),
            self._throughput(),
            self._wall_time(budget_s),
        )

    def _smoke_or_full(self) -> Check:
        question = "smoke test or full run"
        if all(_is_smoke(run) for run in self.plan.runs):
            return Check(question, "pass", "smoke test: at most 2 x 8 rollouts of 1024 tokens per step", "")
        tokens = min(SMOKE_TOKENS, *(run.config.training.max_tokens for run in self.plan.runs))
        steps = "training.max_steps" if self.plan.is_single_run else "campaign.max_steps"
        sets = (
            f"training.batch_size={SMOKE_BATCH}",
            f"training.group_size={SMOKE_GROUP}",
            f"training.max_tokens={tokens}",
            f"{steps}={SMOKE_STEPS}",
        )
        command = f"retrain {self.file_name} " + " ".join(f"--set {each}" for each in sets)
        if self.learned is None:
            return Check(question, "unknown", "full run; no earlier run is known", command)
        never = [label for label, measured in self.learned.conditions.items() if not measured.is_finished]
        if never:
            return Check(question, "warn", f"full run, but {_listed(never)} never finished a run", command)
        return Check(question, "pass", "full run; every condition has finished a run before", "")

    def _max_tokens(self, is_set: bool) -> Check:
        question = MAX_TOKENS
        allowed = max(run.config.training.max_tokens for run in self.plan.runs)
        calibrate = f"retrain calibrate {self.file_name}"
        if not is_set:
            return Check(question, "warn", f"not set: {allowed} is the default", calibrate)
        alone = all(answers_alone(run.config) for run in self.plan.runs)
        need = max(self.longest_answers.values(), default=0) if alone else 0
        if need and allowed > GENEROUS * (need + 1):
            return Check(question, "warn", f"{allowed}; the longest answer has {need} characters", calibrate)
        cut, rate = self._most_cut_off()
        if rate > OFTEN_CUT:
            return self._often_cut(cut, rate, need)
        said = (
            f"at most {rate:.1%} of completions are cut off"
            if cut
            else "no earlier run shows how often completions are cut off"
        )
        return Check(question, "pass", f"{allowed}; {said}", "")

    def _often_cut(self, condition: str, rate: float, need: int) -> Check:
        """Check a high cut-off rate: harmless where every answer of `need` characters fits."""
        question, least = MAX_TOKENS, min(run.config.training.max_tokens for run in self.plan.runs)
        if 0 < need < least:
            rambling = (
                f"{least}; every correct answer fits; {rate:.0%} of {condition}'s completions "
                "hit the limit without ending"
            )
            return Check(question, "pass", rambling, "")
        cut = f"{rate:.0%} of {condition}'s completions are cut off"
        return Check(question, "warn", cut, f"retrain calibrate {self.file_name}")

    def _most_cut_off(self) -> tuple[str, float]:
        """Return the condition whose completions are cut off most often ("" if unknown), and the fraction."""
        measured = self.time.conditions if self.time else ()
        rates = {c.condition: c.max_token_hit_rate or 0.0 for c in measured}
        return max(rates.items(), key=lambda item: item[1], default=("", 0.0))

    def _parallelism(self) -> Check:
        question, workers = "parallelism within limits", self.plan.workers
        backend = self.plan.runs[0].config.backend
        on_cores = shares_cores(self.plan)
        if on_cores and workers > self.cores:
            command = f"retrain explain {self.file_name} --set campaign.max_workers={max(1, int(self.cores))}"
            return Check(question, "warn", f"{workers} workers share {self.cores:g} CPU cores", command)
        if self.time is not None and self.time.permit_wait_fraction > LONG_WAIT:
            waits = f"a step would wait {self.time.permit_wait_fraction:.0%} of its time for permits"
            sets = _first_options([c for c in self.time.changes if c.limit == "permits"])
            command = f"retrain explain {self.file_name} --from {self.learned_from}{sets}"
            return Check(question, "warn", waits, command)
        if workers == 1 or on_cores:
            return Check(question, "pass", f"{workers} at a time on {self.cores:g} CPU cores", "")
        if self.time is not None and self.time.holds_permits:
            return Check(
                question, "pass", f"{workers} workers hardly wait for {backend.first_permits} permits", ""
            )
        answer = f"not measured whether {workers} workers slow each other down"
        return Check(question, "unknown", answer, f"retrain calibrate {self.file_name}")

    def _throughput(self) -> Check:
        question = "pilot confirms throughput"
        if self.learned is None or self.time is None:
            return Check(question, "unknown", "nothing was measured", self.pilot_command)
        measured = self.learned.conditions.values()
        others = [m.condition for m in measured if m.match != "same"]
        if others:
            answer = f"not measured with these settings: {_listed(others)}"
            return Check(question, "warn", answer, self.pilot_command)
        few = [
            m.condition for m in measured if m.steps < PILOT_STEPS - m.runs
        ]  # each run's first step counts as start-up
        if few:
            answer = f"fewer than {PILOT_STEPS} steps of {_listed(few)}"
            return Check(question, "warn", answer, self.pilot_command)
        if self.time.tail == "heavy":
            return Check(question, "warn", self.time.notes[0], self.pilot_command)
        return Check(
            question, "pass", f"{self.time.measured_steps} steps of {self.time.measured_runs} runs", ""
        )

    def _wall_time(self, budget_s: float | None) -> Check:
        question = "wall time acceptable"
        if self.time is None:
            return Check(question, "unknown", "no step time is known", self.pilot_command)
        p50, p90 = about(self.time.p50_s), about(self.time.p90_s)
        command = f"retrain explain {self.file_name} --from {self.learned_from}"
        if budget_s is None:
            return Check(
                question, "unknown", f"P50 {p50}, P90 {p90}; no budget was given", f"{command} --budget 6h"
            )
        answer = f"P50 {p50}, P90 {p90} of {about(budget_s)}"
        if self.time.p90_s <= budget_s:
            return Check(question, "pass", answer, "")
        sets = _first_options(self.time.changes)
        return Check(question, "warn", answer, f"{command}{sets} --budget {budget_s:g}s")


def _first_options(changes: Sequence[Change]) -> str:
    """Return the first change's settings as command-line options; empty if they are not keys."""
    pairs = [pair.split(" = ") for pair in changes[0].setting.split(", ") if " = " in pair] if changes else []
    return "".join(f" --set {key}={value}" for key, value in pairs)


def _is_smoke(run: RunPlan) -> bool:
    training = run.config.training
    return (
        training.batch_size <= SMOKE_BATCH
        and training.group_size <= SMOKE_GROUP
        and training.max_tokens <= SMOKE_TOKENS
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
