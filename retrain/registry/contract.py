"""What a kind of plugin must and may define: each kind declares it in its `__init__`, as `SPEC`.

Built-in plugins, installed plugins and a user's own files follow the same contract.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = (
    "backends",
    "tasks",
    "rewards",
    "sandbox",
    "advantages",
    "transforms",
    "losses",
    "launchers",
    "loggers",
)


@dataclass(frozen=True, slots=True)
class Hook:
    """An optional function that a plugin may define in addition to its entry function."""

    name: str
    arguments: tuple[str, ...]  # positional
    purpose: str  # what it returns, and when it is called


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """The contract of one kind of plugin.

    The entry function's keyword-only parameters are the keys of the plugin's table, whose values are passed
    under these names.
    """

    noun: str  # one plugin of this kind
    entry: str  # the function that its file or folder defines
    arguments: tuple[str, ...] = ()  # positional, as retrain calls it
    given: tuple[str, ...] = ()  # keyword arguments that retrain passes, which are not keys of the table
    members: tuple[str, ...] = ()  # that the returned object must have
    hooks: tuple[Hook, ...] = ()
    judge: str = ""  # hook that checks the table's values; the only check if the entry function has no keys

    def hook(self, name: str) -> Hook:
        """Return a declared hook."""
        return next(hook for hook in self.hooks if hook.name == name)


def spec_of(kind: str) -> PluginSpec:
    """Return the contract that a kind declares."""
    found: PluginSpec = importlib.import_module(f"retrain.{kind}").SPEC
    return found


def call_problem(function: Callable[..., Any], arguments: Sequence[str], given: Sequence[str] = ()) -> str:
    """Return why a function cannot be called as the contract says; "" if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C
        return ""
    keys = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    try:
        signature.bind(*arguments, **dict.fromkeys([*keys, *given]))
    except TypeError:
        called = ", ".join([*arguments, *(f"{name}=..." for name in given)])
        return f"is {_shown(signature)}, and is called with ({called})"
    return ""


def _shown(signature: inspect.Signature) -> str:
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    return str(shown).replace("Ellipsis", "...")
