"""`retrain explain`: what a file would run, how long it would take, and what to check first."""

from __future__ import annotations

import glob
import math
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from retrain.base import registry
from retrain.config.keys import quote
from retrain.config.prices import Price, price_of, priced_as, unpriced
from retrain.config.resolve import RUN_SECTIONS, plain_value, plays_episodes, teachers_of
from retrain.config.schema import Config
from retrain.config.sweep import swept_keys
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.notes import GENEROUS, notes_of
from retrain.plan.preflight import Checked, sandbox_warnings, sandboxes_of
from retrain.records.layout import CALIBRATIONS, stem_of
from retrain.records.text import about, count_of, dollars, first_of, gib
from retrain.records.windows import LAST, STEPS

if TYPE_CHECKING:
    from retrain.config.load import ValueOrigin
    from retrain.plan.designs import Designs, FurtherQuestions
    from retrain.plan.estimate import Change
    from retrain.plan.estimate.devices import DeviceSplits
    from retrain.plan.estimate.history import History
    from retrain.plan.estimate.money import CostForecast
    from retrain.plan.estimate.wall_time import WallTime
    from retrain.plan.expected_seeds import ExpectedSeeds
    from retrain.plan.most_cost import MostCost


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
OFTEN_CUT = 0.05  # fraction of completions: above it, the policy mainly learns to be short
CALIBRATED = ("training.max_tokens = ", "training.batch_size = ")  # what calibration changes of a step's time
LONG_WAIT = 0.2  # fraction of a step: too many workers for the permits
UNKNOWN = (
    "step times",
    "start-up time",
    "the share of API calls in a step",
    "how many completions max_tokens cuts off",
)


@dataclass(frozen=True)
class ChecklistLine:
    """One line: the question, the answer, and the command that answers it."""

    question: str
    state: CheckState
    answer: str
    command: str  # "" if it is settled


@dataclass(frozen=True)
class SourceShares:
    """How many prompts of a step each source has, on average, over some steps."""

    from_step: int
    until_step: int
    prompts: Mapping[str, float]  # by name of the source


@dataclass(frozen=True)
class ConditionPlan:
    """One condition's row of the run matrix."""

    condition: str
    seeds: tuple[int, ...]
    max_steps: int
    batch_size: int
    group_size: int
    concurrency: int  # rollouts sampled per step
    max_tokens: int
    backend: str
    task: str
    differs: tuple[str, ...]  # keys whose value differs from the first condition's
    teacher: str = ""  # what its runs learn from, besides or in place of a reward; empty: none
    adapter: str = ""  # what its runs start from; empty: no adapter
    sources: tuple[SourceShares, ...] = ()  # of several, in the order of the steps


@dataclass(frozen=True)
class MemoryUse:
    """What one run of a condition takes of the memory of its device, as estimated."""

    condition: str
    device: str  # cpu (this machine's memory) or cuda (one GPU's)
    peak_bytes: int
    smallest_bytes: int  # with the smallest batches
    free_bytes: int | None  # now; null if not known
    parts: str  # what takes it


