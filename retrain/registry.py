"""Finds plugins by name: a built-in file, an installed entry point, or a dotted path.

A built-in plugin is one file, `retrain/<kind>/<name>.py`, that defines the function which
its kind asks for (`ENTRY`). A dotted path names the function itself: `my_pkg.rewards.score`.
An installed package may offer `[project.entry-points."retrain.<kind>"]`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from retrain.errors import ConfigError

# kind of plugin -> the function that its file defines
ENTRY: Mapping[str, str] = {
    "backends": "connect",
    "tasks": "build",
    "rewards": "score",
    "advantages": "estimate",
    "transforms": "reweigh",
    "losses": "evaluate",
    "launchers": "launch",
}


def names(kind: str) -> list[str]:
    """List the plugins of a kind by TOML name: built-in ones, then installed entry points."""
    package = importlib.import_module(f"retrain.{kind}")
    built_in = [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]
    installed = [e.name for e in metadata.entry_points(group=f"retrain.{kind}")]
    return sorted(built_in) + sorted(installed)


def find(kind: str, name: str) -> Callable[..., Any]:
    """Give the function of a plugin.

    Raises:
        ConfigError: no such plugin, or its module cannot be imported; says which names exist.
    """
    if "." in name:
        return _from_dotted_path(kind, name)
    for entry in metadata.entry_points(group=f"retrain.{kind}", name=name):
        return _checked(kind, name, entry.load())
    if name.startswith("_") or name not in names(kind):
        raise ConfigError(unknown(kind, name, names(kind)))
    module = importlib.import_module(f"retrain.{kind}.{name}")
    return _checked(kind, name, getattr(module, ENTRY[kind]))


def unknown(kind: str, name: str, known: list[str]) -> str:
    """Say that a name is not known, with the nearest one or all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}, or a dotted path"
    return f"{name!r} is not one of the {kind}; {hint}"


def parameter_problems(kind: str, name: str, params: Mapping[str, object]) -> list[str]:
    """Check a plugin's params table against the function's keyword-only parameters."""
    accepted = keyword_parameters(find(kind, name))
    if accepted is None:
        return []
    problems = []
    for key in params:
        if key not in accepted:
            near = difflib.get_close_matches(key, accepted, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(accepted) or 'nothing'}"
            problems.append(f"{key}: unknown parameter of {name!r}; {hint}")
    return problems


def keyword_parameters(function: Callable[..., Any]) -> list[str] | None:
    """Names of a function's keyword-only parameters, or None if it takes any (**kwargs)."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _from_dotted_path(kind: str, path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{path!r} cannot be loaded from {kind} ({error}); check the path, and that it can be imported"
        ) from error
    return _checked(kind, path, found)


def _checked(kind: str, name: str, found: object) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(f"{name!r} in {kind} is {type(found).__name__}, not a function")
    return found
