"""Learning rate and batch size: the rules, the gradient noise scale, and goodput."""
