"""Text for people: made safe to show on a terminal, quoted for a shell, counts, lists and time spans."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

# Escape sequences are removed whole; otherwise their parameters would remain as visible text.
_ESCAPES = re.compile(
    r"(?:\x1b\]|\x9d)[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, clipboard
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x9c]*(?:\x1b\\|\x9c)?"  # DCS, SOS, PM, APC
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # CSI: colours, cursor
    r"|\x1b[ -/]*[0-~]?"
)
MISSING = "-"
CUT = "…"
LONGEST_KEY = 5  # of `key=value` in a label
UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")
_READ_AHEAD = 16  # read this many times the limit, so that megabytes of escapes cost nothing


def plain(text: str, limit: int = 200) -> str:
    """Return `text` on one line, without anything that a terminal would interpret or hide.

    Escape sequences, control characters (C0, C1), bidirectional and zero-width controls, lone
    surrogates and private-use characters are removed; white space becomes a single space. At
    most `limit` characters, the last one an ellipsis if something was cut.
    """
    if text.isascii() and text.isprintable() and len(text) <= limit and "  " not in text:
        return text.strip()
    visible = _ESCAPES.sub("", text[: limit * _READ_AHEAD])
    # str.isprintable is false for exactly Unicode's "other" and "separator" characters
    kept = "".join(c if c.isprintable() else " " if c.isspace() else "" for c in visible)
    line = " ".join(kept.split())
    cut = len(line) > limit or len(text) > limit * _READ_AHEAD
    return line[: limit - 1].rstrip() + "…" if cut else line


def plain_lines(text: str) -> list[str]:
    """Return lines, indentation kept, without anything that a terminal would interpret or hide."""
    visible = _ESCAPES.sub("", text).expandtabs(4)
    return [
        "".join(c if c.isprintable() else " " if c.isspace() else "" for c in line).rstrip()
        for line in visible.splitlines()
    ]


def as_typed(path: Path) -> str:
    """Return a path quoted for a shell, for commands that users copy."""
    return shlex.quote(str(path))


def name_of_run(run_id: str, condition: str, seed: int | None) -> str:
    """Return what a run is called wherever it is shown: its id, unless the id cannot spell its condition.

    Commands accept both.
    """
    return run_id if seed is None or condition.isascii() else f"{condition}_s{seed}"


def count_of(number: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def counts_of(names: Iterable[str]) -> str:
    """Return how often each name occurs, the most frequent first: `2 done, 1 failed`."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


def gib(size_bytes: float) -> str:
    """Return `1.5 GiB`; less than a tenth as `39 MiB`."""
    return f"{size_bytes / 2**30:.1f} GiB" if size_bytes >= 2**30 / 10 else f"{size_bytes / 2**20:.0f} MiB"


def first_of(names: Sequence[str], shown: int = 5) -> str:
    """Return the first names of many: `a, b and 3 more`."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def without_middle(name: str, limit: int, more: str = "…") -> str:
    """Return a name in at most `limit` columns of a terminal: of a longer one the start and the end."""
    from rich.cells import cell_len, set_cell_size  # not at the top: workers show nothing

    if cell_len(name) <= limit:
        return name
    end = limit // 2
    return set_cell_size(name, limit - end - 1) + more + set_cell_size(name[::-1], end)[::-1]


def short_labels(names: Sequence[str], limit: int) -> list[str]:
    """Return a label for each name: names that all fit, otherwise labels of so many characters.

    Words that all share are left out, then keys are cut, then the middles of labels. A step that would make
    two labels equal, or one empty, is not taken.
    """
    labels = list(names)
    for shorter in (
        _without_shared,
        _with_short_keys,
        lambda names: [without_middle(n, limit) for n in names],
    ):
        if max(map(len, labels), default=0) <= limit:
            break
        shortened = shorter(labels)
        if all(shortened) and len(set(shortened)) == len(set(names)):
            labels = shortened
    return labels


def _without_shared(labels: Sequence[str]) -> list[str]:
    shared = set.intersection(*(set(label.split()) for label in labels))
    return [" ".join(word for word in label.split() if word not in shared) for label in labels]


def _with_short_keys(labels: Sequence[str]) -> list[str]:
    keys = {word.partition("=")[0] for label in labels for word in label.split() if "=" in word}
    short = {key: f"{key[: LONGEST_KEY - 1]}{CUT}" if len(key) > LONGEST_KEY else key for key in keys}
    if len(set(short.values())) < len(keys):
        return list(labels)

    def cut(word: str) -> str:
        key, equals, value = word.partition("=")
        return f"{short[key]}={value}" if equals else word

    return [" ".join(map(cut, label.split())) for label in labels]


def without_score(fraction: float, outage_fraction: float | None, reason: str = "", of: str = "") -> str:
    """Return which share of completions has no score, which of the two reasons it has, and the first."""
    why, first = "", f"; the first: {reason}" if reason else ""
    if outage_fraction is not None:
        why = ": the scorer failed or timed out"
        if not outage_fraction:
            why = ": the reward cannot judge them"
        elif outage_fraction < fraction:
            why += f" for {100 * outage_fraction:.3g} %, and cannot judge the others"
    return f"{100 * fraction:.3g} % of completions{of} have no score{why}{first}"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many digits, or a dash."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else "none"
    return f"{value:.{digits}f}"


def format_duration(seconds: float | None) -> str:
    """Format a span in two digits or two units: `4.0 ms`, `0.10 s`, `9.5 s`, `3 h 20 min`; or a dash."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 59.5:
        # from 0.0995 s on it rounds to 0.10 s
        size, unit = (seconds * 1000, "ms") if 0 < seconds < 0.0995 else (seconds, "s")
        return f"{size:#.2g}".rstrip(".") + f" {unit}" if size else "0 s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def about(seconds: float) -> str:
    """Format a span to the precision of an estimate: `31 min`, not `31 min 4 s`."""
    if 600 <= seconds < 3600:
        seconds = round(seconds / 60) * 60
    return format_duration(seconds).removesuffix(" 0 s").removesuffix(" 0 min").removesuffix(" 0 h")


def dollars(usd: float | None) -> str:
    """Format money: `$12.30`, `$0.0042`; or a dash."""
    if usd is None or not math.isfinite(usd):
        return MISSING
    return f"${usd:,.2f}" if usd >= 0.995 or usd == 0 else f"${usd:.{1 - math.floor(math.log10(usd))}f}"


def parse_duration(text: str) -> float:
    """Read `6h`, `90m`, `90 min`, `1h30m`, `2d`, `45s`; a ValueError if it is no time span, or zero."""
    parts = _PART.findall(text)
    seconds = math.fsum(float(number) * UNITS_S[unit] for number, unit in parts)
    is_read = bool(parts) and not _PART.sub("", text).strip()
    if is_read and seconds == 0:
        raise ValueError(f"got {text!r}; needs a time above 0, such as 6h, 90m or 1h30m")
    if not is_read or seconds == math.inf:
        raise ValueError(f"{text!r} is not a time span; write it as 6h, 90m or 1h30m")
    return seconds
