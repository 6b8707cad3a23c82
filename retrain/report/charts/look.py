"""The style of all charts: dark on white, colors for the color-blind, sizes for print.

Specs are dictionaries and not altair's objects: importing altair takes 0.6 s and 30 MB, which would take the
report of a large campaign beyond its 200 MB.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from retrain import extras

Spec = dict[str, Any]

VEGA_LITE = "6.1"  # of the versions in vl-convert, the last whose nearest-point tooltips show text (PR 9707)
SCHEMA = "https://vega.github.io/schema/vega-lite/v6.json"
WIDTH, HEIGHT = 720, 260
FONT = "Helvetica, Arial, Liberation Sans, sans-serif"
INK, FAINT = "#1a1a1a", "#e4e4e4"
# Okabe and Ito's colours, without the yellow, which is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ([1, 0], [6, 3], [2, 2], [8, 2, 2, 2], [12, 4])  # 35 distinct combinations
LEGEND_CONDITIONS = 24  # a legend of more would be larger than the chart
SUBTITLE_WIDTH = 118  # characters
TITLE_WIDTH = 84

CONFIG: Spec = {
    "font": FONT,
    "background": "white",
    "view": {"stroke": None},
    "title": {
        "anchor": "start",
        "fontSize": 15,
        "fontWeight": 600,
        "color": INK,
        "subtitleFontSize": 12,
        "subtitleColor": "#444444",
        "subtitlePadding": 5,
        "offset": 12,
    },
    "axis": {
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": FAINT,
        "domainColor": "#888888",
        "tickColor": "#888888",
        "titlePadding": 8,
        "labelLimit": 220,
        "labelFlush": False,
        "labelOverlap": True,
        "tickCount": 8,
    },
    "legend": {
        "labelFontSize": 12,
        "labelColor": INK,
        "labelLimit": 220,
        "orient": "top",
        "title": None,
        "symbolStrokeWidth": 2.5,
        "columnPadding": 18,
        "offset": 6,
    },
}


@dataclass(frozen=True)
class Chart:
    """A chart, and the name of its file."""

    name: str  # [a-z-]+
    spec: Spec


def chart(
    name: str, title: str, subtitle: str, *, height: int = HEIGHT, room_right: int = 0, **spec: Any
) -> Chart:
    """Return a chart with title, size and style; `room_right` is left free to the right of the plot."""
    lines = textwrap.wrap(subtitle, SUBTITLE_WIDTH)
    heading: Spec = {"text": textwrap.wrap(title, TITLE_WIDTH), **({"subtitle": lines} if lines else {})}
    size = {
        "width": WIDTH,
        "height": height,
        "padding": {"left": 8, "top": 8, "bottom": 8, "right": 8 + room_right},
        "autosize": {"type": "fit-x", "contains": "padding"},
    }
    return Chart(name, {"$schema": SCHEMA, "title": heading, **size, "config": CONFIG, **spec})


def by_condition(
    conditions: Sequence[str], shown: Collection[str] | None = None, *, dashed: bool = False
) -> Spec:
    """Return the encoding that gives each condition its color in all charts, and beyond seven its dashes.

    Args:
        conditions: all of the report.
        shown: those of this chart, which the legend lists; None: all.
        dashed: the chart has lines.
    """
    names = list(conditions)
    listed = [name for name in names if shown is None or name in shown]
    symbol = {"symbolType": "stroke" if dashed else "square", "symbolOpacity": 1, "values": listed}
    legend = symbol if 1 < len(listed) <= LEGEND_CONDITIONS or len(listed) == 1 < len(names) else None
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(names))]
    encoding: Spec = {
        "color": {"field": "c", "type": "nominal", "scale": _scale(names, colours), "legend": legend}
    }
    if dashed:
        dashes = [DASHES[i // len(COLOURS) % len(DASHES)] for i in range(len(names))]
        encoding["strokeDash"] = {
            "field": "c", "type": "nominal", "scale": _scale(names, dashes), "legend": legend
        }  # fmt: skip
    return encoding


def zoom(*axes: str) -> Spec:
    """Return the parameter that lets drag move and Ctrl + wheel zoom; a plain wheel scrolls the page."""
    select = {"type": "interval", "encodings": list(axes), "zoom": "wheel![event.ctrlKey || event.metaKey]"}
    return {"name": "zoom", "select": select, "bind": "scales"}


def quantity(field: str, title: str, **more: Any) -> Spec:
    """Return the encoding of a number."""
    return {"field": field, "type": "quantitative", "title": title, **more}


def hints(*fields: tuple[str, str, str]) -> list[Spec]:
    """Return the encoding of a tooltip: field, title, format ("" for text)."""
    return [
        {"field": field, "title": title, "type": "quantitative", "format": form}
        if form
        else {"field": field, "title": title, "type": "nominal"}
        for field, title, form in fields
    ]


def _scale(names: Sequence[str], values: Sequence[Any]) -> Spec:
    return {"domain": list(names), "range": list(values)}


def converter() -> Any:
    """Import vl-convert, which draws charts without a browser or a network.

    Raises:
        ConfigError: it is not installed.
    """
    return extras.load("vl_convert", "report", "retrain report")
