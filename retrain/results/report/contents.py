"""Everything that a report shows of a campaign, computed once for page and images."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.rungs import Searched
from retrain.records.samples import KeptSample
from retrain.records.windows import Window
from retrain.results.report.back_pressure import (
    Scalability,
    fits,
    regime_chart,
    regime_stretches,
    scalability,
    usl_chart,
)
from retrain.results.report.calibration import calibration_chart, calibrations, sentence
from retrain.results.report.charts import Chart, axis_title, final_chart
from retrain.results.report.compare import Comparison, MetricComparison, compare, usual_metrics
from retrain.results.report.curves import Curve, Shown, bins_for, curve_chart, curves
from retrain.results.report.engines import (
    crashes_to_read,
    first_start_s,
    load_charts,
    servers,
    table_of_servers,
)
from retrain.results.report.facts import conversations
from retrain.results.report.gather import NO_ROWS, CampaignRecord, RunHistory, read_columns
from retrain.results.report.sides import Match, Side, conditions, deciding, fresh, known_metrics
from retrain.results.report.signs import signs_of_cheating
from retrain.results.report.sweeps import charts as sweep_charts
from retrain.results.report.sweeps import sensitivities, swept_of, table_of_keys
from retrain.results.report.tables import Table
from retrain.results.report.timeline import split_chart, step_split, timeline, timeline_chart

MOST_CONDITIONS = 100  # drawn; tables list all
SHORT = 190  # pixels of a secondary chart
SIGHT = 3.0  # times the largest concurrency tried: a peak beyond it is extrapolation
TITLES = {
    "mean_reward": "Reward of the sampled rollouts while training",
    "eval_reward": "Reward on held-out prompts",
    "teacher_kl": "Distance of the sampler from its teacher",
}
OF_SOURCE = re.compile(r"source_(.+)_(mean_reward|prompts|teacher_kl)")
SOURCE_TITLES = {
    "mean_reward": "Reward of the source",
    "prompts": "Prompts in a step of the source",
    "teacher_kl": "Distance of the sampler from the teacher of the source",
}


@dataclass(frozen=True)
class Contents:
    """What a report shows; charts without data are absent."""

    campaign: CampaignRecord
    sides: tuple[Side, ...]
    compared: tuple[Side, ...]  # those of them that decide
    shown: Shown
    learned: Shown  # the same conditions, without runs of a search's choice, along the axis of learning
    comparison: Comparison
    explored: dict[str, tuple[Curve, ...]]  # of the metrics that can be selected on the page
    scalability: tuple[Scalability, ...]
    signs: tuple[str, ...]  # of cheating
    calibration: tuple[str, ...]  # of each condition whose curriculum predicts
    episodes: tuple[tuple[str, KeptSample], ...]  # to read, of which run each
    crashes: tuple[tuple[str, list[str]], ...]  # of servers, with their last lines
    sections: dict[str, tuple[Chart, ...]]  # the charts of those sections of the page that have any
    tables: dict[str, Table]  # of those that have one below their charts

    @property
    def charts(self) -> list[Chart]:
        return list(chain.from_iterable(self.sections.values()))


def contents(campaign: CampaignRecord, metrics: Sequence[str] = (), window: Window | None = None) -> Contents:
    """Return what to show of a campaign; `metrics` are drawn and compared as well.

    Learning is drawn along the axis of the `window` over which conditions are compared.
    """
    sides, compared = conditions(campaign), deciding(campaign)
    every_metric = known_metrics(campaign.runs)
    shown = Shown(sides[:MOST_CONDITIONS], bins_for(sides[:MOST_CONDITIONS], len(every_metric)))
    decision = campaign.manifest.decision if campaign.manifest else None
    compared_metrics = tuple(dict.fromkeys([*usual_metrics(campaign.runs, decision), *metrics]))
    comparison = compare(Match("", compared, campaign), compared_metrics, window)
    fitted = tuple(fit for side in shown.sides if (fit := scalability(side)))
    bins = bins_for(shown.sides, len(every_metric), window.per) if window else shown.bins
    learned = Shown(tuple(fresh(side, campaign) for side in shown.sides), bins)
    explored = {name: curves(learned.sides, name, bins) for name in every_metric}
    used, began_s = servers(campaign.runs), first_start_s(campaign.runs)
    rewards = [metric for metric in comparison.metrics if metric.metric.endswith("reward")]
    drawn = [replace(metric, sides=metric.sides[:MOST_CONDITIONS]) for metric in rewards[:1]]
    final = tuple(final_chart(metric) for metric in drawn if any(side.values for side in metric.sides))
    swept, searched = swept_of(campaign), campaign.manifest.searched if campaign.manifest else None
    reward = _searched_reward(campaign, searched) if searched else next(iter(rewards), None)
    tables = {
        "sweep": table_of_keys(sensitivities(reward, swept), reward.metric) if swept and reward else ((), ()),
        "back-pressure": fits(fitted),
        "sampling-servers": table_of_servers(used),
    }
    calibrated = list(calibrations(shown.sides))
    sections = {
        "curriculum": (calibration_chart(calibrated, shown.labels),) if calibrated else (),
        "learning": _warm_up(shown) + _learning(learned, metrics),
        "comparison": final,
        "sweep": tuple(sweep_charts(reward, swept)) if swept and reward else (),
        "back-pressure": _back_pressure(campaign.runs, fitted, shown),
        "time": _time(campaign, shown),
        "rate-limiter": _rate(shown),
        "sampling-servers": tuple(load_charts(used, began_s)),
    }
    return Contents(
        campaign=campaign,
        sides=sides,
        compared=compared,
        shown=shown,
        learned=learned,
        comparison=comparison,
        explored={name: lines for name, lines in explored.items() if lines},
        scalability=fitted,
        signs=tuple(signs_of_cheating(sides)),
        calibration=tuple(map(sentence, calibrated)),
        episodes=conversations(sides),
        crashes=tuple(crashes_to_read(used, began_s)),
        sections=_named_apart(sections),
        tables={name: table for name, table in tables.items() if table[1]},
    )


def _named_apart(sections: Mapping[str, Sequence[Chart]]) -> dict[str, tuple[Chart, ...]]:
    """Number charts of one name: two metrics may differ in what a file's name has not, or in its end only."""
    taken: set[str] = set()

    def named(chart: Chart) -> Chart:
        numbered = (f"{chart.name}-{number}" for number in count(2))
        name = next(name for name in chain([chart.name], numbered) if name not in taken)
        taken.add(name)
        return replace(chart, name=name)

    return {section: tuple(map(named, charts)) for section, charts in sections.items()}


