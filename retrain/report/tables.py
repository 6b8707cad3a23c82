"""Rows of the page's tables, its failures, and the facts in its header and its provenance section."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

import tomli_w

from retrain.clock import utc_now
from retrain.config.digest import BESIDE_RESULTS
from retrain.distribution import version
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.run_row import last_output
from retrain.records.text import MISSING, count_of, counts_of, format_duration, plain, plain_lines
from retrain.report.back_pressure import Scalability
from retrain.report.compare import MetricComparison
from retrain.report.contents import Contents
from retrain.report.gather import CampaignRecord, RunHistory
from retrain.report.statistics import describe_sample
from retrain.report.wording import Table, grounds, interval, left_out, significant

TAIL_LINES = 30
LINE_LIMIT = 300
MOST_TAILS = 20
MOST_RUNS = 300  # rows of the table of runs
MOST_TOML = 20_000  # characters
MOST_REASONS = 20  # sentences under a comparison
MANY_CONDITIONS = 6  # whose values would not fit side by side
MOST_SOFTWARE = 5  # distinct versions listed: the hosts of one campaign are usually alike
MOST_HOSTS = 20
TROUBLED = ("died", "interrupted")


def conditions(contents: Contents) -> Table:
    """Return one row per condition: runs, steps, and the final score."""
    score = contents.comparison.metrics[0] if contents.comparison.metrics else None
    rows = []
    for i, side in enumerate(contents.sides):
        sample = score.sides[i].sample if score else describe_sample(())
        done = sum(run.is_done for run in side.runs)
        failed = sum(run.has_failed for run in side.runs)
        steps = sum(run.last_step for run in side.runs)
        rows.append(
            (
                side.label, f"{done} of {len(side.runs)}", str(failed), f"{steps:,}",
                significant(sample.mean), interval(sample.low, sample.high, signed=False),
            )
        )  # fmt: skip
    name = f">final {score.metric}" if score else ">final"
    return ("condition", ">done", ">failed", ">steps", name, "95 % interval"), rows


def runs(campaign: CampaignRecord) -> Table:
    """Return one row per run, up to `MOST_RUNS`."""
    rows = [
        (
            run.run_id, run.state, f"{run.last_step} of {run.max_steps or '?'}", str(len(run.attempts)),
            format_duration(sum(attempt.duration_s or 0.0 for attempt in run.attempts)),
            plain(run.message, 160),
        )
        for run in campaign.runs[:MOST_RUNS]
    ]  # fmt: skip
    return ("run", "state", ">steps", ">attempts", ">time", "message"), rows


def remarks(metric: MetricComparison) -> Iterator[str]:
    """Return which runs were left out, and what each verdict rests on."""
    yield from left_out(metric.sides)
    for ground in islice(grounds(metric), MOST_REASONS):
        yield f"{ground.names} against {metric.sides[0].label}: {ground.judgement} ({ground.because})."


def fits(found: Sequence[Scalability]) -> Table:
    """Return one row per condition: the fitted Universal Scalability Law."""
    heads = ("condition", ">steps", ">σ contention", ">κ crosstalk", ">λ tokens/s at p = 1", ">p*")
    rows = [
        (
            one.condition,
            str(len(one.concurrency)),
            _with_error(one.fit.sigma, one.fit.sigma_error),
            _with_error(one.fit.kappa, one.fit.kappa_error),
            _with_error(one.fit.lambda_, one.fit.lambda_error),
            significant(one.fit.p_star) if math.isfinite(one.fit.p_star) else "no peak",
            significant(one.steered_p_star) if one.steered_p_star else "no peak",
        )
        for one in found
    ]
    return (*heads, ">p* of the controller"), rows


def _with_error(value: float, error: float) -> str:
    return f"{significant(value)} ± {significant(error)}" if math.isfinite(error) else significant(value)


def differences(contents: Contents) -> Table:
    """Return one row per key that differs; with many conditions, one row per condition."""
    labels, config = [side.label for side in contents.sides], contents.comparison.config
    if len(labels) <= MANY_CONDITIONS:
        return ("key", *labels), [(row.key, *row.values) for row in config]
    by_condition = zip(*(row.values for row in config), strict=True)
    rows = [(label, *values) for label, values in zip(labels, by_condition, strict=True)]
    return ("condition", *(row.key for row in config)), rows


def excerpt(toml: str) -> str:
    """Return the beginning of a TOML file, safe to show."""
    lines = plain_lines(toml[:MOST_TOML])
    return "\n".join([*lines, "…"] if len(toml) > MOST_TOML else lines)


def resolved(campaign: CampaignRecord) -> str:
    """Return the whole configuration of the first run that has one, as TOML."""
    config = next((run.config for run in campaign.runs if run.config), {})
    return tomli_w.dumps({key: value for key, value in config.items() if key not in BESIDE_RESULTS})


def headline(campaign: CampaignRecord) -> str:
    """Return a summary of the campaign in one sentence."""
    runs = campaign.runs
    seeds = len({run.seed for run in runs})
    steps = sum(run.last_step for run in runs)
    matrix = f"{count_of(len(campaign.conditions), 'condition')}, {count_of(seeds, 'seed')}"
    what = counts_of(run.state for run in runs) or "none begun"
    return f"{count_of(len(runs), 'run')} ({what}): {matrix}, {steps:,} steps."


def provenance(campaign: CampaignRecord) -> Sequence[tuple[str, str]]:
    """Return pairs of name and value; a dash where the records lack it."""
    return [(name, value or MISSING) for name, value in _facts(campaign)]


def _facts(campaign: CampaignRecord) -> Iterator[tuple[str, str]]:
    yield "campaign", campaign.id
    manifest = campaign.manifest
    if manifest is not None:
        git = manifest.git
        changed = " (with uncommitted changes)" if git and git.is_dirty else ""
        yield "retrain", plain(manifest.package_version)
        yield "Python", plain(manifest.python)
        yield "git commit", plain(git.commit) + changed if git else ""
        yield "started on", plain(manifest.host)
        yield "started", plain(manifest.started_at)
        yield "ended", plain(manifest.ended_at)
        yield "configuration hash", plain(manifest.config_hash)
    yield "command-line overrides", "  ".join(campaign.overrides)
    hosts = dict.fromkeys(plain(attempt.host) for run in campaign.runs for attempt in run.attempts)
    yield "workers' hosts", ", ".join(list(hosts)[:MOST_HOSTS])
    software = dict.fromkeys(plain(attempt.software) for run in campaign.runs for attempt in run.attempts)
    yield "workers' software", "; ".join([one for one in software if one][:MOST_SOFTWARE])
    yield "report made", f"{utc_now()} by retrain {version()}"


def failures(runs: Sequence[RunHistory]) -> Iterator[tuple[RunHistory, list[str]]]:
    """Iterate over runs that failed, were interrupted or needed several attempts, the failed ones first.

    With each goes the end of its output; of all but the first few, which tend to fail alike, nothing.
    """
    found = [run for run in runs if run.has_failed or run.state in TROUBLED or len(run.attempts) > 1]
    found.sort(key=lambda run: not run.has_failed)
    for i, run in enumerate(found):
        yield run, _tail(RunFiles(run.directory)) if i < MOST_TAILS and not run.is_done else []


def _tail(files: RunFiles) -> list[str]:
    lines = readable(partial(last_output, count=TAIL_LINES), files) or []
    return [line[:LINE_LIMIT] for line in plain_lines("\n".join(lines))]
