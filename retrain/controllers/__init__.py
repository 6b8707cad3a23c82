"""Controllers: measurements in, a decision and its reason out.

Pure: no clock, no randomness, no I/O. The caller measures before and acts after; the state is plain
data, so a recorded run can be replayed decision for decision.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Protocol, TypeAlias, get_args, get_type_hints

from retrain.config.keys import keys_of

BOUNDS = {
    "ge": (operator.ge, "at least"),
    "gt": (operator.gt, "more than"),
    "le": (operator.le, "at most"),
    "lt": (operator.lt, "less than"),
}

StateDict: TypeAlias = dict[str, Any]  # plain data that JSON keeps, of one part of a run


class Stateful(Protocol):
    """What a checkpoint keeps of a part of a run, and how a resumed run continues from it."""

    def state_dict(self) -> StateDict:
        """Return all that later decisions depend on."""

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned, also that of an earlier version."""


def require(name: str, value: object, holds: bool, needed: str) -> None:
    """Raise ValueError naming the value and the requirement, unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: got {value!r}; needs {needed}")


def require_keys(section: Any) -> None:
    """Raise ValueError for the first key of a table that is not of its type or within its declared bounds."""
    table: Any = type(section)
    types = get_type_hints(table)
    for name, key in keys_of(table).items():
        value, choices = getattr(section, name), get_args(types[name])
        if choices:
            require(name, value, value in choices, " or ".join(choices))
        elif types[name] is int:
            require(name, value, type(value) is int, "a whole number")
        elif types[name] is float:
            require(name, value, math.isfinite(value), "a finite number")
        for bound, limit in key.bounds.items():
            holds, words = BOUNDS[bound]
            require(name, value, holds(value, limit), f"{words} {limit:g}")
