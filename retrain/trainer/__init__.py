"""The training loop of one run, its checkpoints and its controllers."""
