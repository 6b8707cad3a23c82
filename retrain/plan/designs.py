"""Which `[decision]` would find a difference for the least, by the runs of earlier campaigns.

A design is a window, or rungs, over which runs are compared. The differences of earlier pairs over a window
tell its spread. Campaigns are simulated with the rounds, looks and rungs of real ones: the differences of
their seeds are drawn from a normal distribution with the variances of earlier pairs, their correlations
between rungs, and the uncertainty of both. Where less had been learned than in the file's own window,
differences are as much smaller, and where more had been, larger: else the cheapest design would be to look
where nothing has happened yet. Recommended is only what answers the file's own question, or one whose answers
went with those at the end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from retrain.base.rollouts import Floats
from retrain.config.keys import Over, quote
from retrain.config.schema import DecisionSection, EvalSection
from retrain.control.rules.crossed import variance_components
from retrain.control.rules.sequential import fewest_seeds
from retrain.control.rules.student import NORMAL, t_quantile
from retrain.plan.decidable import FOUND, decision_problems
from retrain.plan.decision import Walk
from retrain.plan.expected_seeds import comparisons_simulated, simulated
from retrain.plan.matrix import Plan
from retrain.plan.past import Past, drawn_differences, past_if_any, past_runs, spread_of
from retrain.plan.preflight import Parts
from retrain.plan.question_noise import chosen_questions, paired_gains, question_means, question_noise
from retrain.records.decision import HELD_OUT, LAST_PART, QuestionNoise, Questions, evaluation_of
from retrain.records.lines import number_in
from retrain.records.text import count_of
from retrain.records.windows import AXES, STEPS, Window, amount, read_window

ENOUGH = 6  # seeds of history; of fewer, a spread is known to a factor of 3 at best
POWER = 0.8
EARLY = (0.25, 0.5)  # of a run
QUESTIONS = (1, 2, 4)  # times those of the history
LEVEL = 0.95
BOUND = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True)
class DesignForecast:
    """One design and what it is expected to find and to cost; all whole runs with all seeds cost 1."""

    design: str  # the window or the rungs, in words
    keys: Mapping[str, object]  # of `[decision]`
    pairs: int  # of earlier differences
    spread: float  # standard deviation of a paired difference over the whole of it
    spread_low: float  # 95 % interval, if differences are normal
    spread_high: float
    seen: float | None  # mean difference of the condition farthest from the reference; null without pairs
    finds: float | None  # smallest difference that is found in 80 % of campaigns; null: none is ever found
    difference: float  # that the forecast is for: in proportion to what had been learned there
    power: float  # share of conditions found that are off by `difference`
    cost_equal: float  # on average, if no condition differs
    cost_off: float  # if each is off by `difference`
    cost_p90: float  # 90th percentile, over both cases
    time_s: float | None = None  # on average over both; null while no step time is known
    cost_usd: float | None = None


@dataclass(frozen=True)
class Agreement:
    """How differences over early steps agree with those over the last tenth, of the same seeds."""

    early: str  # window, in words
    pairs: int
    correlation: float | None  # Pearson's; null of fewer than six seeds, or without any spread
    low: float | None  # its 95 % interval (Fisher 1915)
    high: float | None
    flips: int  # pairs whose difference changes its sign


@dataclass(frozen=True)
class QuestionForecast:
    """What the file's own design finds and costs with so many questions in each evaluation that it compares.

    Costs have the completions of further questions, each counted as one of training.
    """

    questions: int
    spread: float  # standard deviation of a paired difference
    finds: float | None  # smallest difference that is found in 80 % of campaigns; null: none is ever found
    power: float  # this and the next three as of a `DesignForecast`
    cost_equal: float
    cost_off: float
    cost_p90: float


@dataclass(frozen=True)
class Designs:
    """What earlier campaigns tell of designs."""

    metric: str
    difference: float  # that is to be found by the file's own design
    seeds: int  # of history, in its condition with the most pairs
    designs: tuple[DesignForecast, ...]  # the file's own first
    recommended: Mapping[str, object] = field(default_factory=dict)  # keys of `[decision]`; empty: none
    agreements: tuple[Agreement, ...] = ()
    questions: tuple[QuestionForecast, ...] = ()  # of a named evaluation, first with those of the history
    questions_at: str = "the end"  # or "each evaluation", where those on the way are compared too
    noise: QuestionNoise | None = None  # of that evaluation
    notes: tuple[str, ...] = ()  # what is not known, and what the figures rest on
    simulated: int = 0  # campaigns, of each design


@dataclass(frozen=True)
class Candidate:
    """A design that may be chosen."""

    name: str
    table: DecisionSection
    windows: tuple[Window, ...]  # one, or that of each rung
    scale: float = 1.0  # of the spread, by more questions than earlier runs were asked

    @property
    def at_end(self) -> bool:
        """Whether it compares what runs are at their end, and nowhere else."""
        return not self.table.rungs and read_window(self.table.per, self.table.over) == LAST_PART


@dataclass(frozen=True, eq=False)
class Outcomes:
    """A forecast, and the simulated campaigns that it is the mean of, each of shape (campaigns,)."""

    candidate: Candidate
    forecast: DesignForecast
    found: Floats  # share of conditions
    cost: Floats  # on average over equal and differing conditions

    def loses_to(self, own: Outcomes) -> bool:
        """Whether it finds less than the file's own, or saves nothing, as far as the simulation tells."""
        power, saving = own.found - self.found, own.cost - self.cost
        return mean_lies_above(power, 1.0) or not mean_lies_above(saving, BOUND)