@dataclass(frozen=True)
class Explanation:
    """Everything that `retrain explain` shows."""

    name: str
    conditions: tuple[ConditionPlan, ...]
    total_runs: int
    total_campaign_steps: int
    effective_parallelism: int
    permits: int | None  # the initial number, if they adapt; None if no run calls an API
    permits_adapt: bool
    launcher: str
    log_dir: str
    wall_time: WallTime | None  # None while no step time is known
    unknown: tuple[str, ...]  # what no run that was read has measured; empty if any has
    pilot_command: str  # measures what is unknown
    warnings: tuple[str, ...]
    checklist: tuple[ChecklistLine, ...]  # before a full run: each line passes, warns or is unknown
    script: str = ""  # what the launcher would submit
    sandboxes: tuple[str, ...] = ()  # where programs of the policy would run here
    memory: tuple[MemoryUse, ...] = ()  # of one run of each condition, where it is known
    cost: CostForecast | None = None  # None while prices, or the tokens of a step, are not known
    budget_usd: float | None = None  # at which the campaign stops
    prices: Mapping[str, Price] = field(default_factory=dict)  # by model; only those that are known
    cost_at_most: MostCost | None = None  # with completions as long as they may be; None if not known
    cost_unknown: str = ""  # why it is None, where a price is known or needed
    search: tuple[str, ...] = ()  # with `[campaign.search]`, what runs how far
    may_stop_earlier: bool = False  # a search drops conditions, `[decision]` ends once it has decided
    warm_ups: int = 0  # trained once for all runs of a seed that start alike
    evaluations_at_start: int = 0  # made before the first step, once for all runs of a seed that start alike
    expected_seeds: tuple[ExpectedSeeds, ...] = ()  # with `[decision]`, for differences that may be
    questions: FurtherQuestions | None = None  # with `[decision] max_questions`
    designs: Designs | None = None  # with `[decision]` and earlier runs: what it could compare instead
    devices: DeviceSplits | None = None  # other ways to share them among runs; None if nothing is known
    values: tuple[ValueOrigin, ...] = ()  # of a file that extends others


def explain_plan(
    plan: Plan,
    checked: Checked,
    history: History | None,
    cores: float,
    file_name: str,
    *,
    learned_from: str = "",
    budget_s: float | None = None,
    sets_max_tokens: bool = True,
    fixed: Collection[str] = (),
    script: str = "",
    free_memory: Callable[[str], int | None] = lambda _: None,
) -> Explanation:
    """Describe a plan.

    Args:
        checked: what `preflight` found out.
        history: earlier runs, read from `learned_from` (the plan's log directory if empty); None if unknown.
        cores: CPU cores available on this machine.
        budget_s: longest acceptable wall time; None if not given.
        fixed: keys that `--set` cannot change.
        script: what the launcher would submit, if anything.
        free_memory: device (cpu or cuda) -> bytes that are free, None if not known.
    """
    first, costly = plan.first_runs, plan  # costly: the runs that may be needed, each as far as it may go
    if plan.campaign.search is not None:
        from retrain.plan.search import most_runs  # not at the top: few campaigns search

        costly = replace(plan, runs=most_runs(plan, plan.campaign.search))
    learned_from = learned_from or shlex.quote(str(plan.log_dir))
    earlier = Path(shlex.split(learned_from)[0])
    time, cost, devices, further = _forecast(plan, costly, history, cores, earlier, free_memory)
    configs = [run.config for run in first.values()]
    sandboxes = sandboxes_of(configs)
    memory = tuple(
        MemoryUse(name, use.device, use.peak, use.smallest, free_memory(use.device), use.parts())
        for name, use in checked.memory.items()
    )
    decisions = Decisions(plan, checked.longest_answers, time, cores, file_name, learned_from, fixed)
    seeds: tuple[ExpectedSeeds, ...] = ()
    warnings = list(_warnings(plan, checked, sandboxes, memory, cost, history, file_name))
    if plan.decision is not None:
        from retrain.plan.expected_seeds import Most, ends_too_early, expected_seeds  # imports numpy

        most = Most(costly, time.p50_s if time else None, cost.p50_usd if cost else None)
        seeds = expected_seeds(most, plan.decision, earlier)
        warnings += filter(None, [ends_too_early(most, plan.decision)])
    return Explanation(
        name=plan.name,
        conditions=tuple(_condition(run, plan, first[plan.conditions[0]]) for run in first.values()),
        total_runs=len(costly.runs),
        total_campaign_steps=costly.total_steps,
        effective_parallelism=plan.workers,
        permits=plan.permits,
        permits_adapt=plan.permits_adapt and not (time and time.permits_stay),
        launcher=plan.campaign.launcher,
        log_dir=str(plan.log_dir),
        wall_time=time,
        unknown=() if time is not None else UNKNOWN,
        pilot_command=decisions.pilot_command,
        warnings=tuple(warnings),
        checklist=decisions.checklist(budget_s, sets_max_tokens=sets_max_tokens),
        script=script,
        sandboxes=tuple(sandboxes),
        memory=memory,
        cost=cost,
        devices=devices,
        budget_usd=plan.runs[0].config.budget.usd,
        prices={priced_as(config): price for config in configs if (price := price_of(config)) is not None},
        cost_at_most=_most_cost(costly, checked),
        warm_ups=sum(plan.warm_ups.values()),
        evaluations_at_start=sum(sum(counts.values()) for counts in plan.evaluations_at_start.values()),
        cost_unknown="" if cost else _cost_unknown(plan),
        search=_search(plan),
        may_stop_earlier=plan.decision is not None or plan.campaign.search is not None,
        expected_seeds=seeds,
        questions=further,
    )


