"""Reads a campaign's whole history into what can be compared, plotted and shared.

Pure but for reading: records in; rows, charts and pages out. Nothing here prints or writes.
"""
