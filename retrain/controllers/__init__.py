"""Controllers: facts in, decision and reason out.

Pure: no clock, no randomness, no I/O. The caller measures before and acts after; state is plain
data, so that a recorded run can be replayed decision for decision.
"""

from __future__ import annotations


def require(name: str, value: object, holds: bool, needed: str) -> None:
    """Raise ValueError with the name, the value and what it needs, unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: got {value!r}; needs {needed}")
