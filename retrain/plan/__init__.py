"""A file becomes runs, and what they will take.

It takes a configuration and the records of earlier campaigns, and hands on the plan: runs, forecasts of time
and money, and what a decision or a search wants next. It never creates anything on disk and starts nothing;
only `preflight` builds tasks and opens connections.
"""
