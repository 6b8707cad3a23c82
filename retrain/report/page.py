"""One HTML file with everything in it: styles, scripts, data. Viewing it asks the network for nothing.

A content security policy enforces that: no address may be fetched, and no script runs but the two whose
hashes the page itself names. So text from runs, however hostile, stays text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any

from retrain.report.charts import Chart
from retrain.report.charts.curves import (
    Plot,
    axis_title,
    curve_chart,
    describe,
    domain,
    has_band,
    is_sparse,
    line_ends,
)
from retrain.report.contents import Contents, Explored
from retrain.report.images import bundle
from retrain.report.markup import NOTHING, Html, data, paragraph, tag, text
from retrain.report.numbers import rounded
from retrain.report.sections import Section, headline, sections
from retrain.report.series import Curve
from retrain.report.targets import MARK

LABEL = "\0label"  # stands in the template where a metric's name goes; no name can hold it
SHOWN_FIRST = ("entropy", "tokens_per_second")
HOW_TO = (
    "Hover for values. Drag moves, Ctrl + wheel or a pinch zooms, a double click resets; "
    "⋯ saves a chart as SVG or PNG."
)


def page(contents: Contents) -> str:
    """Write the page."""
    library, script = bundle(), _file("page.js")
    shown = sections(contents)
    body = [
        _navigation(shown),
        _header(contents),
        *_sections(contents, shown),
        data("charts", {chart.name: chart.spec for chart in contents.charts}),
        Html(f"<script>{_inline(library)}</script>"),
        Html(f"<script>{_inline(script)}</script>"),
    ]
    head = [
        '<meta charset="utf-8">',
        f'<meta name="generator" content="{MARK.decode()}">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(library, script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        tag("title", text(contents.campaign.id)),
        f"<style>{_file('page.css')}</style>",
    ]
    opening = ["<!doctype html>", '<html lang="en">', "<head>", *head, "</head>", "<body>"]
    return "\n".join([*opening, *body, "</body>", "</html>", ""])


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{_digest(_inline(script))}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _inline(script: str) -> str:
    """Make a script that cannot end its own element, nor hide its end (HTML, 'script data' states)."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _file(name: str) -> str:
    return resources.files("retrain.report").joinpath(name).read_text(encoding="utf-8")


def _sections(contents: Contents, shown: Sequence[Section]) -> Iterator[Html]:
    for anchor, title, inside, charts in shown:
        figures = map(_figure, charts)
        yield tag("section", tag("h2", text(title)), *figures, inside, id=anchor)
        if anchor == "learning":
            yield _explorer(contents)


def _navigation(shown: Sequence[Section]) -> Html:
    return tag("nav", *(tag("a", text(title), href=f"#{anchor}") for anchor, title, _, _ in shown))


def _header(contents: Contents) -> Html:
    not_drawn = len(contents.sides) - len(contents.drawn)
    beyond = paragraph(f"Charts show the first {len(contents.drawn)} of {len(contents.sides)} conditions.")
    problems = [paragraph(problem, class_="problem") for problem in contents.campaign.problems]
    return tag(
        "header",
        tag("h1", text(contents.campaign.id)),
        paragraph(headline(contents.campaign), class_="lead"),
        paragraph(HOW_TO, class_="note screen") if contents.charts else NOTHING,
        beyond if not_drawn else NOTHING,
        *problems,
    )


def _figure(chart: Chart) -> Html:
    return tag("figure", tag("div", class_="chart", data_chart=chart.name))


def _explorer(contents: Contents) -> Html:
    if not contents.explored:
        return NOTHING
    names = [one.metric for one in contents.explored]
    first = next((name for name in SHOWN_FIRST if name in names), names[0])
    options = [
        tag("option", text(name), value=name, **({"selected": ""} if name == first else {})) for name in names
    ]
    choice = tag("label", text("Metric: "), tag("select", *options, id="metric"), class_="screen")
    chart = tag("figure", tag("div", class_="chart", id="explored"))
    return tag(
        "section", tag("h3", text("Any metric")), tag("p", choice), chart, data("metrics", _metrics(contents))
    )


def _metrics(contents: Contents) -> dict[str, Any]:
    """All metrics, small: numbers in columns, names once."""
    banded = next((one for one in contents.explored if has_band(one.curves)), contents.explored[0])
    plot = Plot("explored", LABEL, "", "", last_step=contents.bins.last_step)
    template = curve_chart(plot, banded.curves, contents.drawn, is_all=True).spec | {"data": {"values": []}}
    number = {label: i for i, label in enumerate(contents.drawn)}
    return {
        "template": template,
        "label": axis_title(LABEL),
        "conditions": list(contents.drawn),
        "metrics": {explored.metric: _explored(explored, contents, number) for explored in contents.explored},
    }


def _explored(explored: Explored, contents: Contents, number: dict[str, int]) -> dict[str, Any]:
    return {
        "title": [axis_title(explored.metric)],
        "label": axis_title(explored.metric),
        "subtitle": [describe(explored.curves, contents.bins)],
        "domain": [rounded(limit) for limit in domain(explored.curves)],
        "sparse": is_sparse(explored.curves),
        "curves": [_columns(one, number[one.condition]) for one in explored.curves],
        "ends": line_ends(explored.curves, domain(explored.curves)),
    }


def _columns(one: Curve, condition: int) -> dict[str, Any]:
    has_band = bool((one.low == one.low).any())
    return {
        "c": condition,
        "s": [round(step, 1) for step in one.steps.tolist()],
        "m": [rounded(x) for x in one.mean.tolist()],
        "l": [rounded(x) for x in one.low.tolist()] if has_band else [],
        "h": [rounded(x) for x in one.high.tolist()] if has_band else [],
        "n": [int(x) for x in one.seeds.tolist()] if one.seeds.max() > 1 else [],
        "e": [[rounded(x) for x in values] for values in one.each.tolist()],
    }