def plan_designs(
    plan: Plan, logs: Path, *, time_s: float | None = None, cost_usd: float | None = None
) -> Designs | None:
    """Return what designs of a file's `[decision]` would find and cost; None without that table.

    Args:
        time_s, cost_usd: forecasts of all runs of the plan.
    """
    table, notes = plan.decision, list[str]()
    if table is None:
        return None
    if plan.search_seeds:
        return Designs(table.metric, 0.0, 0, (), notes=("designs of a search are not planned",))
    past = Past(past_runs(logs, plan, notes), table.metric, plan.reference)
    end = _end(plan, table)
    candidates = list(_candidates(plan, table, end))
    window = LAST_PART if candidates[0].at_end else candidates[0].windows[-1]
    means = {key: question_means(run.files, past.metric, window=window) for key, run in past.runs.items()}
    gains_by_question = paired_gains(means, past.reference)
    candidates = with_questions(candidates, plan, gains_by_question)
    own, seeds = candidates[0], past.seeds(candidates[0].windows[-1])
    unknown = {candidate.name: _why_unknown(past, candidate, end) for candidate in candidates}
    if unknown[own.name]:
        notes.append(f"{own.name}: {unknown[own.name]}; no design is known")
        return Designs(table.metric, 0.0, seeds, (), notes=tuple(notes))
    notes += [f"{name}: {why}" for name, why in unknown.items() if why]
    if not past.differences(own.windows[-1]):
        notes.append(
            f"no seed has both {plan.reference} and another condition: the spread is that of independent runs"
        )
    spread = spread_of(past.residuals(own.windows)[0])
    difference = table.smallest_difference or spread
    if table.smallest_difference is None:
        notes.append(
            f"without smallest_difference, the forecasts are for {difference:.3g}, 1 SD of {own.name}; set it"
        )
    share = len(plan.runs) * end / plan.total_steps if table.per == STEPS else 1.0
    whole = (time_s and time_s * share, cost_usd and cost_usd * share)
    outcomes = list[Outcomes]()
    for candidate in candidates:
        if unknown[candidate.name]:
            continue
        off = [difference * share for share in past.shares(candidate.windows, own.windows[-1])]
        if candidate.windows[-1] == own.windows[-1]:
            off[-1] = difference
        elif off[-1] == 0:
            notes.append(f"{candidate.name}: runs are no better there than at their start")
            continue
        elif table.smallest_difference is not None:
            matters = replace(candidate.table, smallest_difference=float(f"{off[-1]:.2g}"))
            candidate = replace(candidate, table=matters)
        outcomes.append(_outcomes(plan, past, candidate, off, end, whole))
    agreements = tuple(_agreements(past, table.per, end))
    off = [difference * share for share in past.shares(own.windows[:-1], own.windows[-1])] + [difference]
    questions = tuple(_question_forecasts(plan, past, own, gains_by_question, off, end))
    return Designs(
        table.metric,
        difference,
        seeds,
        tuple(each.forecast for each in outcomes),
        _recommended(outcomes, agreements, end, seeds, notes),
        agreements,
        questions,
        "the end" if own.at_end else "each evaluation",
        question_noise(gains_by_question),
        tuple(notes),
        comparisons_simulated(len(plan.conditions) - 1),
    )


