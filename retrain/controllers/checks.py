"""The one way a controller refuses a value: by name, with what it got and what it needs."""

from __future__ import annotations


def require(name: str, value: object, holds: bool, needed: str) -> None:
    """Raise ValueError unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: got {value!r}; needs {needed}")
