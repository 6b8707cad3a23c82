"""Controllers: measurements in, a decision and its reason out.

Pure: no clock, no randomness, no I/O. The caller measures before and acts after; the state is plain
data, so a recorded run can be replayed decision for decision.
"""

from __future__ import annotations

from typing import Any, TypeAlias

StateDict: TypeAlias = dict[str, Any]  # plain data that JSON keeps, of one part of a run


def require(name: str, value: object, holds: bool, needed: str) -> None:
    """Raise ValueError naming the value and the requirement, unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: got {value!r}; needs {needed}")