def _end(plan: Plan, table: DecisionSection) -> float:
    """Return how far a whole run goes; on an axis of what is spent, as far as the file compares."""
    if table.per == STEPS:
        return min(run.config.training.max_steps for run in plan.first_runs.values())
    return (table.rungs or [float(bound) for bound in table.over if not isinstance(bound, str)])[-1]


def _parts(end: float, per: str, shares: Sequence[float]) -> list[float]:
    """Return where so large parts of a run end; a part of less than a step is none."""
    parts = {float(int(end * share)) if per == STEPS else end * share for share in shares}
    return sorted(parts - {0.0})


def _candidates(plan: Plan, table: DecisionSection, end: float) -> Iterator[Candidate]:
    """Iterate over the file's own design and others that the file allows."""
    is_steps = table.per == STEPS
    first = 1 if is_steps else 0
    parts = _parts(end, table.per, (*EARLY, 1))
    whole: Over = "whole" if is_steps else [first, end]
    overs: list[Over] = [[first, part] for part in parts[:-1] if part > first]
    without = replace(table, rungs=[], finish=table.finish is True)
    designs = [table, *(replace(without, over=over) for over in ("last", "whole", *overs))]
    ways = [table.over] if table.over == "last" else []  # rungs that end with the file's own question
    designs += [
        replace(table, over=over, rungs=rungs) for over in (*ways, whole) for rungs in (parts, parts[1:])
    ]
    names = set()
    for design in designs:
        window = read_window(design.per, design.over)
        stop = min(end, window.end or end)
        windows = tuple(replace(window, end=rung) for rung in design.rungs or [stop])
        name = str(replace(window, end=window.end if window.start is not None and not design.rungs else None))
        if design.rungs:
            rungs = f"rungs {', '.join(map(amount, design.rungs))}"
            name = f"last tenth at {rungs}" if design.over == "last" else f"{name}, {rungs}"
            name = rungs if design.over == whole else name
        if name not in names and (design is table or not any(decision_problems(design, plan, 0))):
            names.add(name)
            yield Candidate(name, design, windows)


@dataclass(frozen=True)
class FurtherQuestions:
    """How many questions of an `[[eval]]` runs may be asked at their ends, with `max_questions`."""

    evaluation: str
    asked: int  # on the way, and at the end where no more are needed
    most: int
    expected: int | None  # as earlier campaigns would choose; null: below six seeds of history
    time_s: float | None = None  # P50 of all runs with the most; null while no step time is known
    cost_usd: float | None = None

    def added(self, count: int, plan: Plan) -> dict[str, float]:
        """Return how many evaluations of its own size are added to a run on average, if so many are chosen.

        The first seeds are asked anew, as they have ended by then; the others are asked all at once.
        """
        anew = plan.first_seeds / len(plan.planned_seeds)
        times = 0.0 if count == self.asked else count / self.asked - 1 + anew
        return {f"{HELD_OUT}{self.evaluation}_": times}

    @property
    def forecast(self) -> int:
        """How many a forecast counts."""
        return self.most if self.expected is None else self.expected


def further_questions(plan: Plan, logs: Path) -> FurtherQuestions | None:
    """Return how many questions may be asked at the end; None without `max_questions`."""
    table = plan.decision
    if table is None or table.max_questions is None:
        return None
    name, config, parts = evaluation_of(table.metric), plan.runs[0].config, Parts()
    asked = next(len(parts.eval_prompts(each, config)) for each in config.eval.tables if each.name == name)
    past = past_if_any(logs, plan, table.metric).runs
    gains = paired_gains(
        {key: question_means(run.files, table.metric) for key, run in past.items()}, plan.reference
    )
    choice = None if gains is None else _choice(name, gains, table.max_questions)
    is_known = choice is not None and choice.share is not None
    expected = min(table.max_questions, max(asked, choice.count)) if choice is not None and is_known else None
    return FurtherQuestions(name, asked, table.max_questions, expected)


