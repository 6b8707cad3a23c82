"""Vega-Lite charts of rows: each spec stands alone, so page, PNG and SVG are made of the same one."""
