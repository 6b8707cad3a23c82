"""Rows -> Vega-Lite charts: data inside, the same look, titles that say what is shown.

A chart is a JSON object. It stands alone: the page, the PNG and the SVG are made of the same one.
"""

from retrain.report.charts.look import Chart

__all__ = ["Chart"]