def _choice(name: str, gains: Floats, most: int) -> Questions:
    """Return how many questions a campaign with such differences, (seeds, questions), would choose."""
    equal = dict.fromkeys(range(gains.shape[1]), 0.0)
    seeds = [[dict(enumerate(each.tolist())), equal] for each in gains]
    return chosen_questions(name, seeds, gains.shape[1], most)


def with_questions(candidates: list[Candidate], plan: Plan, gains: Floats | None) -> list[Candidate]:
    """Return designs with one that asks more questions, where these are most of the noise; the file's first.

    Args:
        gains: earlier differences of shape (seeds, questions).
    """
    own = candidates[0]
    name, allowed = evaluation_of(own.table.metric), own.table.max_questions
    tables = [(one, run.config) for run in plan.first_runs.values() for one in run.config.eval.tables]
    tables = [(one, config) for one, config in tables if one.name == name]
    if gains is None or not tables:
        return candidates
    parts = Parts()
    asked = max(len(parts.eval_prompts(one, config)) for one, config in tables)
    there = min(len(parts.eval_prompts(replace(one, prompts=sys.maxsize), config)) for one, config in tables)
    most = min(there, allowed or there)
    count = _choice(name, gains, most).count
    table = replace(own.table, max_questions=allowed or count)
    if count <= max(asked, gains.shape[1]) or any(decision_problems(table, plan, 0)):
        return candidates
    components = variance_components(gains)
    before = components.of_a_seed(gains.shape[1])
    scale = math.sqrt(components.of_a_seed(count) / before) if before else 1.0
    if allowed:  # the campaign will ask them by itself
        return [replace(own, scale=scale), *candidates[1:]]
    return [own, Candidate(f"{own.name}, {count} questions", table, own.windows, scale), *candidates[1:]]


def _why_unknown(past: Past, candidate: Candidate, end: float) -> str:
    """Return why the spread of a design's differences is not known; empty if it is."""
    residuals, _ = past.residuals(candidate.windows)
    if not past.runs:
        return "there is no finished run of these conditions"
    last = candidate.windows[-1]
    if not past.values(last):
        has_metric = any(
            number_in(row, past.metric) is not None for run in past.runs.values() for row in run.rows
        )
        if has_metric:
            return f"earlier runs end before {amount(last.end or end)} {AXES[last.per].unit}"
        return f"no earlier run has {quote(past.metric)} there"
    if len(residuals) < 2:
        return f"no condition has two seeds; a pilot of {count_of(ENOUGH, 'seed')} shows their spread"
    return (
        "" if residuals.any(axis=0).all() else "seeds do not differ at all, so that its spread is not known"
    )


def _outcomes(
    plan: Plan,
    past: Past,
    candidate: Candidate,
    off: Sequence[float],
    end: float,
    whole: tuple[float | None, float | None],
) -> Outcomes:
    """Return what a design finds and costs, where conditions are off by so much at each of its windows."""
    table, others, seeds = candidate.table, len(plan.conditions) - 1, len(plan.planned_seeds)
    residuals, freedom = past.residuals(candidate.windows)
    residuals = candidate.scale * residuals
    spread, rng = spread_of(residuals), np.random.default_rng(0)
    low, high = interval_of_spread(spread, freedom)
    count = comparisons_simulated(others)
    drawn = drawn_differences(residuals, freedom, (count, others, seeds), rng)
    equal, differing = (
        [simulated(plan, table, values + shift) for values in drawn] for shift in (0.0, np.array(off))
    )
    stops = [(window.end or end) / end for window in candidate.windows]
    cost_equal, cost_off = (
        [_cost(plan, walk, stops[-1], end) for walk in walks] for walks in (equal, differing)
    )
    cost = (np.array(cost_equal) + np.array(cost_off)) / 2
    shares_found = np.array(
        [np.mean([verdict in FOUND for verdict in walk.verdicts.values()]) for walk in differing]
    )
    mean_cost = float(cost.mean())
    time_s, cost_usd = (None if total is None else total * mean_cost for total in whole)
    finds = findable(table.max_seeds, table.error / (others * len(stops)))
    own, keys = plan.decision or table, dict[str, object](over=table.over)
    if not isinstance(table.over, str):
        keys["over"] = _short(table.over)
    if table.rungs or own.rungs:
        keys["rungs"] = _short(table.rungs)
    for key in ("smallest_difference", "finish", "max_questions"):
        if getattr(table, key) != getattr(own, key):
            keys[key] = getattr(table, key)
    forecast = DesignForecast(
        design=candidate.name,
        keys=keys,
        pairs=len(residuals),
        spread=spread,
        spread_low=low,
        spread_high=high,
        seen=past.seen(candidate.windows[-1]),
        finds=None if finds is None else finds * spread,
        difference=off[-1],
        power=float(shares_found.mean()),
        cost_equal=float(np.mean(cost_equal)),
        cost_off=float(np.mean(cost_off)),
        cost_p90=float(np.quantile([*cost_equal, *cost_off], 0.9)),
        time_s=time_s,
        cost_usd=cost_usd,
    )
    return Outcomes(candidate, forecast, shares_found, cost)


