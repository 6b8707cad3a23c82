"""Studies that were made once, or answer a question of a design; `python -m benchmarks` runs none of them."""
