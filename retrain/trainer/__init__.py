"""One run in one process: the loop, and the parts that attach to it.

It takes a run's directory with its `run.toml`, and hands on rows, checkpoints and the marker of a finished
run. It never starts another process of a campaign, and never decides which runs there are.
"""
