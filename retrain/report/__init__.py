"""Compares, plots and exports a campaign's history: records in; rows, charts and pages out.

Only `outputs` writes, and nothing here prints.
"""
