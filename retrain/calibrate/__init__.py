"""Sizes a campaign: short real runs, what they measured, and a file with the recommended values."""
