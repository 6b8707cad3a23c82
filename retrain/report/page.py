"""The report as one HTML file: styles, scripts and data are inside, and viewing it needs no network.

A content security policy enforces that: no address may be fetched, and no script runs but the two whose
hashes the page itself names. The template escapes every value, so text from runs, however hostile, stays
text.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from typing import Any

from retrain import extras
from retrain.report import tables
from retrain.report.back_pressure import fits
from retrain.report.charts import VEGA_LITE, Spec, axis_title, converter, rounded
from retrain.report.contents import Contents
from retrain.report.curves import curve_chart, describe, domain, has_band, is_sparse, line_ends
from retrain.report.gather import FloatArray
from retrain.report.series import Curve, Shown

MARK = "retrain report"  # by which retrain recognizes its own file
LABEL = "\0label"  # placeholder for a metric's name in the chart template; no name can contain it
SHOWN_FIRST = ("entropy", "tokens_per_second")
SECTIONS = (
    "summary", "learning", "comparison", "back-pressure", "time", "rate-limiter", "failures", "configuration",
    "provenance",
)  # fmt: skip
BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle(vl_version=sys.argv[1]).encode())
"""


@dataclass(frozen=True)
class Explorer:
    """The data of the page's chart of any metric, small: numbers in columns, names once."""

    metrics: dict[str, ExploredMetric]
    template: Spec  # a chart without data
    label: str  # what stands for a metric's name in it
    conditions: tuple[str, ...]


@dataclass(frozen=True)
class ExploredMetric:
    """A metric that can be selected on the page."""

    title: list[str]
    label: str
    subtitle: list[str]
    domain: list[float | None]
    sparse: bool
    curves: list[ExploredCurve]
    ends: list[Spec]


@dataclass(frozen=True)
class ExploredCurve:
    """A condition's curve; an empty column says nothing new."""

    c: int  # number of the condition
    s: list[float]  # steps
    m: list[float | None]  # mean
    l: list[float | None]  # noqa: E741 - its interval from, as charts call it
    h: list[float | None]  # ... and to
    n: list[int]  # seeds
    e: list[list[float | None]]  # each run


def page(contents: Contents) -> str:
    """Return the page."""
    library, script = _inline(_bundle()), _inline(_file("page.js"))
    return str(
        template(_file("page.html.jinja")).render(
            campaign=contents.campaign,
            charts={chart.name: chart.spec for chart in contents.charts},
            contents=contents,
            explored=_explorer(contents) if contents.explored else None,
            first_explored=next((name for name in SHOWN_FIRST if name in contents.explored), None),
            fits=fits,
            library=library,
            mark=MARK,
            policy=_policy(library, script),
            script=script,
            style=_file("page.css"),
            tables=tables,
            titles={name: name.replace("-", " ").capitalize() for name in SECTIONS},
        )
    )


def template(source: str) -> Any:
    """Compile a template that escapes every value, and embeds data as JSON that cannot end its element."""
    jinja2 = extras.load("jinja2", "report", "retrain report")
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_valid,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    as_json = {"allow_nan": False, "separators": (",", ":"), "default": vars}  # of dataclasses too
    environment.policies["json.dumps_kwargs"] = as_json
    return environment.from_string(source)


def _valid(value: Any) -> Any:
    """Replace what HTML cannot hold; markup stays as it is."""
    if hasattr(value, "__html__"):
        return value
    return str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")


def _bundle() -> str:
    """Return the scripts that draw charts in a browser: Vega, Vega-Lite and vega-embed.

    A subprocess makes them, because the engine that it loads keeps 130 MB until its process ends.
    """
    if find_spec("vl_convert") is None:  # importing it here would cost 9 MB
        converter()
    command = [sys.executable, "-P", "-c", BUNDLE, VEGA_LITE]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _inline(script: str) -> str:
    """Make a script that cannot end its own element, nor hide its end (HTML, 'script data' states)."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _file(name: str) -> str:
    return resources.files("retrain.report").joinpath(name).read_text(encoding="utf-8")


def _explorer(contents: Contents) -> Explorer:
    found, shown = contents.explored, contents.shown
    banded = next((lines for lines in found.values() if has_band(lines)), next(iter(found.values())))
    (drawn,) = curve_chart(LABEL, "", banded, shown, is_all=True)
    metrics = {metric: _explored(metric, lines, shown) for metric, lines in found.items()}
    return Explorer(metrics, drawn.spec | {"data": {"values": []}}, axis_title(LABEL), shown.labels)


def _explored(metric: str, lines: Sequence[Curve], shown: Shown) -> ExploredMetric:
    limits, title = domain(lines), axis_title(metric)
    return ExploredMetric(
        title=[title],
        label=title,
        subtitle=[describe(lines, shown.bins)],
        domain=[rounded(limit) for limit in limits],
        sparse=is_sparse(lines),
        curves=[_explored_curve(one, shown.labels.index(one.condition)) for one in lines],
        ends=line_ends(lines, limits),
    )


def _explored_curve(one: Curve, condition: int) -> ExploredCurve:
    def column(values: FloatArray) -> list[float | None]:
        return [rounded(x) for x in values.tolist()]

    return ExploredCurve(
        c=condition,
        s=[round(step, 1) for step in one.steps.tolist()],
        m=column(one.mean),
        l=column(one.low) if has_band([one]) else [],
        h=column(one.high) if has_band([one]) else [],
        n=[int(x) for x in one.seeds.tolist()] if one.seeds.max() > 1 else [],
        e=[column(values) for values in one.each],
    )
