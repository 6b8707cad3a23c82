"""Charts -> PNG or SVG, without a browser and without a network (vl-convert)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Literal

from retrain import extras
from retrain.report.charts import Chart

VEGA_LITE = "6.1"  # of those that vl-convert holds, the last whose nearest-point tooltips show text (PR 9707)
BUNDLE = """
import sys, vl_convert
sys.stdout.buffer.write(vl_convert.javascript_bundle(vl_version=sys.argv[1]).encode())
"""
SCALE = 3.0  # pixels per point of a PNG: 300 dpi at the width of a page


def render_images(charts: Sequence[Chart], form: Literal["png", "svg"]) -> dict[str, bytes]:
    """Draw charts; gives name -> file's content.

    Raises:
        ConfigError: vl-convert is not installed.
    """
    return {chart.name: _draw(json.dumps(chart.spec, allow_nan=False), form) for chart in charts}


def bundle() -> str:
    """Return the scripts that draw charts in a browser: Vega, Vega-Lite and vega-embed.

    Made in a process of its own, because the engine that makes them keeps 130 MB to its process's end.

    Raises:
        ConfigError: vl-convert is not installed.
    """
    _converter()
    command = [sys.executable, "-P", "-c", BUNDLE, VEGA_LITE]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout


def _converter() -> Any:
    return extras.load("vl_convert", "report", "retrain report")


def _draw(spec: str, form: Literal["png", "svg"]) -> bytes:
    vl_convert = _converter()
    if form == "svg":
        return bytes(str(vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)), "utf-8")
    return bytes(vl_convert.vegalite_to_png(spec, vl_version=VEGA_LITE, scale=SCALE))
