"""A campaign's runs in little room: a matrix of characters, and a line for each run that matters now.

States and curves are single characters, distinct without colour; ASCII where the encoding has no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from retrain.plan.durations import MISSING
from retrain.records.run_row import RunRow
from retrain.records.text import counts_of
from retrain.render.status import WATCH_COLUMNS, run_name
from retrain.render.tables import BAD, STYLES
from retrain.status.survey import CampaignStatus
from retrain.status.tracking import WatchedRun
from retrain.status.watch import WatchedCampaign

_ORDER = {"running": 0, "interrupted": 2, "done": 4, "pending": 5}
_BAD_ORDER = 1
WIDEST_NAME = 32
LEAST_SPARK, WIDEST_SPARK = 8, 40
GAP = 2
WIDEST_CONDITION, LEAST_CONDITION = 28, 8  # characters of a name in the matrix
WIDEST_CELL = 24


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a terminal."""

    levels: str  # from low to high; a running run shows how far it is
    done: str
    failed: str
    pending: str
    interrupted: str
    bar: str  # full, half, empty
    more: str


FULL = Glyphs("▁▂▃▄▅▆▇█", "✓", "✗", "·", "‖", "━╸─", "…")
ASCII = Glyphs("_.-=+*%@", "v", "x", ".", "|", "#> ", "~")


def state_cell(run: RunRow | None, glyphs: Glyphs) -> tuple[str, str]:
    """Return one character for a run, and its style; a blank for one that was never planned."""
    if run is None:
        return " ", ""
    calm = {"done": glyphs.done, "pending": glyphs.pending, "interrupted": glyphs.interrupted}
    if run.state == "running":
        return level(run.step / run.max_steps if run.max_steps else 0.0, glyphs), STYLES["running"]
    return calm.get(run.state, glyphs.failed), STYLES.get(run.state, BAD)


def level(fraction: float, glyphs: Glyphs) -> str:
    """Return a character for a number from 0 to 1."""
    steps = len(glyphs.levels)
    return glyphs.levels[min(steps - 1, max(0, int(fraction * steps)))]


def sparkline(values: Sequence[float], width: int, low: float, high: float, glyphs: Glyphs) -> str:
    """Draw values over at most `width` characters, between `low` and `high`."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [len(values) * i // count for i in range(count + 1)]
    means = [sum(values[begin:end]) / (end - begin) for begin, end in pairwise(edges)]
    span = high - low
    return "".join(level((mean - low) / span if span > 0 else 0.5, glyphs) for mean in means)


def bar(fraction: float, width: int, glyphs: Glyphs, style: str) -> Text:
    """Draw how much of something is done."""
    full, half, empty = tuple(glyphs.bar)
    halves = round(min(1.0, max(0.0, fraction)) * width * 2)
    done = full * (halves // 2) + half * (halves % 2)
    return Text.assemble((done, style), (empty * (width - len(done)), "dim"))


def legend(glyphs: Glyphs) -> str:
    """Return what the characters mean, the rarest last."""
    return (
        f"{glyphs.done} done {glyphs.levels[1]}{glyphs.levels[5]} running {glyphs.failed} failed "
        f"{glyphs.pending} pending {glyphs.interrupted} interrupted"
    )


def matrix(campaign: CampaignStatus, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Lay out a matrix in at most `height` lines; what does not fit is counted."""
    if height < min(3, len(campaign.conditions) + 1):  # no room for any condition
        return []
    cells = {(run.condition, run.seed): run for run in campaign.runs}
    seeds = [MISSING if seed is None else str(seed) for seed in campaign.seeds]
    name_width = _name_width(campaign, width)
    cell, shown = _columns(seeds, width - name_width - 2)
    lines = [_header(seeds, shown, cell, name_width, glyphs)]
    conditions = campaign.conditions
    fitting = len(conditions) if len(conditions) < height else height - 2
    for condition in conditions[:fitting]:
        runs = [cells.get((condition.condition, seed)) for seed in campaign.seeds[:shown]]
        lines.append(_line(condition.condition, runs, cell, name_width, glyphs))
    if fitting < len(conditions):
        lines.append(Text(f"  and {len(conditions) - fitting} more conditions", style="dim"))
    return lines


def _columns(seeds: Sequence[str], room: int) -> tuple[int, int]:
    """Return the width of a column, and how many of them there is room for."""
    cell = max(map(len, seeds), default=1) + 1
    if cell * len(seeds) <= room:
        return cell, len(seeds)
    return 1, len(seeds) if len(seeds) <= room else max(1, room - 6)  # without the seeds' names