def _forecast(
    plan: Plan,
    costly: Plan,
    history: History | None,
    cores: float,
    earlier: Path,
    free_memory: Callable[[str], int | None],
) -> tuple[WallTime | None, CostForecast | None, DeviceSplits | None, FurtherQuestions | None]:
    """Return what the runs that may be needed will take, as far as earlier ones tell.

    Further questions of `[decision]` are in time and cost: as many as are expected, else the most.
    """
    time: WallTime | None = None
    cost: CostForecast | None = None
    further: FurtherQuestions | None = None
    if plan.decision is not None and plan.decision.max_questions is not None:
        from retrain.plan.designs import further_questions  # imports numpy

        further = further_questions(plan, earlier)
    if history is None:  # a plan alone needs no estimate
        return None, None, None, further
    from retrain.plan.estimate.devices import device_splits
    from retrain.plan.estimate.money import cost_forecast
    from retrain.plan.estimate.wall_time import learned_for, wall_time

    if (learned := learned_for(costly, history, cores)) is not None:
        if further is not None:
            learned = replace(learned, further=further.added(further.most, plan))
        time, cost = wall_time(costly, learned, cores), cost_forecast(costly, learned)
        if further is not None:
            further = replace(further, time_s=time.p50_s, cost_usd=cost.p50_usd if cost else None)
            if further.forecast < further.most:
                learned = replace(learned, further=further.added(further.forecast, plan))
                time, cost = wall_time(costly, learned, cores), cost_forecast(costly, learned)
    devices = device_splits(costly, history, cores, time.p50_s if time else None, free_memory)
    return time, cost, devices, further


def _warnings(
    plan: Plan,
    checked: Checked,
    sandboxes: Mapping[str, str],
    memory: Sequence[MemoryUse],
    cost: CostForecast | None,
    history: History | None,
    file_name: str,
) -> Iterator[str]:
    yield from notes_of(plan, checked)
    yield from sandbox_warnings([run.config for run in plan.first_runs.values()], sandboxes)
    for use in memory:
        together = use.peak_bytes * (plan.workers if use.device == "cpu" else 1)  # each GPU holds one
        if use.free_bytes is not None and together > use.free_bytes:
            yield (
                f"{use.condition}: {count_of(plan.workers, 'run')} at a time would take about "
                f"{gib(together)} of memory, and {gib(use.free_bytes)} are free: fewer workers, a smaller "
                "tokens_per_micro_batch or gradient_checkpointing take less"
            )
    budget_usd = plan.runs[0].config.budget.usd
    if cost is not None and budget_usd is not None and cost.p90_usd > budget_usd:
        yield (
            f"the campaign may cost {dollars(cost.p90_usd)} (P90; P50 {dollars(cost.p50_usd)}), more than "
            f"its budget of {dollars(budget_usd)}, at which it would stop"
        )
    pattern = f"{stem_of(plan.name)}-????????T??????Z-????"
    earlier = glob.iglob(pattern, root_dir=plan.log_dir)  # noqa: PTH207 - ignores a directory that cannot be
    if history is None and any(earlier):  # nothing was read from them
        command = f"retrain explain {file_name} --from {shlex.quote(str(plan.log_dir))}"
        yield f"{plan.log_dir}/ has earlier campaigns of {plan.name}; to estimate from them: {command}"


