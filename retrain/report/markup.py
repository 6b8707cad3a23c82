"""HTML out of escaped pieces: text becomes markup here and nowhere else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any, NewType

Html = NewType("Html", str)

NOTHING = Html("")


def text(value: str) -> Html:
    """Escape text; what HTML cannot hold becomes a replacement character."""
    return Html(html.escape(value.encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")))


def tag(name: str, *inside: Html | str, **attributes: str) -> Html:
    """Wrap pieces; plain strings that are not markup must go through `text` first."""
    named = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{named}>{''.join(inside)}</{name}>")


def join(pieces: Iterable[Html]) -> Html:
    """Put pieces one after another."""
    return Html("\n".join(pieces))


def paragraph(value: str, **attributes: str) -> Html:
    """Return a paragraph of text."""
    return tag("p", text(value), **attributes)


def table(columns: Sequence[str], rows: Iterable[Sequence[str | Html]], *, wide: bool = False) -> Html:
    """Lay out cells; columns whose header starts with '>' are aligned right. Cells are escaped."""
    sides = ["number" if column.startswith(">") else "words" for column in columns]
    head = [
        tag("th", text(column.lstrip(">")), class_=side, scope="col")
        for column, side in zip(columns, sides, strict=True)
    ]
    body = [
        tag("tr", *(tag("td", text(cell), class_=side) for cell, side in zip(row, sides, strict=True)))
        for row in rows
    ]
    top = tag("thead", tag("tr", *head)) if any(columns) else NOTHING
    inside = tag("table", top, tag("tbody", *body))
    return tag("div", inside, class_="table wide" if wide else "table")  # fmt: skip


def data(name: str, content: Any) -> Html:
    """Embed JSON that the page's script reads; nothing in it can end the element."""
    dumped = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return Html(
        f'<script type="application/json" id="{name}">{dumped.replace("<", chr(92) + "u003c")}</script>'
    )
