"""A view laid out for a size: lines from the top of the screen to its bottom."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from rich.text import Text

from retrain.clock import posix_s
from retrain.records.text import counts_of
from retrain.render.status import resume_lines, time_left
from retrain.render.tables import BAD, STYLES
from retrain.render.watch.runs import FULL, Glyphs, bar, informative, legend, matrix, run_lines
from retrain.status.survey import CampaignStatus, PermitStatus
from retrain.status.tracking import Event
from retrain.status.watch import View, WatchedCampaign

LEAST_CAMPAIGN = 8  # lines below which a campaign gets a single one
MOST_EVENTS = 12
SHORT = 20  # lines of a screen whose events make room for runs
WIDEST_BAR = 60
SHOWN_HOLDERS = 3
WIDE = 90
_KINDS = {"started": "cyan", "resumed": "cyan", "batch": "default"} | dict.fromkeys(
    ("retried", "throttle", "paused", "notice"), "yellow"
)


def frame(view: View, width: int, height: int, where: str, glyphs: Glyphs = FULL) -> list[Text]:
    """Lay out campaigns, events and a last line with the keys, in at most `height` lines."""
    if height < 3 or width < 10:
        states = counts_of(campaign.status.state for campaign in view.campaigns)
        return _cut([Text(f"{where}: {states}")], width, height)
    events = min(len(view.events), height // 4 if height >= SHORT else height // 12, MOST_EVENTS)
    several = len(_chosen(view)) > 1
    room = height - 1 - (events + 1 if events else 0)
    lines = _campaigns(view, width, room, where, glyphs)
    lines += [Text()] * (room - len(lines))
    if events:
        lines.append(Text("last events", style="dim"))
        lines += [event_line(event, several=several) for event in _last(view.events, events)]
    leaving = "q quits, runs continue   " if width >= WIDE else "q quits   "
    lines.append(Text(leaving + legend(glyphs), style="dim"))
    return _cut(lines, width, height)


def _cut(lines: list[Text], width: int, height: int) -> list[Text]:
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[:height]


def event_line(event: Event, *, several: bool = False) -> Text:
    """Return an event as a line, at this machine's time of day."""
    style = _KINDS.get(event.kind) or STYLES.get(event.kind, BAD)
    name = "/".join(filter(None, (event.campaign if several else "", event.run_id)))
    line = Text.assemble((clock(event.at), "dim"), " ", (event.kind, style), f" {name}" if name else "")
    return line.append(f": {event.text}") if event.text else line


def clock(at: str) -> str:
    """Return a record's time as the local time of day; blanks if it cannot be parsed."""
    seconds = posix_s(at)
    return " " * 8 if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))


def _last(events: Sequence[Event], count: int) -> list[Event]:
    """Choose the last events; changes of a batch, of which there are many, fill the room that is left."""
    others = [event for event in events if event.kind != "batch"][-count:]
    filling = [event for event in events if event.kind == "batch"][-count:]
    chosen = [*others, *(filling[len(others) - count :] if len(others) < count else ())]
    return sorted(chosen, key=attrgetter("at"))


def _campaigns(view: View, width: int, height: int, where: str, glyphs: Glyphs) -> list[Text]:
    if not view.campaigns:
        return [Text(f"{where}: no campaigns yet; start one with `retrain FILE.toml`")]
    in_full = _chosen(view)[-max(1, (height - 1) // LEAST_CAMPAIGN) :]
    others = [c for c in view.campaigns if c not in in_full]
    lines = _others(others)
    for left, campaign in enumerate(in_full):
        room = (height - len(lines)) // (len(in_full) - left)
        lines += _campaign(campaign, width, room, glyphs)
    return lines


def _chosen(view: View) -> Sequence[WatchedCampaign]:
    """Return the campaigns to show: those that run, or else the latest."""
    return [c for c in view.campaigns if c.status.state == "running"] or view.campaigns[-1:]


def _others(others: Sequence[WatchedCampaign]) -> list[Text]:
    if not others:
        return []
    counts = Counter(campaign.status.state for campaign in others)
    line = Text("other campaigns: ", style="dim")
    for number, (name, count) in enumerate(counts.most_common()):
        line.append(", " if number else "").append(f"{count} {name}", style=STYLES.get(name, BAD))
    return [line]


def _campaign(campaign: WatchedCampaign, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    status = campaign.status
    lines = [_title(status, width), _progress(status, width, glyphs)]
    if status.problem:
        lines.append(Text(status.problem, style=BAD))
    lines += [Text(part, style="yellow") for line in resume_lines(status) for part in _wrapped(line, width)]
    if status.permits is not None:
        lines.append(_permits(status.permits, glyphs))
    room = height - len(lines) - 1
    wanted_by_runs = min(informative(campaign), max(3, room // 2)) + 2
    if len(status.conditions) > 1 or len(status.seeds) > 1:
        lines += matrix(status, width, max(room - wanted_by_runs, room // 2), glyphs)
    lines += run_lines(campaign, width, height - len(lines) - 1, glyphs)
    return [*lines[: max(1, height - 1)], Text()]


def _wrapped(line: str, width: int) -> list[str]:
    """Break a line that holds a command, which must be whole; other characters may be two columns wide."""
    return textwrap.wrap(line, width if line.isascii() else width // 2, break_on_hyphens=False)


def _title(status: CampaignStatus, width: int) -> Text:
    steps = f"{status.steps_done}/{status.steps_total or '?'} steps"
    states = counts_of(run.state for run in status.runs)
    shown = status.id if len(status.id) + len(steps) + 14 <= width else status.name
    title = Text.assemble((shown, "bold"), "  ", (status.state, STYLES.get(status.state, BAD)), f"  {steps}")
    return title.append(f"  {states}", style="dim") if len(status.runs) > 1 else title


def _progress(status: CampaignStatus, width: int, glyphs: Glyphs) -> Text:
    fraction = status.steps_done / status.steps_total if status.steps_total else 0.0
    left = f"  {100 * fraction:3.0f} %  {time_left(status)}".rstrip()
    size = max(4, min(WIDEST_BAR, width - len(left)))
    return bar(fraction, size, glyphs, STYLES.get(status.state, BAD)).append(left)


def _permits(permits: PermitStatus, glyphs: Glyphs) -> Text:
    holders = [holder.label or str(holder.pid) for holder in permits.holders]
    held = ", ".join(holders[:SHOWN_HOLDERS]) + (glyphs.more if len(holders) > SHOWN_HOLDERS else "")
    line = Text(f"permits {len(holders)}/{permits.permits} held")
    line.append(f", {permits.waiting} waiting", style="yellow" if permits.waiting else "dim")
    why = f"  ({permits.change})" if permits.change else ""
    return line.append(f"  {held}{why}", style="dim") if held or why else line
