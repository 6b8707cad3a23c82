"""Everything that a report shows of a campaign, computed once for page and images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.report.back_pressure import (
    Scalability,
    best_concurrency,
    regime_chart,
    scalability,
    stretches,
    usl_chart,
)
from retrain.report.charts import Chart, axis_title, final_chart
from retrain.report.columns import NO_ROWS, read_columns
from retrain.report.compare import Comparison, compare, usual_metrics
from retrain.report.curves import curve_chart
from retrain.report.final import known_metrics
from retrain.report.gather import CampaignRecord, RunHistory
from retrain.report.series import Curve, Shown, bins_for, curves
from retrain.report.sides import Match, Side, conditions
from retrain.report.signs import signs
from retrain.report.timeline import split_chart, step_splits, timeline, timeline_chart

MOST_CONDITIONS = 100  # drawn; tables list all
SHORT = 190  # pixels of a secondary chart
SIGHT = 3.0  # times the largest concurrency tried: a peak beyond it is extrapolation
TITLES = {
    "mean_reward": "Reward of the sampled rollouts while training",
    "eval_reward": "Reward on held-out prompts",
}


@dataclass(frozen=True)
class Contents:
    """What a report shows; charts without data are absent."""

    campaign: CampaignRecord
    sides: tuple[Side, ...]
    shown: Shown
    comparison: Comparison
    explored: dict[str, tuple[Curve, ...]]  # of the metrics that can be selected on the page
    scalability: tuple[Scalability, ...]
    signs: tuple[str, ...]  # of cheating
    learning: tuple[Chart, ...]
    final: tuple[Chart, ...]
    back_pressure: tuple[Chart, ...]
    time: tuple[Chart, ...]
    rate: tuple[Chart, ...]

    @property
    def charts(self) -> tuple[Chart, ...]:
        return self.learning + self.final + self.back_pressure + self.time + self.rate


def contents(campaign: CampaignRecord, metrics: Sequence[str] = ()) -> Contents:
    """Return what to show of a campaign; `metrics` are drawn and compared as well."""
    sides = conditions(campaign)
    known = known_metrics(campaign.runs)
    shown = Shown(sides[:MOST_CONDITIONS], bins_for(sides[:MOST_CONDITIONS], len(known)))
    comparison = compare(Match("", sides), tuple(dict.fromkeys([*usual_metrics(campaign.runs), *metrics])))
    fits = tuple(fit for side in shown.sides if (fit := scalability(side)))
    found = {name: curves(shown.sides, name, shown.bins) for name in known}
    return Contents(
        campaign=campaign,
        sides=sides,
        shown=shown,
        comparison=comparison,
        explored={name: lines for name, lines in found.items() if lines},
        scalability=fits,
        signs=tuple(signs(sides)),
        learning=_warm_up(shown) + _learning(shown, metrics),
        final=_final(comparison),
        back_pressure=_back_pressure(campaign, fits, shown),
        time=_time(campaign, shown),
        rate=_rate(shown),
    )


def _final(comparison: Comparison) -> tuple[Chart, ...]:
    """Draw the final values of the first reward that has any, with as many sides as are drawn."""
    rewards = [one for one in comparison.metrics if one.metric.endswith("reward")][:1]
    drawn = [replace(one, sides=one.sides[:MOST_CONDITIONS]) for one in rewards]
    return tuple(final_chart(one) for one in drawn if any(side.values for side in one.sides))


def _warm_up(shown: Shown) -> tuple[Chart, ...]:
    """Draw the loss of the supervised updates before the first step, if there were any."""
    sides = tuple(Side(side.label, tuple(map(_warming_up, side.runs))) for side in shown.sides)
    before = Shown(sides, bins_for(sides, 1))
    title = "Warm-up: loss of the supervised updates before the first step"
    return curve_chart("warm_up_loss", title, curves(sides, "loss", before.bins), before, height=SHORT)


def _warming_up(run: RunHistory) -> RunHistory:
    # it is optional; problems of a run's directory are reported for its metrics
    return replace(run, columns=readable(read_columns, RunFiles(run.directory).warmup) or NO_ROWS)


def _learning(shown: Shown, metrics: Sequence[str]) -> tuple[Chart, ...]:
    names = dict.fromkeys([*TITLES, *metrics])
    found = {name: curves(shown.sides, name, shown.bins) for name in names}
    worth = [name for name in names if any(len(one.steps) > 1 or name in metrics for one in found[name])]
    drawn = (curve_chart(name, TITLES.get(name, axis_title(name)), found[name], shown) for name in worth)
    return tuple(chain.from_iterable(drawn))


def _back_pressure(campaign: CampaignRecord, fits: Sequence[Scalability], shown: Shown) -> tuple[Chart, ...]:
    if not fits:
        return ()
    charts = [usl_chart(fits, shown.labels)]
    if found := stretches(campaign.runs):
        charts.append(regime_chart(found, shown.bins.last_step))
    best = [one for side in shown.sides if (one := best_concurrency(side, shown.bins))]
    charts += curve_chart(
        "bp_p_star",
        "Best concurrency p* estimated by the controller",
        best,
        shown,
        name="p-star",
        subtitle="Median over seeds. No line: over half saw no peak, or one far beyond every batch tried.",
        height=SHORT,
        most=SIGHT * max(float(fit.concurrency.max()) for fit in fits),
    )
    steered = [side for side in shown.sides if side.label in {fit.condition for fit in fits}]
    batches = curves(steered, "batch_size", shown.bins)
    return (*charts, *curve_chart("batch_size", "Batch size used", batches, shown, height=SHORT))


def _time(campaign: CampaignRecord, shown: Shown) -> tuple[Chart, ...]:
    laid, splits = timeline(campaign.runs), step_splits(shown.sides)
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
