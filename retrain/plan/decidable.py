"""The test of a campaign with `[decision]`: whether it can decide anything, and what a look at it found."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from retrain.base.errors import Problem
from retrain.base.registry import hint
from retrain.config.keys import quote
from retrain.config.prices import price_of, priced_as, unpriced
from retrain.config.resolve import by_source, label_of
from retrain.config.schema import NO_REWARD, Config, DecisionSection
from retrain.control.rules.student import half_width
from retrain.plan.matrix import ENOUGH_SEEDS, Plan
from retrain.records.decision import HELD_OUT, ConditionDecision, evaluation_of
from retrain.records.row_parts import Evaluation, NamedEvaluation, keys_of
from retrain.records.step_row import EpisodeSummary, RolloutSummary, Timing, UpdateSummary
from retrain.records.text import count_of, parse_duration
from retrain.records.windows import AXES, STEPS, amount

if TYPE_CHECKING:
    from retrain.control.rules.sequential import Look, SequentialComparison

FOUND = ("better", "worse")
REWARDED = ("mean_reward", "reward_std", "correct_rate")  # null in each row of a run without a reward
UNDECIDING = ("_se", "prompts", "batch_size", "group_size", "lr", "updates")  # settings, and errors of others


def decision_problems(table: DecisionSection, plan: Plan, seeds: int) -> Iterator[Problem]:
    """Iterate over the problems of `[decision]`, in a file with so many seeds."""
    configs = {name: run.config for name, run in plan.first_runs.items()}
    if len(configs) < 2 and not plan.search_seeds:  # a search checks its conditions itself
        what = "compares conditions, and there is one; add a [[campaign.conditions]], or remove the table"
        yield Problem((), what)
    if table.reference and table.reference not in {*configs, *map(label_of, configs)}:
        others = hint(table.reference, list(configs), f"there are {', '.join(configs)}")
        yield Problem(("reference",), f"no condition is named {quote(table.reference)}; {others}")
    if seeds > table.max_seeds and not plan.search_seeds:  # its seeds decide nothing
        what = f"got {table.max_seeds}, but campaign.seeds has {seeds}; raise it, or list fewer"
        yield Problem(("max_seeds",), what)
    if problem := unmeasured(table.metric, configs):
        yield Problem(("metric",), problem)
    if table.budget:
        try:
            parse_duration(table.budget)
        except ValueError as error:
            yield Problem(("budget",), f"{error}; without it there is no limit")
    yield from _window_problems(table, configs)
    if table.max_questions is not None:
        yield from _question_problems(table, plan, configs)
    if table.budget_usd is not None:
        unknown = {priced_as(config) for config in configs.values() if price_of(config) is None}
        yield from (Problem(("budget_usd",), unpriced(name)) for name in sorted(unknown))


def _question_problems(
    table: DecisionSection, plan: Plan, configs: Mapping[str, Config]
) -> Iterator[Problem]:
    """Iterate over the reasons why no further questions can be asked; those of the data: the preflight."""
    name, at, got = evaluation_of(table.metric), ("max_questions",), f"got {table.max_questions}"
    if plan.search_seeds:
        yield Problem(at, f"{got}; a search asks no further questions: remove it, or [campaign.search]")
        return
    asking = {
        c: [one.prompts for one in config.eval.tables if one.name == name] for c, config in configs.items()
    }
    if not all(asking.values()):
        what = f"{got}; {quote(table.metric)} is of no [[eval]] with a record of questions: decide by its"
        yield Problem(at, f"{what} eval_NAME_reward or eval_NAME_correct_rate, or remove it")
        return
    if len({prompts for (prompts,) in asking.values()}) > 1:
        what = f"{got}; conditions have different numbers of prompts in {quote(name)}: give them the same"
        yield Problem(at, what)
    if table.rungs or table.over != "last" or table.per != STEPS:
        key = "rungs" if table.rungs else "per" if table.per != STEPS else "over"
        what = f"{got}; further questions are asked at a run's end only: remove it, or {key}"
        yield Problem(at, what)
    if table.max_seeds < ENOUGH_SEEDS:
        what = f"{got}; {ENOUGH_SEEDS} seeds tell how many are needed, and max_seeds is {table.max_seeds}"
        yield Problem(at, f"{what}; raise it, or remove max_questions")


def _window_problems(table: DecisionSection, configs: Mapping[str, Config]) -> Iterator[Problem]:
    """Iterate over the problems of what is compared."""
    unit, over, rungs = AXES[table.per].unit, table.over, table.rungs
    amounts = "whole numbers" if table.per == STEPS else "amounts"
    given = [*([] if isinstance(over, str) else over), *rungs]
    is_whole = table.per != STEPS or all(value == int(value) for value in given if math.isfinite(value))
    if isinstance(over, str) and table.per != STEPS and not rungs:
        what = f'got {quote(over)}; with per = "{table.per}" needs [from, to], as runs end at other amounts'
        yield Problem(("over",), what)
        return
    start, end = (0, math.inf) if isinstance(over, str) else over if len(over) == 2 else (0, 0)
    if not 0 <= start < end or (not isinstance(over, str) and not (end < math.inf and is_whole)):
        least = "" if start >= 0 else ", none below 0"
        what = f"got {_as_written(over)}; needs two {amounts} of {unit}, the smaller one first{least}"
        yield Problem(("over",), what)
        return
    rises = sorted(set(rungs)) == rungs and all(start < rung < math.inf for rung in rungs)
    if not rises or (rungs and not is_whole):
        after = f" after {amount(start)}, where `over` begins" if start else ""
        what = f"got {_as_written(rungs)}; needs {amounts} of {unit} in ascending order, each once{after}"
        yield Problem(("rungs",), what)
        return
    if rungs and rungs[-1] != end < math.inf:
        what = f"ends at {amount(rungs[-1])}, and `over` at {amount(end)}; needs the same end"
        yield Problem(("rungs",), what)
        return
    if rungs and table.allocate == "auto":
        what = 'got "auto"; with rungs needs "equal": runs that end early save more than an order of seeds'
        yield Problem(("allocate",), what)
    if table.finish == "reference and winner" and not rungs:
        what = f"got {quote(table.finish)}; needs rungs, at which runs wait for verdicts, or true or false"
        yield Problem(("finish",), what)
    if given:
        yield from _too_far("rungs" if rungs else "over", table.per, given[-1], configs)
    if given and table.metric.startswith(HELD_OUT) and (table.finish or rungs):
        yield from _late_evaluations(table, configs, (rungs or given)[0])
    if table.per == "usd":
        unknown = {priced_as(config) for config in configs.values() if price_of(config) is None}
        yield from (Problem(("per",), unpriced(name)) for name in sorted(unknown))


def _as_written(values: str | Sequence[float]) -> str:
    """Return a list as a file has it: numbers that are whole without a point."""
    if isinstance(values, str):
        return quote(values)
    return f"[{', '.join(f'{value:.15g}' for value in values)}]"


def _too_far(key: str, per: str, end: float, configs: Mapping[str, Config]) -> Iterator[Problem]:
    """Name a condition whose runs end before a window does, where that is known beforehand."""
    if per not in (STEPS, "rollouts", "tokens"):
        return
    mosts = {}
    for name, config in configs.items():
        training, pressure = config.training, config.backpressure
        prompts = max(training.batch_size, pressure.max_batch_size if pressure.enabled else 0)
        a_step = {STEPS: 1, "rollouts": prompts * training.group_size * (1 + config.data.most_refill)}
        a_step["tokens"] = a_step["rollouts"] * training.max_tokens
        mosts[name] = training.max_steps * a_step[per]
    short = min(mosts, key=mosts.__getitem__)
    if end > mosts[short]:
        most = f"{short} has {'at most ' if per != STEPS else ''}{amount(mosts[short])} {AXES[per].unit}"
        yield Problem((key,), f"got {amount(end)}, but {most}; end before, or raise its max_steps")


def _late_evaluations(table: DecisionSection, configs: Mapping[str, Config], end: float) -> Iterator[Problem]:
    """Name a condition that makes no evaluation until there, as its runs go on."""
    key = "rungs" if table.rungs else "finish"
    for name, config in configs.items():
        named = [
            each.every for each in config.eval.tables if table.metric.startswith(f"{HELD_OUT}{each.name}_")
        ]
        every = (*named, config.training.eval_every)[0]
        if not every or (table.per == STEPS and every > end):
            when = f"every {every} steps" if every else "only at its end"
            where = f"the rung at {amount(end)}" if table.rungs else "the window"
            instead = "" if table.rungs else ", or have runs end there (finish = false)"
            yield Problem((key,), f"{name} evaluates {when}, past {where}; evaluate more often{instead}")
            return


def unmeasured(metric: str, configs: Mapping[str, Config]) -> str:
    """Return why a metric decides nothing, by the first condition that does not measure it; "" if all do."""
    for condition, config in configs.items():
        metrics = _metrics_of(config)
        if metric not in metrics:
            others = hint(metric, metrics, f"there are {', '.join(metrics)}")
            return f"no row of {condition} will have {quote(metric)}; {others}"
    return ""


def _metrics_of(config: Config) -> tuple[str, ...]:
    """List the numbers that all runs of a configuration measure and that may decide."""
    parts: list[Any] = [RolloutSummary, Timing, UpdateSummary]
    if has_reward := config.reward.reward != NO_REWARD:
        parts.insert(0, Evaluation)
    if config.environment.environment != "single_turn":
        parts.append(EpisodeSummary)
    always = [key for part in parts for key in _numbers_of(part)]
    if all(own.reward.reward == NO_REWARD for own in by_source(config).values()):
        always = [key for key in always if key not in REWARDED]
    counts = {f"eval_{table.name}_": table.samples for table in config.eval.tables}
    named = [key.replace("eval_NAME_", name) for name in counts for key in _numbers_of(NamedEvaluation)]
    if has_reward:
        counts = {HELD_OUT: config.data.eval_samples, **counts}
    pass_at = [f"{name}pass_at_{k}" for name, count in counts.items() if count > 1 for k in (1, count)]
    return tuple(dict.fromkeys(key for key in (*named, *always, *pass_at) if not key.endswith(UNDECIDING)))


@cache  # a campaign may have thousands of conditions
def _numbers_of(part: Any) -> tuple[str, ...]:
    """Return the keys of a part of a row whose values are single numbers."""
    hints = get_type_hints(part).items()
    kinds = {name: get_args(hint) or (hint,) for name, hint in hints if get_origin(hint) is not Mapping}
    keys = ((key, kinds.get(name, ())) for name, key, is_optional, _ in keys_of(part) if not is_optional)
    return tuple(key for key, several in keys if float in several or int in several)


def comparison_of(table: DecisionSection, conditions: int) -> SequentialComparison:
    """Return the test that a table asks for, of so many conditions with the reference among them."""
    from retrain.control.rules.sequential import SequentialComparison  # not at the top: imports numpy

    is_early, smallest = table.allocate == "auto", table.smallest_difference
    comparisons = (conditions - 1) * max(1, len(table.rungs))
    return SequentialComparison(table.max_seeds, table.error, smallest, comparisons, is_early)


def undecidable(plan: Plan) -> str:
    """Return why `[decision]` will find no difference, whatever is measured; "" if it may."""
    if plan.decision is None:
        return ""
    table, others = plan.decision, len(plan.conditions) - 1
    if plan.search_seeds or table.allocate == "auto":  # one may have nearly all of the error
        others = 1
    comparison = comparison_of(table, others + 1)
    if comparison.can_find:
        return ""
    enough = max(comparison.fewest_seeds, table.max_seeds)
    would = f"max_seeds = {enough}" if replace(comparison, max_seeds=enough).can_find else "a larger error"
    return (
        f"max_seeds = {table.max_seeds} finds no difference at error = {table.error:g} with "
        f"{count_of(comparison.comparisons, 'comparison')}: that all seeds differ in one direction is "
        f"likelier by chance; {would} may find one"
    )


@dataclass(frozen=True)
class Finding:
    """A look at a condition; described only where it is needed, as an interval takes a hundred looks."""

    condition: str
    verdict: str
    pairs: Sequence[tuple[float, float]]
    look: Look | None  # None: too few pairs
    planned: SequentialComparison  # with the error that is sure for each condition
    reason: str = ""  # why it gets no more seeds although some are left
    rung: float = 0.0  # to which it is about; 0: the whole window
    is_passed: bool = False  # the next rung is looked at

    def described(self) -> ConditionDecision:
        """Return the verdict with its interval.

        The interval has the error that each condition has from the first: it holds for all at once. Holm's
        procedure may find a difference whose sign that interval leaves open; the sign is certain then.
        """
        if self.look is None:
            return ConditionDecision(
                self.condition, self.verdict, len(self.pairs), reason=self.reason, rung=self.rung
            )
        sides, differences = zip(*self.pairs, strict=True), [a - b for a, b in self.pairs]
        alone = math.fsum(map(statistics.variance, sides))
        removed = 1 - statistics.variance(differences) / alone if alone > 0 else None
        low, high = replace(self.look, comparison=self.planned).interval
        alone_low = alone_high = None
        if not math.isfinite(low) or not math.isfinite(high):
            # Student's interval of these seeds, as if they had been planned for this condition alone
            middle, half = statistics.fmean(differences), half_width(differences, self.planned.error)
            if math.isfinite(half):
                alone_low, alone_high = middle - half, middle + half
        if self.look.verdict in FOUND:
            low, high = (max(low, 0.0), high) if self.look.difference > 0 else (low, min(high, 0.0))
        return ConditionDecision(
            self.condition,
            self.verdict,
            self.look.seeds,
            self.look.difference,
            low if math.isfinite(low) else None,
            high if math.isfinite(high) else None,
            min(1.0, self.look.p_value * self.planned.error / self.look.comparison.error),
            removed,
            self.reason,
            alone_low,
            alone_high,
            self.rung,
        )
