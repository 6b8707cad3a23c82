"""The training loop of one run, its checkpoints, and the controllers that steer it."""
