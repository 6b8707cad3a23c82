"""Conditions x seeds, a character each."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from retrain.records.run_row import RunRow
from retrain.render.text import MISSING
from retrain.render.watch.glyphs import Glyphs, state_cell
from retrain.status.rows import CampaignStatus

WIDEST_NAME = 28
LEAST_NAME = 8


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
    return max(LEAST_NAME, min(longest, WIDEST_NAME, width // 2))


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
