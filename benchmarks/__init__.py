"""Benchmarks: each module runs alone, prints tables and compares side by side in one run."""
