"""The part of a model card on what came out: the run's rewards, the campaign's comparison, and the cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from retrain.records.text import count_of, dollars, format_duration, plain
from retrain.results.publish.choice import Choice
from retrain.results.publish.merging import Merged
from retrain.results.report.compare import Comparison, MetricComparison, SideResult, compare
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Match, Moment, deciding, describe, final_value, side_of
from retrain.results.report.tables import Table, footnotes, heading, interval, remarks, results, significant

REWARDS = ("eval_reward", "mean_reward")


def result(choice: Choice, merged: Merged | None) -> Iterator[str]:
    """Iterate over the lines on the run's rewards, and on its campaign's as `retrain compare` gives them."""
    yield "## Result\n"
    yield f"Run `{plain(choice.run.name)}` at step {choice.checkpoint.step}: {_rewards(choice)}."
    if choice.why:
        yield f"It is {choice.why}, and so better than what another run may be expected to reach: see below."
    yield ""
    if merged is not None:
        yield f"Merged and checked: {merged.told()}.\n"
    comparison = _comparison(choice)
    for metric in comparison.metrics:
        yield f"`{metric.metric}`, {heading(metric)}:\n"
        yield from table(results(metric) if metric.differences else _alone(metric))
        yield from (f"- {line}" for line in remarks(metric))
        yield ""
    yield from (f"{line}\n" for line in footnotes([comparison] if comparison.metrics else []))


def cost(choice: Choice) -> Iterator[str]:
    """Iterate over the lines on what the run and its campaign cost."""
    runs = choice.campaign.runs
    yield "## Cost\n"
    yield f"This run: {_spent([choice.run])}."
    if len(runs) > 1:
        yield f"All {count_of(len(runs), 'run')} of its campaign: {_spent(runs)}."
    yield ""


def _rewards(choice: Choice) -> str:
    """Return the rewards of a run at the step that is published."""
    run, step = choice.run, choice.checkpoint.step
    moment = Moment() if run.is_done and step == run.last_step else Moment(step=step)
    named = [name for name in run.result if name.startswith("eval_") and name.endswith("_reward")]
    values = {name: final_value(run, name, moment) for name in (*REWARDS, *named)}
    known = [
        f"{name} {significant(value)} ({describe(name, moment, [run])})"
        for name, value in values.items()
        if value is not None
    ]
    return ", ".join(known) or "no reward is known"


def _comparison(choice: Choice) -> Comparison:
    """Return a campaign's comparison; of a single condition, with none."""
    campaign = choice.campaign
    sides = deciding(campaign)
    if len(sides) < 2:
        sides = (side_of(campaign, choice.run.condition),)
    known = {name for run in campaign.runs for name in (*run.columns.metrics, *run.result)}
    return compare(Match("", tuple(sides), campaign), [name for name in REWARDS if name in known])


def _alone(metric: MetricComparison) -> Table:
    rows = [_own(side) for side in metric.sides]
    return ("condition", ">runs", ">mean", "95 % interval"), rows


def _own(side: SideResult) -> tuple[str, ...]:
    sample = side.sample
    limits = interval(sample.low, sample.high, signed=False)
    return side.label, str(sample.n), significant(sample.mean), limits


def _spent(runs: Sequence[RunHistory]) -> str:
    took_s = math.fsum(attempt.duration_s or 0.0 for run in runs for attempt in run.attempts)
    costs = [run.cost_usd for run in runs if run.cost_usd is not None]
    price = dollars(math.fsum(costs)) if len(costs) == len(runs) else "price not known"
    return f"{format_duration(took_s)}, {price}"


def table(found: Table) -> Iterator[str]:
    """Iterate over the lines of a table; '>' before a header aligns its column right."""
    headers, rows = found
    yield _row([name.lstrip(">") for name in headers])
    yield _row(["---:" if name.startswith(">") else "---" for name in headers])
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
