"""States and curves as single characters, distinct without colour; ASCII where the encoding has no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.text import Text

from retrain.records.run_row import RunRow
from retrain.render.tables import BAD, STYLES


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
