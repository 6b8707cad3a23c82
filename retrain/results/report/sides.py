"""What is compared: the runs of each side, and the final value of each run in a metric.

A directory is a campaign or a run; a name after it is a condition or a run of that campaign. Held-out values
(`eval_*`) come from the evaluation at the end of the run, and every other metric is the mean over the run's
last steps, if no other window is named: one step is too noisy, and the whole history shows how fast it
learned rather than how well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from retrain.base.errors import ConfigError, RecordsError
from retrain.base.registry import hint
from retrain.records.decision import HELD_OUT, UNSCORED, unscored_key
from retrain.records.lines import measured
from retrain.records.metrics import mean
from retrain.records.run_row import RunRow
from retrain.records.rungs import STOPPED, Searched
from retrain.records.text import count_of, first_of, plain
from retrain.records.windows import AXES, FEWEST_STEPS, STEPS, Window, amount, steps_averaged
from retrain.results.report.gather import CampaignRecord, RunHistory, gather


@dataclass(frozen=True)
class Side:
    """The runs of a condition, or a single run."""

    label: str
    runs: tuple[RunHistory, ...]


@dataclass(frozen=True)
class Match:
    """Sides to compare with the first."""

    title: str
    sides: tuple[Side, ...]
    campaign: CampaignRecord | None = None  # whose conditions these all are
    unread: tuple[str, ...] = ()  # what is left out, as it cannot be read


def choose(arguments: Sequence[str], metrics: Collection[str] | None = None) -> tuple[Match, ...]:
    """Return what to compare; a ConfigError lists the candidates for a name that is unknown or ambiguous.

    `CAMPAIGN` compares its conditions with the first of them; `CAMPAIGN a b` those two;
    `CAMPAIGN1 CAMPAIGN2` their common conditions, pair by pair; `CAMPAIGN1 a CAMPAIGN2 b`
    a condition of one with a condition of the other; `RUN1 RUN2` two runs. Of rows, only `metrics` are read.
    """
    named = _read(arguments, metrics)
    unread = tuple(line for campaign, _ in named for line in campaign.unread)
    return tuple(replace(match, unread=unread) for match in _matches(named))


def _matches(named: Sequence[tuple[CampaignRecord, list[str]]]) -> tuple[Match, ...]:
    campaigns = [campaign for campaign, _ in named]
    first = campaigns[0]
    if not any(names for _, names in named):
        if len(named) > 1:
            return _common_conditions(campaigns)
        sides = list(deciding(first))
        if len(sides) < 2:
            only = sides[0].label if sides else "no run"
            raise ConfigError(
                f"{first.directory}: contains only {only}; add another campaign, or name two of its runs"
            )
        return (Match("", tuple(sides), first),)
    tags = _tags(campaigns)
    sides = [side for (of, names), tag in zip(named, tags, strict=True) for side in _sides(of, names, tag)]
    if len(sides) < 2:
        raise ConfigError(f"only {sides[0].label!r} is named; name what to compare it with: {_offer(first)}")
    are_conditions = len(named) == 1 and all(side.label in first.conditions for side in sides)
    return (Match("", tuple(sides), first if are_conditions else None),)


def conditions(campaign: CampaignRecord) -> tuple[Side, ...]:
    """Return a campaign's conditions as sides."""
    return tuple(side_of(campaign, label) for label in campaign.conditions)


def deciding(campaign: CampaignRecord) -> tuple[Side, ...]:
    """Return a campaign's conditions as sides; of a search, those that decide: on fresh seeds only."""
    searched = campaign.manifest.searched if campaign.manifest else None
    if searched is None or not searched.decides:
        return conditions(campaign)
    return tuple(_fresh(side_of(campaign, name), searched) for name in (searched.reference, searched.winner))


def _fresh(side: Side, searched: Searched) -> Side:
    return Side(side.label, tuple(run for run in side.runs if run.seed not in searched.seeds))


def _read(
    arguments: Sequence[str], metrics: Collection[str] | None
) -> list[tuple[CampaignRecord, list[str]]]:
    """Return each directory's campaign, and the conditions or runs selected from it."""
    named: list[tuple[CampaignRecord, list[str]]] = []
    for argument in arguments:
        if named and side_of(named[-1][0], argument).runs:
            named[-1][1].append(argument)
        elif named and not Path(argument).is_dir():
            last = named[-1][0]
            raise ConfigError(
                f"{plain(argument)!r} is neither a directory nor a condition or run of "
                f"{last.directory}, which has {_offer(last)}"
            )
        else:
            named.append((gather(Path(argument), metrics), []))
    return named


def _offer(campaign: CampaignRecord) -> str:
    return ", ".join(campaign.conditions[:10])