def mean_lies_above(values: Floats, errors: float) -> bool:
    """Whether the mean of a sample is above 0 by more than so many of its standard errors."""
    if len(values) < 2:
        return False
    return float(values.mean()) > errors * float(values.std(ddof=1)) / math.sqrt(len(values))


def _short(amounts: Sequence[float]) -> list[float]:
    """Return amounts as a file has them, whole numbers without a point."""
    return [int(amount) if amount == int(amount) else amount for amount in amounts]


def _cost(plan: Plan, walk: Walk, stop: float, end: float) -> float:
    """Return what a campaign's runs cost, as a share of all whole runs.

    Args:
        stop: the share of a run after which runs end that wait nowhere, unless they `finish`.
    """
    waits, _ = walk.ways()
    ending = 1.0 if walk.table.finish else stop
    runs = len(plan.conditions) * len(plan.planned_seeds)
    return math.fsum(rung / end if rung else ending for rung in waits.values()) / runs


def interval_of_spread(spread: float, freedom: float) -> tuple[float, float]:
    """Return the 95 % interval of a standard deviation, if values are normal."""
    draws = np.random.default_rng(0).chisquare(freedom, 100_000)
    most, least = np.quantile(draws, [(1 + LEVEL) / 2, (1 - LEVEL) / 2]).tolist()
    return spread * math.sqrt(freedom / most), spread * math.sqrt(freedom / least)


def findable(seeds: int, error: float) -> float | None:
    """Return the difference, in standard deviations, that is found with 80 % power; None: none ever is.

    Of a t test of so many pairs, which the sign-flip test comes close to (see `Deciding`).
    """
    if seeds < max(2, fewest_seeds(error)):
        return None
    return (t_quantile(1 - error / 2, seeds - 1) + t_quantile(POWER, seeds - 1)) / math.sqrt(seeds)