def _searched_reward(campaign: CampaignRecord, searched: Searched) -> MetricComparison | None:
    """Return all conditions in a search's metric where all ran: its seeds, at its first rung."""
    if not searched.rungs:
        return None
    sides = tuple(
        Side(side.label, tuple(run for run in side.runs if run.seed in searched.seeds))
        for side in conditions(campaign)
    )
    first_rung = Window(end=searched.rungs[0].step)
    return compare(Match("", sides, campaign), (searched.metric,), first_rung).metrics[0]


def _warm_up(shown: Shown) -> tuple[Chart, ...]:
    """Draw the loss of the supervised updates before the first step, if there were any."""

    def warming_up(run: RunHistory) -> RunHistory:
        # it is optional; problems of a run's directory are reported for its metrics
        return replace(run, columns=readable(read_columns, RunFiles(run.directory).warmup) or NO_ROWS)

    sides = tuple(Side(side.label, tuple(map(warming_up, side.runs))) for side in shown.sides)
    before = Shown(sides, bins_for(sides, 1))
    title = "Warm-up: loss of the supervised updates before the first step"
    return curve_chart("warm_up_loss", title, curves(sides, "loss", before.bins), before, height=SHORT)


def _learning(shown: Shown, metrics: Sequence[str]) -> tuple[Chart, ...]:
    charts: list[Chart] = []
    known = known_metrics(run for side in shown.sides for run in side.runs)
    of_sources = filter(None, map(OF_SOURCE.fullmatch, known))
    titles = TITLES | {match[0]: f"{SOURCE_TITLES[match[2]]} {match[1]}" for match in of_sources}
    for name in dict.fromkeys([*titles, *metrics]):
        lines = curves(shown.sides, name, shown.bins)
        if any(len(line.steps) > 1 or name in metrics for line in lines):
            charts += curve_chart(name, titles.get(name, axis_title(name)), lines, shown)
    return tuple(charts)


def _back_pressure(
    runs: Sequence[RunHistory], fitted: Sequence[Scalability], shown: Shown
) -> tuple[Chart, ...]:
    if not fitted:
        return ()
    charts = [usl_chart(fitted, shown.labels)]
    if stretches := regime_stretches(runs):
        charts.append(regime_chart(stretches, shown.bins.end))
    steered = [side for side in shown.sides if side.label in {fit.condition for fit in fitted}]
    best, batches = (curves(steered, metric, shown.bins) for metric in ("bp_p_star", "batch_size"))
    title = "Best concurrency p* estimated by the controller, of the steps that saw a peak"
    most = SIGHT * max(float(fit.concurrency.max()) for fit in fitted)
    charts += curve_chart("bp_p_star", title, best, shown, height=SHORT, most=most)
    return (*charts, *curve_chart("batch_size", "Batch size used", batches, shown, height=SHORT))


def _time(campaign: CampaignRecord, shown: Shown) -> tuple[Chart, ...]:
    laid = timeline(campaign.runs)
    splits = {side.label: split for side in shown.sides if (split := step_split(side))}
    charts = [timeline_chart(laid, shown.labels)] if laid.bars else []
    return tuple([*charts, split_chart(splits)] if splits else charts)


def _rate(shown: Shown) -> tuple[Chart, ...]:
    ratio, age = (curves(shown.sides, name, shown.bins) for name in ("rate_ratio", "rate_sample_age_mean"))
    title = "Rate limiter: samples per trained batch, relative to the target"
    aged = "Age of the rollouts trained on"
    return (
        *curve_chart("rate_ratio", title, ratio, shown, height=SHORT, target=1.0),
        *curve_chart("rate_sample_age_mean", aged, age, shown, height=SHORT),
    )
