"""Sandboxes: where programs run that a policy wrote.

A plugin is one file or folder with `open_sandbox(*, <options>) -> Sandbox`: a command that confines a Python
interpreter.

Not plugins, but shared: `inside` is what runs in it, and `cell` talks to it, and takes whatever comes back
for hostile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from retrain.base import registry
from retrain.base.errors import Problem
from retrain.base.registry import PluginSpec


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A command that confines an interpreter."""

    name: str
    command: Sequence[str]  # with the interpreter at its end; its arguments follow
    mounts: bool = False  # each program gets namespaces of its own and a mounted folder
    folder: str = "/tmp"  # inside, where that folder is mounted, or where a single program writes
    single_use: bool = False  # started for each program, which comes on standard input
    # what programs can read of this machine: no campaign may lie in it; None: unknown, which is told. Where
    # nothing is mounted and no command confines a single program, Landlock keeps programs to these paths
    readable: Sequence[str] | None = None
    weakness: str = ""  # what it does not keep a program from, in one line


class SandboxPlugin:
    """What the file of a sandbox may define beside `open_sandbox`, each as here without it."""

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> Iterable[Problem | str]:
        """Return the problems of [reward.sandbox_options], each as `key: what is wrong`."""
        return ()


SPEC = PluginSpec(
    "sandbox",
    "open_sandbox",
    members=tuple(field.name for field in fields(Sandbox)),
    functions=SandboxPlugin,
    judge="check_options",
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program."""

    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended."""

    code: int  # exit status; negative: the signal that killed it
    in_time: bool = True
    broke: str = ""  # what it did that no solution does, such as "left 2 processes behind"
    denied: int = 0  # calls and paths that it was denied
    over: Sequence[str] = ()  # limits that it ran into: memory, files
    is_known: bool = True  # False: its sandbox has ended, too, and does not say how


class SandboxError(Exception):
    """The sandbox itself failed, not the program in it."""


class SandboxEndedError(SandboxError):
    """The sandbox has ended while a program ran, perhaps because of it."""


def choice_problems(table: Mapping[str, Any]) -> Iterator[Problem]:
    """Iterate over what is wrong with a sandbox that a plugin's table names, and with its options."""
    if (name := table.get("sandbox")) is None:
        return
    if problem := registry.problem_with_name("sandbox", name):
        yield Problem(("sandbox",), problem)
        return
    problems = registry.problems_with_table("sandbox", name, table.get("sandbox_options") or {})
    yield from (problem.below("sandbox_options") for problem in problems)


def with_sandbox(params: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a reward's parameters with a shared sandbox and its options, unless they name a sandbox."""
    if "sandbox" in params:
        return params
    return {key: shared[key] for key in ("sandbox", "sandbox_options") if key in shared} | dict(params)


def open_named(name: str, options: Mapping[str, Any]) -> Sandbox:
    """Open a sandbox by name or dotted path; ConfigError if there is none, or it cannot be used here."""
    sandbox: Sandbox = registry.check_made("sandbox", name, registry.find_plugin("sandbox", name)(**options))
    return sandbox


def choose(name: str, options: Mapping[str, Any]) -> Sandbox:
    """Open a sandbox as `open_named` does, and hide this process from its programs."""
    sandbox = open_named(name, options)
    if not sandbox.mounts:
        # not at the top: it loads ctypes, and every plan imports this module
        from retrain.base.hide_process import hide

        hide()  # answers, and keys in its environment
    return sandbox
