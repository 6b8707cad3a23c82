"""Controllers: facts in, decision and reason out.

Pure: no clock, no randomness, no I/O. The caller measures before and acts after; state is plain
data, so that a recorded run can be replayed decision for decision.
"""
