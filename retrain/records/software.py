"""Versions of what results may depend on, as they are installed where a worker runs."""

from __future__ import annotations

import platform
from functools import cache

PACKAGES = ("numpy", "torch", "transformers", "peft", "tinker")


@cache  # it does not change while a process lives
def installed() -> str:
    """Name Python and the packages that compute, each with its version; imports none of them."""
    from importlib import metadata  # not at the top: costs 15 ms, and readers never need it

    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