def _common_conditions(campaigns: Sequence[CampaignRecord]) -> tuple[Match, ...]:
    both = list(zip(campaigns, _tags(campaigns), strict=True))
    if all(len(campaign.conditions) == 1 for campaign in campaigns):
        return (Match("", tuple(_sides(campaign, (), tag)[0] for campaign, tag in both)),)
    shared = [label for label in campaigns[0].conditions if all(label in c.conditions for c in campaigns)]
    if not shared:
        have = "; ".join(f"{campaign.directory} has {_offer(campaign)}" for campaign in campaigns)
        raise ConfigError(f"the campaigns share no condition ({have}); name one after each directory")
    return tuple(
        Match(label, tuple(_sides(campaign, [label], tag)[0] for campaign, tag in both)) for label in shared
    )


def _sides(campaign: CampaignRecord, names: Sequence[str], tag: str) -> list[Side]:
    chosen = names or campaign.conditions
    if not names and len(chosen) != 1:
        raise ConfigError(
            f"{campaign.directory}: has several conditions; name one after it: {_offer(campaign)}"
        )
    return [fresh(side_of(campaign, name, tag), campaign) for name in chosen]


def fresh(side: Side, campaign: CampaignRecord) -> Side:
    """Return a side without the runs by which a search chose it, if there are others: they were lucky too."""
    searched = campaign.manifest.searched if campaign.manifest else None
    if searched is None or not searched.decides:
        return side
    others = _fresh(side, searched)
    return others if others.runs else side


def side_of(campaign: CampaignRecord, name: str, tag: str = "") -> Side:
    """Return the runs of a condition, or the run of that id, or of that name as `status` shows it."""
    runs = campaign.runs
    chosen = [run for run in runs if run.condition == name] or [
        run for run in runs if name in (run.run_id, f"{run.condition}_s{run.seed}")
    ]
    if tag:
        name = tag if tag.startswith(name) else f"{name} ({tag})"  # a run's directory names both
    return Side(name, tuple(chosen))


def _tags(campaigns: Sequence[CampaignRecord]) -> list[str]:
    """Return short labels of campaigns: the last four digits of their ids, if those differ."""
    if len(campaigns) == 1:
        return [""]
    short = [campaign.id.rpartition("-")[2] for campaign in campaigns]
    return short if len(set(short)) == len(short) else [campaign.id for campaign in campaigns]


def is_counted(run: RunHistory, window: Window) -> bool:
    """Whether a run is over, or comes to the end of a window that has one."""
    if window.end is None:
        return run.is_done
    ends = run.columns.reached(window.per)
    return ends is not None and len(ends) > 0 and ends[-1] >= window.end


def final_value(run: RunHistory, metric: str, window: Window) -> float | None:
    """Return a run's value over a window; None if it does not come to its end or lacks the metric."""
    ends = run.columns.reached(window.per)
    if ends is None or not is_counted(run, window):
        return None
    if metric.startswith(HELD_OUT):
        return _held_out(run, metric, window, ends)
    return window.mean(ends, run.columns.metric(metric).tolist())


def _held_out(run: RunHistory, metric: str, window: Window, ends: Sequence[float]) -> float | None:
    final = measured(run.result.get(metric))
    if window.is_last and window.end is None and metric in run.result:
        return None if math.isnan(final) else final
    return mean([value for _, value in _evaluations(run, metric, window, ends)])


def _evaluations(
    run: RunHistory, metric: str, window: Window, ends: Sequence[float]
) -> list[tuple[float, float]]:
    """Return where on the axis the evaluations of a run were made that count, and their values."""
    values, placed = run.columns.metric(metric).copy(), window.placed(ends)
    if len(values) and np.isnan(values[-1]):
        values[-1] = measured(run.result.get(metric))
    made = np.flatnonzero(np.isfinite(values)).tolist()
    return [(float(placed[row]), float(values[row])) for row in window.evaluations(ends, made)]


def _made_before(runs: Sequence[RunHistory], metric: str, window: Window) -> str:
    """Return how many runs count with an evaluation from before a window, as a clause; "" if none does."""
    earlier, counted = list[float](), 0
    for run in runs:
        ends = run.columns.reached(window.per)
        if ends is None or not len(ends) or not is_counted(run, window):
            continue
        evaluations = _evaluations(run, metric, window, ends)
        counted += bool(evaluations)
        end = window.end or ends[-1]
        begin = math.nextafter(end, 0.0) if window.is_last else window.bounds(end)[0]
        earlier += [at for at, _ in evaluations if at <= begin]
    if not earlier:
        return ""
    least, most = amount(min(earlier)), amount(max(earlier))
    at = least if least == most else f"{least} to {most}"
    return (
        f"; {len(earlier)} of {count_of(counted, 'run')} made none there, and the last one before counts, "
        f"at {at} {AXES[window.per].unit}"
    )


def end_step(run: RunHistory, window: Window) -> int:
    """Return in which of its steps a run comes to the end of a window."""
    if window.end is None:
        return run.last_step
    if window.per == STEPS:
        return math.ceil(window.end)
    row = bisect_left(run.columns.reached(window.per) or (), window.end)
    return int(run.columns.steps[min(row, len(run.columns.steps) - 1)])


