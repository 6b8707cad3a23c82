"""What every room uses, and what knows none of them.

It takes nothing of a campaign, and hands on errors with their exit codes, the data that all parts exchange
(`rollouts`), the search for plugins and the check of their contracts (`registry`), file locks, and small
parts for processes, threads and HTTP. It never imports another room, and never decides anything about a run.
"""
