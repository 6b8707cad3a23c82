"""`retrain status --watch`: a view that follows files, on a terminal, as lines, or as JSON.

`frame` lays a view out for a size and knows no terminal; `screen` shows frames, `stream` lines.
"""