def at_equal_amounts(window: Window, sides: Sequence[Side]) -> tuple[Window, str]:
    """Return the part of a window that all finished runs come to, and what is cut off, as a sentence.

    Seeds that stopped at an earlier rung than others of their condition shorten nothing, and are left out:
    the first seeds go on, whatever their values.

    Raises:
        ConfigError: a condition's rows do not tell the window's axis, or a run ends before it begins.
    """
    if window.is_last:
        return window, ""
    lacking, reaches = list[str](), dict[str, float]()
    for side in sides:
        with_rows = [run for run in side.runs if run.last_step]
        judged = [run for run in with_rows if run.is_done] or with_rows
        without = sum(run.columns.reached(window.per) is None for run in judged)
        if without:
            lacking.append(f"{side.label} ({without} of {count_of(len(judged), 'run')})")
        ended = [(run, run.columns.reached(window.per)) for run in judged if run.is_done]
        reached = [(run, float(ends[-1])) for run, ends in ended if ends is not None]
        furthest = max((reach for _, reach in reached), default=0.0)
        for run, reach in reached:
            if STOPPED not in run.result or reach == furthest:
                reaches[f"{run.name} of {side.label}" if run.name in reaches else run.name] = reach
    if lacking:
        axis = AXES[window.per]
        raise ConfigError(
            f"--per {window.per}: rows of {first_of(lacking)} have no {axis.keys[0]}: {axis.remedy}; "
            f"or compare --per {', '.join(name for name in AXES if name != window.per)}"
        )
    return window.among(reaches)


def averaged(window: Window, directory: Path, rows: list[RunRow]) -> tuple[list[RunRow], Window, str]:
    """Return rows of a directory's runs whose rewards are means over a window, for `survey`.

    Runs that are not compared yet have none. Also the part of the window that all finished runs come to, and
    what is cut off, or why there is no value.
    """
    axis_keys = {key for axis in AXES.values() for key in axis.keys}
    histories = dict[str, RunHistory]()
    try:
        named = {f"eval_{row.named_eval}_reward" for row in rows}
        campaign = gather(directory, {"mean_reward", "eval_reward", *named, *axis_keys})
        histories = {run.run_id: run for run in campaign.runs}
        window, note = at_equal_amounts(window, conditions(campaign))
    except (ConfigError, RecordsError) as error:
        note = str(error)

    def over(row: RunRow, metric: str) -> float | None:
        return final_value(histories[row.run_id], metric, window) if row.run_id in histories else None

    return (
        [
            replace(
                row,
                reward_mean=over(row, "mean_reward"),
                reward_steps=None,
                eval_reward=over(row, "eval_reward"),
                named_eval_reward=over(row, f"eval_{row.named_eval}_reward") if row.named_eval else None,
            )
            for row in rows
        ],
        window,
        note,
    )


def unscored_share(run: RunHistory, metric: str, window: Window) -> float:
    """Return the share without a score of the completions that a metric, "" for training, is of."""
    key, is_held_out = unscored_key(metric), metric.startswith(HELD_OUT)
    if is_held_out and window.end is None:
        share = measured(run.result.get(key))
    else:
        is_evaluated = np.isfinite(run.columns.metric(metric if is_held_out else UNSCORED))
        rows = np.flatnonzero(is_evaluated & (run.columns.steps <= end_step(run, window)))
        share = float(run.columns.metric(key)[rows[-1]]) if len(rows) else 0.0
    return 0.0 if math.isnan(share) else share


def describe(metric: str, window: Window, runs: Sequence[RunHistory] = ()) -> str:
    """Return how a metric's value is computed, and over how many steps of these runs."""
    is_held_out = metric.startswith(HELD_OUT)
    before = _made_before(runs, metric, window) if is_held_out else ""
    if not window.is_last:
        return f"mean {'of the held-out evaluations ' if is_held_out else ''}over {window}{before}"
    at = "at the end" if window.end is None else f"at step {amount(window.end)}"
    if is_held_out:
        return f"held-out evaluation {at}{before if window.end else ''}"
    ends = {end_step(run, window) for run in runs if is_counted(run, window)}
    steps = sorted({min(end, window.last or steps_averaged(end)) for end in ends})
    count = window.last or FEWEST_STEPS if not steps else steps[0]
    more = f" to {steps[-1]}" if len(steps) > 1 else ""
    return f"mean of the last {count}{more} steps {at}"


def known_metrics(runs: Iterable[RunHistory]) -> tuple[str, ...]:
    """List the metrics of all runs, in the order of their rows."""
    names: dict[str, None] = {}
    for run in runs:
        names |= dict.fromkeys(run.columns.metrics)
        names |= dict.fromkeys(
            key
            for key, value in run.result.items()
            if key.startswith(HELD_OUT) and not math.isnan(measured(value))
        )
    return tuple(names)


def check_metrics(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ConfigError for a metric that no run has, unless no run has any."""
    for name in names:
        if known and name not in known:
            others = hint(name, known, f"there are {', '.join(known)}")
            raise ConfigError(f"--metric {plain(name)}: no run has it; {plain(others, 2000)}")
