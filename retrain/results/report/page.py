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
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from retrain.base import extras
from retrain.base.errors import RetrainError
from retrain.records.files import read_small, write_atomic
from retrain.records.layout import own_temporary_folder
from retrain.records.rungs import lines_of_search
from retrain.results.report import facts, tables
from retrain.results.report.charts import STYLE, VEGA_LITE, axis_title, converter
from retrain.results.report.contents import Contents
from retrain.results.report.curves import curve_chart, packed

MARK = "retrain report"  # by which retrain recognizes its own file
SHOWN_FIRST = ("entropy", "tokens_per_second")
SECTIONS = (
    "summary", "learning", "curriculum", "episodes", "comparison", "sweep", "back-pressure", "time",
    "rate-limiter", "sampling-servers", "failures", "configuration", "provenance",
)  # fmt: skip
OTHER_POLICIES = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle(vl_version=sys.argv[1]).encode())
"""


def page(contents: Contents) -> str:
    """Return the page."""
    absent = {"sampling-servers", "sweep"} - contents.tables.keys()
    absent |= {"episodes"} if not contents.episodes else set()
    absent |= {"curriculum"} if not contents.calibration else set()
    explored = {}
    for name, lines in contents.explored.items():  # page.js makes the rows of their layers
        spec, curves = (
            curve_chart(name, axis_title(name), lines, contents.learned)[0].spec,
            map(packed, lines),
        )
        for layer in spec["layer"]:
            if layer["encoding"]["y"]["field"] == "v":
                layer["data"] = "seeds"
        explored[name] = spec | {"data": list(curves)}
    library, script = _inline(bundle()), _inline(_file("charts.js") + _file("page.js"))
    digests = [hashlib.sha256(source.encode()).digest() for source in (library, script)]
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return str(
        template(_file("page.html.jinja")).render(
            campaign=contents.campaign,
            charts={chart.name: chart.spec for chart in contents.charts},
            contents=contents,
            explored=explored,
            first_explored=next((name for name in SHOWN_FIRST if name in contents.explored), None),
            library=library,
            lines_of_search=lines_of_search,
            mark=MARK,
            content_security_policy=f"default-src 'none'; script-src {hashes}; {OTHER_POLICIES}",
            script=script,
            style=_file("page.css"),
            vega_style=STYLE,
            facts=facts,
            tables=tables,
            titles={name: name.replace("-", " ").capitalize() for name in SECTIONS if name not in absent},
        )
    )


def template(source: str) -> Any:
    """Compile a template that escapes every value, and embeds data as JSON that cannot end its element."""

    def valid(value: Any) -> Any:
        """Replace what HTML cannot hold; markup stays as it is."""
        if hasattr(value, "__html__"):
            return value
        return str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")

    jinja2 = extras.load("jinja2", "report", "retrain report")
    environment = jinja2.Environment(
        autoescape=True,
        finalize=valid,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment.from_string(source)


@cache
def bundle() -> str:
    """Return the scripts that draw charts in a browser: Vega, Vega-Lite and vega-embed.

    A subprocess makes them in two seconds, because the engine keeps 130 MB until its process ends. They are
    kept among the user's own temporary files.
    """
    if find_spec("vl_convert") is None:  # importing it here would cost 9 MB
        converter()
    kept = f"{VEGA_LITE}-{version('vl-convert-python')}.js"
    with suppress(RetrainError):  # the folder cannot be made, or is not this user's alone
        data = read_small(own_temporary_folder("charts") / kept)
        if data is not None:
            return data.decode()
    command = [sys.executable, "-P", "-c", BUNDLE, VEGA_LITE]
    script = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    with suppress(RetrainError):
        write_atomic(own_temporary_folder("charts") / kept, script)
    return script


def _inline(script: str) -> str:
    """Make a script that cannot end its own element, nor hide its end (HTML, 'script data' states)."""
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _file(name: str) -> str:
    return resources.files("retrain.results.report").joinpath(name).read_text(encoding="utf-8")
