"""A view of campaigns laid out for a size: lines from the top of the screen to its bottom.

A campaign has a matrix, one character a run, and below it a line for each run that matters now. States and
curves are single characters, distinct without colour; `base/streams` has an ASCII one for each.
"""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from operator import attrgetter

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from retrain.base.clock import posix_s
from retrain.cli.render.status import detailed, permit_line, resume_lines, time_left, warnings
from retrain.cli.render.tables import BAD, STYLES
from retrain.records.run_row import RunReading, RunRow
from retrain.records.text import MISSING, counts_of, without_middle
from retrain.results.status import WATCH_COLUMNS, CampaignStatus, last_steps
from retrain.results.status.watch import View, WatchedCampaign, WatchEvent

LEAST_CAMPAIGN = 8  # lines below which a campaign gets a single one
MOST_EVENTS = 12
MOST_NAMED = 3  # runs of each kind of warning
SHORT = 20  # lines of a screen whose events make room for runs
WIDE = 90  # columns; widths of single parts follow
WIDEST_BAR = 60
WIDEST_NAME = 32
WIDEST_CELL = 24
LEAST_SPARK, WIDEST_SPARK = 8, 40
LEAST_CONDITION, WIDEST_CONDITION = 8, 28
GAP = 2
_KINDS = {"started": "cyan", "resumed": "cyan", "batch": "default"} | dict.fromkeys(
    ("retried", "throttle", "paused", "notice"), "yellow"
)
_ORDER = {"running": 0, "interrupted": 2, "waiting": 3, "done": 4, "pending": 5}
_BAD_ORDER = 1
LEVELS = "▁▂▃▄▅▆▇█"  # from low to high; a running run shows how far it is
DONE, FAILED, PENDING, INTERRUPTED = "✓✗·‖"
FULL, HALF, EMPTY = "━╸─"  # of a bar
MORE = "…"