def _search(plan: Plan) -> tuple[str, ...]:
    """Return what a search runs, stage by stage."""
    if plan.campaign.search is None or plan.decision is None:
        return ()
    from retrain.plan.proposals import per_round, to_come  # not at the top: few campaigns search
    from retrain.plan.search import stages_of

    table = plan.campaign.search
    trials, seeds = to_come(table, ()), count_of(len(plan.search_seeds), "seed")
    stages = [
        f"{count_of(count, 'condition')} x {seeds} " + (f"to step {step}" if step else "to their ends")
        for count, step in stages_of(plan, table, trials)
    ]
    if trials:
        a_round = per_round(table, trials)
        stages.insert(0, f"{table.sampler} proposes {count_of(trials, 'condition')}, {a_round} at a time")
    fresh = f"{plan.first_seeds} to {plan.decision.max_seeds} fresh seeds, which decide"
    return (*stages, f"winner and {plan.reference}: {fresh}")


def _most_cost(plan: Plan, checked: Checked) -> MostCost | None:
    if not checked.readings:
        return None
    from retrain.plan.most_cost import most_cost  # not at the top: few files have prices

    return most_cost(plan, checked.readings)


def _cost_unknown(plan: Plan) -> str:
    """Return why a plan's cost is not known; "" if nothing in it has a price or is billed by an API."""
    configs = [run.config for run in plan.first_runs.values()]
    unknown = sorted({priced_as(config) for config in configs if price_of(config) is None})
    if not unknown:
        from retrain.plan.most_cost import why_unbounded  # not at the top: few files have prices

        return why_unbounded(plan) or "no earlier run of these conditions has counted its tokens"
    tables = [config.backend for config in configs]
    is_billed = any(registry.ask("backends", table.backend, "bills", table.options) for table in tables)
    some_known = len(unknown) < len({priced_as(config) for config in configs})
    return "; ".join(map(unpriced, unknown)) if is_billed or some_known else ""


def _condition(run: RunPlan, plan: Plan, base: RunPlan) -> ConditionPlan:
    training, in_name = run.config.training, swept_keys(plan.campaign.sweep)  # whose values its name has
    sections = [
        (section, vars(getattr(run.config, section)), vars(getattr(base.config, section)))
        for section in RUN_SECTIONS
    ]
    return ConditionPlan(
        condition=run.condition,
        seeds=plan.search_seeds or plan.seeds,
        max_steps=run.max_steps,
        batch_size=training.batch_size,
        group_size=training.group_size,
        concurrency=training.batch_size * training.group_size,
        max_tokens=training.max_tokens,
        backend=run.config.backend.backend,
        task=run.config.data.tasks,
        differs=tuple(
            f"{section}.{key} = {quote(plain_value(value))}"
            for section, ours, theirs in sections
            for key, value in ours.items()
            if value != theirs[key] and f"{section}.{key}" not in in_name
        ),
        teacher=", ".join(teachers_of(run.config)),
        adapter=run.config.model.adapter,
        sources=tuple(_source_shares(run.config)),
    )


def _source_shares(config: Config) -> Iterator[SourceShares]:
    """Iterate over the spans of steps in which the same sources are active."""
    sources, last = config.data.source, config.last_step
    starts = {source.from_step for source in sources}
    starts |= {source.until_step + 1 for source in sources if source.until_step is not None}
    begins = sorted(step for step in starts if step <= last)
    for first, after in pairwise([*begins, last + 1]):
        weights = {source.label: source.weight for source in sources if source.is_active(first)}
        each = config.training.batch_size / math.fsum(weights.values())
        yield SourceShares(first, after - 1, {name: each * weight for name, weight in weights.items()})


