"""Plans: the runs that a file describes, their cost, and whether plugins accept their options.

Nothing is created on disk. Only `preflight` builds tasks and opens connections.
"""