def frame(view: View, width: int, height: int, where: str) -> list[Text]:
    """Lay out campaigns, events and a last line with the keys, in at most `height` lines."""
    if height < 3 or width < 10:
        states = counts_of(campaign.status.state for campaign in view.campaigns)
        return _cut([Text(f"{where}: {states}")], width, height)
    events = min(len(view.events), height // 4 if height >= SHORT else height // 12, MOST_EVENTS)
    room = height - 1 - (events + 1 if events else 0)
    lines = _campaigns(view, width, room, where)
    lines += [Text()] * (room - len(lines))
    if events:
        several = len(_chosen(view)) > 1
        lines.append(Text("last events", style="dim"))
        lines += [event_line(event, several=several) for event in _last(view.events, events)]
    leaving = "q quits, runs continue" if width >= WIDE else "q quits"
    meaning = (  # the rarest last
        f"{DONE} done {LEVELS[1]}{LEVELS[5]} running {FAILED} failed "
        f"{PENDING} pending {INTERRUPTED} interrupted"
    )
    lines.append(Text(f"{leaving}   {meaning}", style="dim"))
    return _cut(lines, width, height)


def campaign_frame(campaign: WatchedCampaign, width: int, height: int) -> list[Text]:
    """Lay out one campaign in at most `height` lines."""
    return _cut(_campaign(campaign, width, height), width, height)


def _cut(lines: list[Text], width: int, height: int) -> list[Text]:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def event_line(event: WatchEvent, *, several: bool = False) -> Text:
    """Return an event as a line, at this machine's time of day."""
    style = _KINDS.get(event.kind) or STYLES.get(event.kind, BAD)
    name = "/".join(filter(None, (event.campaign if several else "", event.name or event.run_id)))
    line = Text.assemble((clock(event.at), "dim"), " ", (event.kind, style), f" {name}" if name else "")
    return line.append(f": {event.text}") if event.text else line


def clock(at: str) -> str:
    """Return a record's time as the local time of day; blanks if it cannot be parsed."""
    seconds = posix_s(at)
    return " " * 8 if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def _last(events: Sequence[WatchEvent], count: int) -> list[WatchEvent]:
    """Choose the last events; changes of a batch, of which there are many, fill the room that is left."""
    others = [event for event in events if event.kind != "batch"][-count:]
    filling = [event for event in events if event.kind == "batch"][-count:]
    chosen = [*others, *(filling[len(others) - count :] if len(others) < count else ())]
    return sorted(chosen, key=attrgetter("at"))


def _campaigns(view: View, width: int, height: int, where: str) -> list[Text]:
    if not view.campaigns:
        return [Text(f"{where}: no campaigns yet; start one with `retrain FILE.toml`")]
    in_full = _chosen(view)[-max(1, (height - 1) // LEAST_CAMPAIGN) :]
    others = Counter(campaign.status.state for campaign in view.campaigns if campaign not in in_full)
    counts = [Text(f"{count} {name}", STYLES.get(name, BAD)) for name, count in others.most_common()]
    lines = [Text("other campaigns: ", style="dim") + Text(", ").join(counts)] if counts else []
    for left, campaign in enumerate(in_full):
        room = (height - len(lines)) // (len(in_full) - left)
        lines += _campaign(campaign, width, room)
    return lines


def _chosen(view: View) -> Sequence[WatchedCampaign]:
    """Return the campaigns to show: those that run, or else the latest."""
    return [c for c in view.campaigns if c.status.state == "running"] or view.campaigns[-1:]


def _campaign(campaign: WatchedCampaign, width: int, height: int) -> list[Text]:
    status = campaign.status
    steps = f"{status.steps_done}/{status.steps_total or '?'} steps"
    shown = status.id if len(status.id) + len(steps) + 14 <= width else status.name
    state = (status.state, STYLES.get(status.state, BAD))
    title = Text.assemble((shown, "bold"), "  ", state, f"  {steps}")
    if len(status.runs) > 1:
        title.append(f"  {counts_of(run.state for run in status.runs)}", style="dim")
    lines = [title, _progress(status, width)]
    if status.problem:
        lines.append(Text(status.problem, style=BAD))
    for line in resume_lines(status):  # its command must be whole; other characters may be two columns wide
        parts = textwrap.wrap(line, width if line.isascii() else width // 2, break_on_hyphens=False)
        lines += [Text(part, style="yellow") for part in parts]
    if status.permits is not None:
        lines.append(permit_line(status.permits))
    lines += map(Text, detailed(status.runs))
    lines += warnings(status.runs, MOST_NAMED)
    room = height - len(lines) - 1
    begun = [run for run in campaign.runs.values() if run.row.state != "pending" or run.rewards]
    wanted_by_runs = min(len(begun), max(3, room // 2)) + 2
    if len(status.conditions) > 1 or len(status.seeds) > 1:
        lines += matrix(status, width, max(room - wanted_by_runs, room // 2))
    lines += _run_lines(campaign, len(begun), width, height - len(lines) - 1)
    return [*lines[: max(1, height - 1)], Text()]


def _progress(status: CampaignStatus, width: int) -> Text:
    fraction = min(1.0, status.steps_done / status.steps_total) if status.steps_total else 0.0
    left = f"  {100 * fraction:3.0f} %  {time_left(status)}".rstrip()
    size = max(4, min(WIDEST_BAR, width - len(left)))
    halves = round(fraction * size * 2)
    done = FULL * (halves // 2) + HALF * (halves % 2)
    style = STYLES.get(status.state, BAD)
    return Text.assemble((done, style), (EMPTY * (size - len(done)), "dim"), left)


def matrix(campaign: CampaignStatus, width: int, height: int) -> list[Text]:
    """Lay out a matrix in at most `height` lines; what does not fit is counted."""
    conditions = [c.condition for c in campaign.conditions]
    if height < min(3, len(conditions) + 1):  # no room for any condition
        return []
    cells = {(run.condition, run.seed): run for run in campaign.runs}
    seeds = [MISSING if seed is None else str(seed) for seed in campaign.seeds]
    longest = max(map(cell_len, conditions), default=0)
    name_width = max(LEAST_CONDITION, min(longest, WIDEST_CONDITION, width // 2))
    room = width - name_width - 2
    cell, shown = max(map(len, seeds), default=1) + 1, len(seeds)
    heads = "".join(seed.rjust(cell) for seed in seeds)
    if len(heads) > room:  # without the seeds' names
        cell, shown = 1, len(seeds) if len(seeds) <= room else max(1, room - 6)
        hidden = f" (+{len(seeds) - shown})" if shown < len(seeds) else ""
        heads = seeds[0] if len(seeds) == 1 else f"{seeds[0]} {MORE} {seeds[shown - 1]}"
        heads += hidden
    lines = [Text(set_cell_size("  seed", name_width + 2) + heads, style="dim")]
    fitting = len(conditions) if len(conditions) < height else height - 2

    def mark(name: str, seed: int | None) -> tuple[str, str]:
        glyph, style = state_cell(cells.get((name, seed)))
        return " " * (cell - 1) + glyph, style

    for name in conditions[:fitting]:
        marks = [mark(name, seed) for seed in campaign.seeds[:shown]]
        lines.append(Text.assemble("  " + _in_columns(name, name_width), *marks))
    if fitting < len(conditions):
        lines.append(Text(f"  and {len(conditions) - fitting} more conditions", style="dim"))
    return lines


def state_cell(run: RunRow | None) -> tuple[str, str]:
    """Return one character for a run, and its style; a blank for one that was never planned."""
    if run is None:
        return " ", ""
    waiting = dict.fromkeys(("pending", "waiting"), PENDING)
    calm = {"done": DONE, "interrupted": INTERRUPTED} | waiting
    if run.state == "running":
        return _level(run.step / run.max_steps if run.max_steps else 0.0), STYLES["running"]
    return calm.get(run.state, FAILED), STYLES.get(run.state, BAD)


def _level(fraction: float) -> str:
    """Return a character for a number from 0 to 1."""
    steps = len(LEVELS)
    return LEVELS[min(steps - 1, max(0, int(fraction * steps)))]


def sparkline(values: Sequence[float], width: int, low: float, high: float) -> str:
    """Draw values over at most `width` characters, between `low` and `high`."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    span = high - low
    return "".join(_level((mean - low) / span if span > 0 else 0.5) for mean in means)


def _in_columns(name: str, width: int) -> str:
    """Return a name in exactly so many columns; its ends tell it from others."""
    return set_cell_size(without_middle(name, width, MORE), width)


def _run_lines(campaign: WatchedCampaign, begun: int, width: int, height: int) -> list[Text]:
    """Lay out the most informative runs in at most `height` lines: running, then failed, then the others."""
    runs = sorted(campaign.runs.values(), key=lambda run: _ORDER.get(run.row.state, _BAD_ORDER))
    if height < 2 or not begun:
        return []
    fitting = begun if begun + (begun < len(runs)) < height else max(0, height - 2)
    shown, hidden = runs[:fitting], runs[fitting:]
    curves = [value for run in runs for value in (*run.rewards[:1], *run.rewards[-1:])]
    curves += chain.from_iterable(run.rewards for run in shown)
    scale = (min(curves, default=0.0), max(curves, default=1.0))  # one for all: lines can be compared
    lines = _table(shown, width, scale) if shown else []
    rest = Text(f"  and {counts_of(run.row.state for run in hidden)}", style="dim")
    return [*lines, rest] if hidden else lines


def _table(runs: Sequence[RunReading], width: int, scale: tuple[float, float]) -> list[Text]:
    names = [run.row.name for run in runs]
    name_width = max(3, min(max(map(cell_len, names)), WIDEST_NAME, width // 3))
    room = width - name_width - 2 - GAP
    columns = _fitting([run.row for run in runs], room - LEAST_SPARK)
    header, *lines = ["".join(cells) for cells in zip(*columns, strict=True)] or [""] * (len(runs) + 1)
    spark = min(WIDEST_SPARK, room - cell_len(header))
    curves = set_cell_size("reward over steps" if spark >= 17 else "reward", spark)
    title = f"  {set_cell_size('run', name_width)}{' ' * GAP}{curves}{header}"
    table = [Text(title, style="dim")]
    for run, name, line in zip(runs, names, lines, strict=True):
        state, style = state_cell(run.row)
        calm = run.row.state in ("running", "done")
        drawn = set_cell_size(sparkline(run.rewards, spark, *scale), spark)
        named = (f" {_in_columns(name, name_width)}", "" if calm else style)
        table.append(Text.assemble((state, style), named, " " * GAP, (drawn, "green"), line))
    return table


def _fitting(runs: Sequence[RunRow], room: int) -> list[list[str]]:
    """Return the header and the cells of each column that fits, padded to its width and a gap."""
    columns: list[list[str]] = []
    for column in WATCH_COLUMNS:
        cells = [set_cell_size(c, min(cell_len(c), WIDEST_CELL)) for c in map(column.cell, runs)]
        if set(cells) <= {"", MISSING}:
            continue
        cells = [column.name.format(last=last_steps(runs)), *cells]
        size = max(map(cell_len, cells))
        room -= GAP + size
        if room < 0:
            break
        spaces = [" " * (size - cell_len(cell)) for cell in cells]
        padded = [s + c if column.is_right else c + s for s, c in zip(spaces, cells, strict=True)]
        columns.append([" " * GAP + cell for cell in padded])
    return columns
