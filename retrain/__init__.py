"""Plan, run and compare reinforcement-learning campaigns for language models."""
