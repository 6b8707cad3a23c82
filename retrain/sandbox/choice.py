"""Opens a sandbox by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain import registry
from retrain.sandbox import Sandbox


def choose(name: str, options: Mapping[str, Any]) -> Sandbox:
    """Open a sandbox by TOML name, entry point or dotted path.

    Raises:
        ConfigError: there is no such sandbox, or it cannot be used here.
    """
    made = registry.find("sandbox", name)(**options)
    found: Sandbox = registry.check_made("sandbox", name, made)
    return found