def _recommended(
    outcomes: Sequence[Outcomes], agreements: Sequence[Agreement], end: float, seeds: int, notes: list[str]
) -> Mapping[str, object]:
    """Return the keys of the cheapest design that finds enough and answers the file's own question.

    If its own design, the first, finds enough, another one has to find as much and to cost less. None, and
    why, if no design is known to.
    """
    own, able = outcomes[0], [each for each in outcomes if each.forecast.power >= POWER]
    if seeds < ENOUGH:
        notes.append(
            f"{count_of(seeds, 'seed')} of history: the spread is known only within its interval, and "
            "whether early and late differences agree is not known: so no design is recommended. "
            f"{ENOUGH} seeds of a condition and of its reference tell"
        )
        return {}
    if not able:
        notes.append(
            f"no design finds this difference in {POWER:.0%} of campaigns: more max_seeds, or a larger one"
        )
        return {}
    agreeing = {each.early for each in agreements if each.low is not None and each.low > 0}
    does_agree = 0 < len(agreeing) == len(agreements)
    better = [each for each in able if own not in able or not each.loses_to(own)]

    def is_own_question(each: Outcomes) -> bool:
        is_early = bool(each.candidate.table.rungs) and not own.candidate.table.rungs
        return each.candidate.windows[-1] == own.candidate.windows[-1] and (does_agree or not is_early)

    def cheapest(among: Sequence[Outcomes]) -> Outcomes | None:
        return min(among, key=lambda each: each.cost.mean(), default=None)

    telling = agreeing if own.candidate.windows[-1].end == end else set()  # by early windows
    best = cheapest([each for each in better if is_own_question(each) or each.forecast.design in telling])
    if best is None and own in able:
        notes.append(
            "the file's own design stays: no other one with its question and power costs less by more than "
            "the sampling error"
        )
        best = own
    elif best is not None and not is_own_question(best):
        notes.append(
            f"{best.forecast.design}: another question than the file's; recommended as early differences "
            "agree with late ones in these logs"
        )
    other = cheapest(better)
    if other is not None and other is not best:
        keys = ", ".join(f"{key} = {quote(value)}" for key, value in other.forecast.keys.items())
        early = {each.early for each in agreements}
        is_early = other.candidate.table.rungs or other.forecast.design in early
        why = "early differences do not tell those at the end here" if is_early else "is another question"
        notes.append(
            f"{other.forecast.design} would be cheapest, but {why}; if that is your question, write {keys}"
        )
    return best.forecast.keys if best else {}


def _agreements(past: Past, per: str, end: float) -> Iterator[Agreement]:
    late = past.differences(Window(per, end=end) if per == STEPS else Window(per, 0.9 * end, end))
    for window in (Window(per, 0.0, part) for part in _parts(end, per, EARLY)):
        early = past.differences(window)
        both = sorted(early.keys() & late.keys())
        if not both:
            continue
        a, b = (np.array([values[key] for key in both]) for values in (early, late))
        seeds = len({(campaign, seed) for campaign, _, seed in both})  # conditions share a seed's reference
        correlation = low = high = None
        if seeds >= ENOUGH and a.std() > 0 and b.std() > 0:
            correlation = float(np.clip(np.corrcoef(a, b)[0, 1], -1, 1))
            z, half = math.atanh(correlation * (1 - 1e-12)), NORMAL.inv_cdf((1 + LEVEL) / 2)
            low, high = (math.tanh(z + sign * half / math.sqrt(seeds - 3)) for sign in (-1, 1))
        yield Agreement(str(window), len(both), correlation, low, high, int(np.sum(a * b < 0)))


def question_spreads(gains: Floats | None) -> dict[int, float]:
    """Return the SD of a pair by numbers of questions; empty without gains of shape (seeds, questions)."""
    if gains is None:
        return {}
    parts = variance_components(gains)
    counts = (times * gains.shape[1] for times in QUESTIONS)
    return {count: math.sqrt(parts.of_a_seed(count)) for count in counts}


def _question_forecasts(
    plan: Plan, past: Past, own: Candidate, gains: Floats | None, off: Sequence[float], end: float
) -> Iterator[QuestionForecast]:
    """Iterate over what the file's own design finds and costs with more questions, first with those asked."""
    spreads, config = question_spreads(gains), plan.runs[0].config
    name, asked = evaluation_of(own.table.metric), min(spreads, default=0)
    evaluation = next((table for table in config.eval.tables if table.name == name), EvalSection())
    training = config.training
    evaluations = (
        1 if own.at_end or not evaluation.every else math.ceil(training.max_steps / evaluation.every)
    )
    samples = evaluations * evaluation.samples
    completions = training.max_steps * training.batch_size * training.group_size
    finds = findable(own.table.max_seeds, own.table.error / ((len(plan.conditions) - 1) * len(own.windows)))
    for count, spread in spreads.items():
        scale = spread / spreads[asked] if spreads[asked] else 1.0
        forecast = _outcomes(plan, past, replace(own, scale=scale), off, end, (None, None)).forecast
        dearer = 1 + (count - asked) * samples / completions
        yield QuestionForecast(
            count,
            spread,
            None if finds is None else finds * spread,
            forecast.power,
            dearer * forecast.cost_equal,
            dearer * forecast.cost_off,
            dearer * forecast.cost_p90,
        )