def _name_width(campaign: CampaignStatus, width: int) -> int:
    longest = max((cell_len(c.condition) for c in campaign.conditions), default=0)
    return max(LEAST_CONDITION, min(longest, WIDEST_CONDITION, width // 2))


def _header(seeds: Sequence[str], shown: int, cell: int, name_width: int, glyphs: Glyphs) -> Text:
    left = set_cell_size("  seed", name_width + 2)
    if cell > 1:
        return Text(left + "".join(seed.rjust(cell) for seed in seeds), style="dim")
    span = seeds[0] if len(seeds) == 1 else f"{seeds[0]} {glyphs.more} {seeds[shown - 1]}"
    hidden = f" (+{len(seeds) - shown})" if shown < len(seeds) else ""
    return Text(f"{left}{span}{hidden}", style="dim")


def shortened(name: str, width: int, glyphs: Glyphs) -> str:
    """Return a name in exactly so many columns."""
    if cell_len(name) > width > 1:
        return set_cell_size(name, width - 1) + glyphs.more
    return set_cell_size(name, width)


def _line(name: str, runs: Sequence[RunRow | None], cell: int, name_width: int, glyphs: Glyphs) -> Text:
    line = Text("  " + shortened(name, name_width, glyphs))
    for run in runs:
        shown, style = state_cell(run, glyphs)
        line.append(" " * (cell - 1)).append(shown, style=style or None)
    return line


def run_lines(campaign: WatchedCampaign, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """Lay out the most informative runs in at most `height` lines: running, then failed, then the others."""
    runs = sorted(campaign.runs.values(), key=lambda run: _ORDER.get(run.row.state, _BAD_ORDER))
    begun = informative(campaign)
    if height < 2 or not begun:
        return []
    fitting = begun if begun + (begun < len(runs)) < height else max(0, height - 2)
    shown, hidden = runs[:fitting], runs[fitting:]
    curves = [value for run in runs for value in (*run.rewards[:1], *run.rewards[-1:])]
    curves += [value for run in shown for value in run.rewards]
    scale = (min(curves, default=0.0), max(curves, default=1.0))  # one for all: lines can be compared
    lines = _table(shown, width, scale, glyphs) if shown else []
    rest = Text(f"  and {counts_of(run.row.state for run in hidden)}", style="dim")
    return [*lines, rest] if hidden else lines


def informative(campaign: WatchedCampaign) -> int:
    """Count the runs that have more to show than a character in the matrix."""
    return sum(run.row.state != "pending" or bool(run.rewards) for run in campaign.runs.values())


def _table(runs: Sequence[WatchedRun], width: int, scale: tuple[float, float], glyphs: Glyphs) -> list[Text]:
    names = [run_name(run.row) for run in runs]
    name_width = max(3, min(max(map(cell_len, names)), WIDEST_NAME, width // 3))
    room = width - name_width - 2 - GAP
    columns = _fitting([run.row for run in runs], room - LEAST_SPARK)
    header, *lines = ["".join(cells) for cells in zip(*columns, strict=True)] or [""] * (len(runs) + 1)
    spark = min(WIDEST_SPARK, room - cell_len(header))
    curves = set_cell_size("reward over steps" if spark >= 17 else "reward", spark)
    title = f"  {set_cell_size('run', name_width)}{' ' * GAP}{curves}{header}"
    found = [Text(title, style="dim")]
    for run, name, line in zip(runs, names, lines, strict=True):
        state, style = state_cell(run.row, glyphs)
        calm = run.row.state in ("running", "done")
        drawn = set_cell_size(sparkline(run.rewards, spark, *scale, glyphs), spark)
        named = (f" {shortened(name, name_width, glyphs)}", "" if calm else style)
        found.append(Text.assemble((state, style), named, " " * GAP, (drawn, "green"), line))
    return found


def _fitting(runs: Sequence[RunRow], room: int) -> list[list[str]]:
    """Return the header and the cells of each column that fits, padded to its width and a gap."""
    columns: list[list[str]] = []
    for column in WATCH_COLUMNS:
        cells = [column.cell(run) for run in runs]
        if not any(cell not in ("", MISSING) for cell in cells):
            continue
        cells = [
            column.name,
            *(set_cell_size(c, WIDEST_CELL) if cell_len(c) > WIDEST_CELL else c for c in cells),
        ]
        size = GAP + max(map(cell_len, cells))
        room -= size
        if room < 0:
            break
        spaces = [" " * (size - GAP - cell_len(cell)) for cell in cells]
        padded = [s + c if column.is_right else c + s for s, c in zip(spaces, cells, strict=True)]
        columns.append([" " * GAP + cell for cell in padded])
    return columns