@dataclass(frozen=True)
class Decisions:
    """The data that the answers are based on."""

    plan: Plan
    longest_answers: Mapping[str, int]  # characters, by condition
    time: WallTime | None
    cores: float
    file_name: str
    learned_from: str  # the argument of --from
    fixed: Collection[str] = ()  # keys that --set cannot change

    def checklist(self, budget_s: float | None, *, sets_max_tokens: bool) -> tuple[ChecklistLine, ...]:
        max_tokens = self._max_tokens(sets_max_tokens)
        if self._is_calibrated and max_tokens[2] == self._calibrate:
            max_tokens = "pass", f"{max_tokens[1]}; as calibrated", ""
        return (
            ChecklistLine("smoke test or full run", *self._smoke_or_full()),
            ChecklistLine("max_tokens set on purpose", *max_tokens),
            ChecklistLine("parallelism within limits", *self._parallelism()),
            ChecklistLine("pilot confirms throughput", *self._throughput()),
            ChecklistLine("wall time acceptable", *self._wall_time(budget_s)),
        )

    def _smoke_or_full(self) -> Answer:
        configs = [run.config for run in self.plan.first_runs.values()]
        runs = [config.training for config in configs]
        is_small = all(run.batch_size <= SMOKE_BATCH and run.group_size <= SMOKE_GROUP for run in runs)
        if is_small and all(run.max_tokens <= SMOKE_TOKENS for run in runs):
            return "pass", "smoke test: at most 2 x 8 rollouts of 1024 tokens per step", ""
        least = [config.backpressure.min_batch_size for config in configs if config.backpressure.enabled]
        smoke = {  # as small as the other keys allow
            "training.batch_size": max(SMOKE_BATCH, *(run.minibatches for run in runs), *least),
            "training.group_size": SMOKE_GROUP,
            "training.max_tokens": min(SMOKE_TOKENS, *(run.max_tokens for run in runs)),
            **short_run(self.plan, SMOKE_STEPS),
        }
        command = f"retrain {self.file_name}{_options(smoke, self.fixed)}"
        if self.time is None:
            return "unknown", "full run; no earlier run is known", command
        if never := [summary.condition for summary in self.time.conditions if not summary.is_finished]:
            return "warn", f"full run, but {first_of(never, 3)} never finished a run", command
        return "pass", "full run; every condition has finished a run before", ""

    @property
    def pilot_command(self) -> str:
        """The command that measures what is unknown."""
        if steps_key(self.plan) in self.fixed:
            return self._calibrate
        shorter = f"retrain {self.file_name}{_options(short_run(self.plan, PILOT_STEPS))}"
        logs = shlex.quote(str(self.plan.log_dir))
        return f"{shorter} && retrain explain {self.file_name} --from {logs}"

    @property
    def _is_calibrated(self) -> bool:
        """Whether the earlier runs are those of `retrain calibrate`, which has judged what it can."""
        return CALIBRATIONS in PurePath(self.learned_from).parts

    @property
    def _calibrate(self) -> str:
        return f"retrain calibrate {self.file_name}"

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
            characters = f"{self.longest_answers[short]} characters"
            answer = f"{limits[short]}; the longest answer of {short} has {characters}"
            return "warn", answer, "" if "training.max_tokens" in self.fixed else longer
        if need and allowed > GENEROUS * (need + 1):
            return "warn", f"{allowed}; the longest answer has {need} characters", self._calibrate
        return self._cut_off(allowed, least, need)

    def _cut_off(self, allowed: int, least: int, need: int) -> Answer:
        """Judge limits of tokens by how often earlier runs hit them."""
        summaries = self.time.conditions if self.time else ()
        rates = {summary.condition: summary.max_token_hit_rate or 0.0 for summary in summaries}
        if not rates:
            return "pass", f"{allowed}; no earlier run shows how often completions are cut off", ""
        condition, rate = max(rates.items(), key=lambda item: item[1])
        if rate <= OFTEN_CUT:
            return "pass", f"{allowed}; at most {rate:.1%} of completions are cut off", ""
        run = self.plan.first_runs[condition]
        if plays_episodes(run.config):  # a limit may be that of turns
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
        use = self.plan.device_use
        if use is not None and use.count > 1:
            each = f"{workers} at a time x {count_of(use.count, use.kind)}, of {use.there}"
            if workers * use.count <= use.there:
                return "pass", each, ""
            most, fewer = use.there // use.count, f"backend.options.devices={use.there}"
            change = f"campaign.max_workers={most}" if most else fewer
            command = f"retrain explain {self.file_name} --set {change}"
            return "warn", f"{each}: steps will be slower than measured alone", command
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
        summaries = self.time.conditions
        others = []
        for summary in summaries:
            is_as_advised = all(change.startswith(CALIBRATED) for change in summary.differs)
            adopts = summary.match == "other settings" and self._is_calibrated and is_as_advised
            if summary.match != "same" and not adopts:
                others.append(summary.condition)
        if others:
            return "warn", f"not measured with these settings: {first_of(others, 3)}", self.pilot_command
        # each run's first step counts as start-up
        needed = min(PILOT_STEPS, _longest(self.plan))
        if few := [summary.condition for summary in summaries if summary.steps < needed - summary.runs]:
            return "warn", f"fewer than {needed} steps of {first_of(few, 3)}", self.pilot_command
        if self.time.tail == "heavy":
            return "warn", self.time.notes[0], self.pilot_command
        answer = f"{self.time.measured_steps} steps of {count_of(self.time.measured_runs, 'run')}"
        if changes := dict.fromkeys(change for summary in summaries for change in summary.differs):
            answer += f", calibrated with {'; '.join(changes)}"
        return "pass", answer, ""

    def _wall_time(self, budget_s: float | None) -> Answer:
        if self.time is None:
            return "unknown", "no step time is known", self.pilot_command
        answer = f"P50 {about(self.time.p50_s)}, P90 {about(self.time.p90_s)}"
        if budget_s is None:
            return "unknown", f"{answer}; no time budget was given", f"{self._explain} --budget 6h"
        answer += f" of {about(budget_s)}"
        if self.time.p90_s <= budget_s:
            return "pass", answer, ""
        shorter = _first_options(self.time.changes)
        return "warn", answer, f"{self._explain}{shorter} --budget {budget_s:g}s" if shorter else ""

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


def short_run(plan: Plan, most: int) -> dict[str, object]:
    """Return the settings of a short run: at most so many steps, but more than to the last rung of a search.

    Where `[decision]` compares what such a run may not come to, its last steps are compared instead.
    """
    search, table = plan.campaign.search, plan.decision
    steps = max(min(most, _longest(plan)), search.rungs[-1] + 1 if search and search.rungs else 0)
    settings: dict[str, object] = {steps_key(plan): steps}
    if table is not None:
        ends = [*table.rungs, *(bound for bound in table.over if not isinstance(bound, str))]
        if table.per != STEPS or max(ends, default=0) > steps:
            last = {"over": LAST, "per": STEPS, "rungs": [], "finish": False}
            other = {key: value for key, value in last.items() if getattr(table, key) != value}
            settings |= {f"decision.{key}": str(value).lower() for key, value in other.items()}
    return settings


def _options(settings: Mapping[str, object], fixed: Collection[str] = ()) -> str:
    """Return settings as command-line options."""
    sets = (shlex.quote(f"{key}={value}") for key, value in settings.items() if key not in fixed)
    return "".join(f" --set {each}" for each in sets)


def _longest(plan: Plan) -> int:
    return max((run.max_steps for run in plan.runs), default=PILOT_STEPS)
