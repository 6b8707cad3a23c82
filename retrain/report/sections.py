"""What each section of the page says, in the order of the page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import tomli_w

from retrain.config.digest import BESIDE_RESULTS
from retrain.records.text import count_of, plain
from retrain.report.charts import Chart
from retrain.report.compare import Judged, MetricComparison, SideResult
from retrain.report.contents import Contents
from retrain.report.differences import KeyDifference
from retrain.report.failures import Failure, failures
from retrain.report.gather import CampaignRecord
from retrain.report.markup import NOTHING, Html, join, paragraph, table, tag, text
from retrain.report.numbers import MISSING, interval, significant, span
from retrain.report.provenance import provenance
from retrain.report.scalability import Scalability
from retrain.report.statistics import describe_sample
from retrain.report.wording import footnotes, grounds, heading, judgement, left_out

Section = tuple[str, str, Html, tuple[Chart, ...]]  # anchor, title, what stands above the charts, charts

MOST_RUNS = 300  # rows of the table of runs
MOST_TOML = 20_000  # characters
MOST_REASONS = 20  # sentences under a comparison
MANY_CONDITIONS = 6  # whose values would not stand side by side


def sections(contents: Contents) -> tuple[Section, ...]:
    """Return all sections that have something to say."""
    return tuple(_sections(contents))


def _sections(contents: Contents) -> Iterator[Section]:
    yield "summary", "Summary", _summary(contents), ()
    yield "learning", "Learning", _or(contents.learning, "No run has rows yet."), contents.learning
    yield "comparison", "Comparison", _comparison(contents), contents.final
    about_pressure = _or(contents.back_pressure, "No run used back pressure.")
    yield (
        "back-pressure",
        "Back pressure",
        join([about_pressure, _fits(contents.scalability)]),
        contents.back_pressure,
    )
    yield "time", "Time", _or(contents.time, "No attempt has begun."), contents.time
    yield "rate-limiter", "Rate limiter", _or(contents.rate, "No run used the rate limiter."), contents.rate
    yield "failures", "Failures", _failures(contents), ()
    yield "configuration", "Configuration", _configuration(contents), ()
    yield "provenance", "Provenance", table(("", ""), provenance(contents.campaign)), ()


def _or(charts: tuple[Chart, ...], nothing: str) -> Html:
    return NOTHING if charts else paragraph(nothing, class_="note")


def _summary(contents: Contents) -> Html:
    if not contents.sides:
        return paragraph("This campaign has no runs yet.", class_="note")
    return join([_conditions(contents), _runs(contents.campaign)])


def _conditions(contents: Contents) -> Html:
    rows = []
    score = contents.comparison.metrics[0] if contents.comparison.metrics else None
    for i, side in enumerate(contents.sides):
        result = score.sides[i] if score else None
        done = sum(run.is_done for run in side.runs)
        failed = sum(run.has_failed for run in side.runs)
        steps = sum(run.last_step for run in side.runs)
        sample = result.sample if result else describe_sample(())
        low_high = (
            MISSING if sample.low is None else f"{significant(sample.low)} to {significant(sample.high)}"
        )
        rows.append(
            (
                side.label,
                f"{done} of {len(side.runs)}",
                str(failed),
                f"{steps:,}",
                significant(sample.mean),
                low_high,
            )
        )
    name = f">final {score.metric}" if score else ">final"
    return table(("condition", ">done", ">failed", ">steps", name, "95 % interval"), rows)  # fmt: skip


def _runs(campaign: CampaignRecord) -> Html:
    rows = [
        (
            run.run_id, run.state, f"{run.last_step} of {run.max_steps or '?'}", str(len(run.attempts)),
            span(sum(attempt.duration_s or 0.0 for attempt in run.attempts)), plain(run.message, 160),
        )
        for run in campaign.runs[:MOST_RUNS]
    ]  # fmt: skip
    more = len(campaign.runs) - MOST_RUNS
    note = paragraph(f"{more} more runs are not listed.", class_="note") if more > 0 else NOTHING
    heads = ("run", "state", ">steps", ">attempts", ">time", "message")
    return tag("details", tag("summary", text(f"All {len(campaign.runs)} runs")), table(heads, rows), note)


def _comparison(contents: Contents) -> Html:
    comparison = contents.comparison
    if not comparison.metrics:
        return paragraph("No run has rows yet: nothing to compare.", class_="note")
    notes = [paragraph(line, class_="note") for line in footnotes([comparison])]
    return join([*map(_metric, comparison.metrics), *notes])


def _metric(metric: MetricComparison) -> Html:
    base, *others = metric.sides
    heads = (
        "condition",
        ">runs",
        ">mean",
        ">IQM",
        ">difference",
        "95 % interval",
        ">P(higher)",
        "bootstrap interval",
        "verdict",
    )
    judged = zip(others, metric.differences, strict=True)
    rows = [_result(base, None, metric), *(_result(side, one, metric) for side, one in judged)]
    reasons = (f"{ground.names} against {base.label}: {ground.because}." for ground in grounds(metric))
    lines = [*left_out(metric.sides), *islice(reasons, MOST_REASONS)]
    return join([
        tag("h3", text(f"{metric.metric}: {heading(metric)}")),
        table(heads, rows, wide=True),
        *(paragraph(line, class_="note") for line in lines),
    ])  # fmt: skip


def _result(side: SideResult, judged: Judged | None, metric: MetricComparison) -> tuple[str, ...]:
    gap = judged.difference if judged else None
    return (
        side.label,
        f"{side.sample.n} of {side.runs}",
        significant(side.sample.mean),
        significant(side.sample.iqm),
        significant(gap.difference, signed=True) if gap else "",
        interval(gap.low, gap.high) if gap else "",
        significant(gap.improvement) if gap else "",
        interval(gap.bootstrap_low, gap.bootstrap_high) if gap else "",
        judgement(judged, metric) if judged else "",
    )


def _fits(found: tuple[Scalability, ...]) -> Html:
    if not found:
        return NOTHING
    heads = (
        "condition",
        ">steps",
        ">σ contention",
        ">κ crosstalk",
        ">λ tokens/s at p = 1",
        ">p*",
        ">p* of the controller",
    )
    rows = [_fit(one) for one in found]
    remarks = [
        paragraph(f"{one.condition}: {one.fit.reason}.", class_="note") for one in found if one.fit.reason
    ]
    return join([table(heads, rows, wide=True), *remarks])


def _fit(one: Scalability) -> tuple[str, ...]:
    fit = one.fit
    return (
        one.condition,
        str(len(one.concurrency)),
        _with_error(fit.sigma, fit.sigma_error),
        _with_error(fit.kappa, fit.kappa_error),
        _with_error(fit.lambda_, fit.lambda_error),
        significant(fit.p_star) if math.isfinite(fit.p_star) else "no peak",
        significant(one.steered_p_star) if one.steered_p_star else "no peak",
    )


def _with_error(value: float, error: float) -> str:
    return f"{significant(value)} ± {significant(error)}" if math.isfinite(error) else significant(value)


def _failures(contents: Contents) -> Html:
    found = failures(contents.campaign.runs)
    if not found:
        return paragraph("None: every attempt ended well.", class_="note")
    return join(_failure(one, is_first=i == 0) for i, one in enumerate(found))


def _failure(one: Failure, *, is_first: bool) -> Html:
    endings = ", ".join(one.attempts) or "none"
    went = f"{one.state} at step {one.step} of {one.max_steps or '?'}; attempts: {endings}"
    parts = [tag("h3", text(one.run_id)), paragraph(went, class_="note")]
    if one.message:
        parts.append(paragraph(one.message, class_="bad"))
    if one.tail:
        opened = {"open": ""} if is_first else {}
        shown = tag("summary", text("End of its output")), tag("pre", text("\n".join(one.tail)))
        parts.append(tag("details", *shown, **opened))
    return join(parts)


def _configuration(contents: Contents) -> Html:
    campaign, config = contents.campaign, contents.comparison.config
    labels = [side.label for side in contents.sides]
    parts = [tag("h3", text("Differences between conditions"))]
    if len(labels) < 2:
        parts.append(paragraph("There is one condition.", class_="note"))
    elif not config:
        parts.append(paragraph("None but the seeds.", class_="note"))
    else:
        parts.append(_differences(labels, config))
    parts.append(_details("The file as it was given", campaign.toml))
    parts.append(
        _details(f"Every key of {labels[0] if labels else 'the run'}, with its value", _resolved(campaign))
    )
    return join(parts)


def _differences(labels: Sequence[str], config: Sequence[KeyDifference]) -> Html:
    """A row a key, or with many conditions a row a condition."""
    if len(labels) <= MANY_CONDITIONS:
        return table(("key", *labels), [(row.key, *row.values) for row in config])
    by_condition = zip(*(row.values for row in config), strict=True)
    rows = [(label, *values) for label, values in zip(labels, by_condition, strict=True)]
    return table(("condition", *(row.key for row in config)), rows)


def _details(title: str, content: str) -> Html:
    if not content:
        return NOTHING
    lines = [_line(line) for line in content[:MOST_TOML].splitlines()]
    cut = ["…"] if len(content) > MOST_TOML else []
    return tag("details", tag("summary", text(title)), tag("pre", text("\n".join(lines + cut))))


def _line(line: str) -> str:
    return " " * (len(line) - len(line.lstrip(" "))) + plain(line, 500)


def _resolved(campaign: CampaignRecord) -> str:
    config = next((run.config for run in campaign.runs if run.config), {})
    return tomli_w.dumps({key: value for key, value in config.items() if key not in BESIDE_RESULTS})


def headline(campaign: CampaignRecord) -> str:
    """Sum a campaign up in a sentence."""
    runs = campaign.runs
    states = {
        state: sum(run.state == state for run in runs) for state in dict.fromkeys(run.state for run in runs)
    }
    what = ", ".join(f"{count} {state}" for state, count in states.items())
    seeds = len({run.seed for run in runs})
    steps = sum(run.last_step for run in runs)
    matrix = f"{count_of(len(campaign.conditions), 'condition')}, {count_of(seeds, 'seed')}"
    return f"{count_of(len(runs), 'run')} ({what or 'none begun'}): {matrix}, {steps:,} steps."
