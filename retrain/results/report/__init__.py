"""Compares, plots and exports a campaign's history: from records to rows, charts and pages.

Only `outputs` writes, and nothing here prints.
"""
