"""Opens a sandbox by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain import registry
from retrain.hidden import hide
from retrain.sandbox import Sandbox


def choose(name: str, options: Mapping[str, Any]) -> Sandbox:
    """Open a sandbox by TOML name, entry point or dotted path, and hide this process from its programs.

    Raises:
        ConfigError: there is no such sandbox, or it cannot be used here.
    """
    made = registry.find("sandbox", name)(**options)
    found: Sandbox = registry.check_made("sandbox", name, made)
    if not found.mounts:
        hide()  # answers, and keys in its environment
    return found
