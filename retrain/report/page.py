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
from importlib import resources
from importlib.util import find_spec
from typing import Any

from retrain import extras
from retrain.report import tables, wording
from retrain.report.charts import VEGA_LITE, axis_title, converter
from retrain.report.columns import FloatArray, rounded
from retrain.report.contents import Contents
from retrain.report.curves import curve_chart, describe, domain, has_band, is_sparse, line_ends
from retrain.report.series import Curve

MARK = "retrain report"  # by which retrain recognizes its own file
LABEL = "\0label"  # placeholder for a metric's name in the chart template; no name can contain it
SHOWN_FIRST = ("entropy", "tokens_per_second")
SECTIONS = (
    "summary", "learning", "comparison", "back-pressure", "time", "rate-limiter", "failures", "configuration",
    "provenance",
)  # fmt: skip
TITLES = {name: name.replace("-", " ").capitalize() for name in SECTIONS}
BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle(vl_version=sys.argv[1]).encode())
"""


def page(contents: Contents) -> str:
    """Return the page."""
    library, script = _inline(_bundle()), _inline(_file("page.js"))
    explored = _metrics(contents) if contents.explored else {"metrics": {}}
    return str(
        template(_file("page.html.jinja")).render(
            campaign=contents.campaign,
            charts={chart.name: chart.spec for chart in contents.charts},
            contents=contents,
            explored=explored,
            first_explored=next((name for name in SHOWN_FIRST if name in explored["metrics"]), None),
            library=library,
            mark=MARK,
            policy=_policy(library, script),
            script=script,
            style=_file("page.css"),
            tables=tables,
            titles=TITLES,
            wording=wording,
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
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
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


def _metrics(contents: Contents) -> dict[str, Any]:
    """Return all metrics, small: numbers in columns, names once."""
    found, shown = contents.explored, contents.shown
    banded = next((curves for curves in found.values() if has_band(curves)), next(iter(found.values())))
    (template,) = curve_chart(LABEL, "", banded, shown, is_all=True)
    number = {label: i for i, label in enumerate(shown.labels)}
    return {
        "template": template.spec | {"data": {"values": []}},
        "label": axis_title(LABEL),
        "conditions": list(shown.labels),
        "metrics": {
            metric: {
                "title": [axis_title(metric)],
                "label": axis_title(metric),
                "subtitle": [describe(curves, shown.bins)],
                "domain": [rounded(limit) for limit in domain(curves)],
                "sparse": is_sparse(curves),
                "curves": [_columns(one, number[one.condition]) for one in curves],
                "ends": line_ends(curves, domain(curves)),
            }
            for metric, curves in found.items()
        },
    }


def _columns(one: Curve, condition: int) -> dict[str, Any]:
    def column(values: FloatArray) -> list[float | None]:
        return [rounded(x) for x in values.tolist()]

    return {
        "c": condition,
        "s": [round(step, 1) for step in one.steps.tolist()],
        "m": column(one.mean),
        "l": column(one.low) if has_band([one]) else [],
        "h": column(one.high) if has_band([one]) else [],
        "n": [int(x) for x in one.seeds.tolist()] if one.seeds.max() > 1 else [],
        "e": [column(values) for values in one.each],
    }
