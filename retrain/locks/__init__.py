"""File locks: held by a process while it lives, and leases where locks do not reach other machines.

descriptors.py   file descriptors that a forked child does not keep, and `flock` on them
held.py          locks that name their holder and say whether it lives; leases for other machines
"""
