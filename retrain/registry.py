"""Finds plugins by name: a built-in file, an installed entry point, or a dotted path.

A built-in plugin is one file, `retrain/<kind>/<name>.py`, that defines the function which
its kind asks for (`ENTRY`). A dotted path names the function itself: `my_pkg.rewards.score`.
An installed package may offer `[project.entry-points."retrain.<kind>"]`.

Names and parameters of built-in plugins are read from their source, so that a plan can be
checked without importing what the plugins need.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from retrain.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# kind of plugin -> the function that its file defines
ENTRY: Mapping[str, str] = {
    "backends": "connect",
    "tasks": "build",
    "rewards": "score",
    "advantages": "estimate",
    "transforms": "reweigh",
    "losses": "evaluate",
    "launchers": "open_launcher",
    "loggers": "open_logger",
}
# How a plugin says what its numbers may be: checked from the annotation's name, without an import.
Positive: TypeAlias = float
NotNegative: TypeAlias = float
Fraction: TypeAlias = float

NUMBER = (int, float)
LARGEST = sys.float_info.max  # a whole number in TOML may be larger, and no float holds it then
ACCEPTS: Mapping[str, tuple[tuple[type, ...], Callable[[Any], bool], str]] = {
    "float": (NUMBER, lambda value: abs(value) <= LARGEST, "a finite number"),
    "Positive": (NUMBER, lambda value: 0 < value <= LARGEST, "a number above 0"),
    "NotNegative": (NUMBER, lambda value: 0 <= value <= LARGEST, "a number of 0 or more"),
    "Fraction": (NUMBER, lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "int": ((int,), lambda value: True, "a whole number"),
    "bool": ((bool,), lambda value: True, "true or false"),
    "str": ((str,), lambda value: True, "a string"),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword-only parameter of a plugin's function."""

    name: str
    annotation: str
    required: bool


def find(kind: str, name: str) -> Callable[..., Any]:
    """Give the function of a plugin.

    Raises:
        ConfigError: no such plugin, or it cannot be imported; says which names exist.
    """
    if name in built_in_names(kind):
        module = importlib.import_module(f"retrain.{kind}.{name}")
        return _checked(kind, name, getattr(module, ENTRY[kind]))
    if "." in name:
        return _from_dotted_path(kind, name)
    for entry in _installed(kind):
        if entry.name == name:
            return _checked(kind, name, _loaded(kind, name, entry.load))
    raise ConfigError(_unknown(kind, name))


def find_function(what: str, path: str) -> Callable[..., Any]:
    """Give the function that a dotted path names; `what` it is, for the error.

    Raises:
        ConfigError: it cannot be imported.
    """
    return _from_dotted_path(what, path)


def names(kind: str) -> list[str]:
    """List the plugins of a kind by TOML name: built-in ones, then installed entry points."""
    return [*built_in_names(kind), *sorted(entry.name for entry in _installed(kind))]


@cache
def built_in_names(kind: str) -> tuple[str, ...]:
    """List the built-in plugins of a kind, without importing any."""
    found = pkgutil.iter_modules([str(_folder(kind))])
    return tuple(sorted(m.name for m in found if not m.name.startswith("_")))


def problem_with_name(kind: str, name: str) -> str | None:
    """Say why a plugin's name cannot be used; None if it can. Built-in plugins are not imported."""
    if name in built_in_names(kind):
        return None
    try:
        find(kind, name)
    except ConfigError as error:
        return str(error)
    return None


def problems_with_params(kind: str, name: str, params: Mapping[str, object]) -> list[tuple[str, str]]:
    """Check a params table against the plugin's keyword-only parameters: (key, problem) pairs."""
    known = parameters(kind, name)
    if known is None:
        return []
    return [(key, problem) for key, value in params.items() if (problem := _misfit(name, known, key, value))]


def parameters(kind: str, name: str) -> tuple[Parameter, ...] | None:
    """Give the keyword-only parameters of a plugin's function; None if it takes any (**params)."""
    if name in built_in_names(kind):
        return _parameters_from_source(_folder(kind) / f"{name}.py", ENTRY[kind])
    signature = inspect.signature(find(kind, name)).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in signature):
        return None
    return tuple(
        Parameter(p.name, str(getattr(p.annotation, "__name__", p.annotation)), p.default is p.empty)
        for p in signature
        if p.kind is p.KEYWORD_ONLY
    )


def optional(kind: str, name: str, function: str) -> Callable[..., Any] | None:
    """Give a further function of a built-in plugin; None, without importing it, if it defines none.

    One that the plugin imports is taken from where it is defined: options are checked without
    importing what the plugin computes with.
    """
    if name not in built_in_names(kind):
        return None
    functions = _functions(_folder(kind) / f"{name}.py")
    if function not in functions:
        return None
    module = functions[function] or f"retrain.{kind}.{name}"
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


@cache  # asked once per run of a campaign
def _functions(path: Path) -> Mapping[str, str]:
    """Name the functions that a file defines (under "") or imports (under the module's name)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        a.name: n.module or ""
        for n in tree.body
        if isinstance(n, ast.ImportFrom) and n.level == 0
        for a in n.names
        if a.asname is None
    }
    return imported | {n.name: "" for n in tree.body if isinstance(n, ast.FunctionDef)}


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Give the known word that `word` was probably meant to be."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def _installed(kind: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points  # takes 30 ms to import, and built-in plugins do without

    return entry_points(group=f"retrain.{kind}")


def _folder(kind: str) -> Path:
    return Path(__file__).parent / kind


@cache  # asked once per condition
def _parameters_from_source(path: Path, entry: str) -> tuple[Parameter, ...] | None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == entry)
    if function.args.kwarg is not None:
        return None
    return tuple(
        Parameter(a.arg, ast.unparse(a.annotation) if a.annotation else "", default is None)
        for a, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    )


def _misfit(plugin: str, known: tuple[Parameter, ...], key: str, value: object) -> str | None:
    parameter = next((p for p in known if p.name == key), None)
    if parameter is None:
        return f"unknown parameter of {plugin!r}; {_hint(key, [p.name for p in known])}"
    choices = _choices(parameter.annotation)
    if choices:
        return None if value in choices else f"got {value!r}; needs one of {', '.join(map(repr, choices))}"
    if parameter.annotation not in ACCEPTS:
        return None
    types, fits, wanted = ACCEPTS[parameter.annotation]
    return None if _is_of(types, value) and fits(value) else f"got {value!r}; needs {wanted}"


def _is_of(types: tuple[type, ...], value: object) -> bool:
    """Tell whether a value is of one of the types; Python takes true for a number, TOML does not."""
    return isinstance(value, types) and (bool in types or not isinstance(value, bool))


def _hint(key: str, known: Sequence[str]) -> str:
    near = nearest(key, known)
    return f"did you mean {near!r}?" if near else f"it takes {', '.join(known) or 'nothing'}"


def _choices(annotation: str) -> tuple[Any, ...]:
    """Read the values of a `Literal[...]`."""
    if not annotation.startswith("Literal["):
        return ()
    found = ast.literal_eval(annotation.removeprefix("Literal").replace("[", "(", 1)[:-1] + ",)")
    return tuple(found)


def _unknown(kind: str, name: str) -> str:
    known = names(kind)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}, or a dotted path"
    return f"{name!r} is not one of the {kind}; {hint}"


def _from_dotted_path(kind: str, path: str) -> Callable[..., Any]:
    module_name, _, attribute = path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{path!r} is no dotted path; write it as Python does: my_pkg.my_module.name")
    found = _loaded(kind, path, lambda: getattr(importlib.import_module(module_name), attribute))
    return _checked(kind, path, found)


def _loaded(kind: str, name: str, load: Callable[[], Any]) -> Any:
    """Run what somebody else wrote; whatever it raises is told as a problem of the file that names it."""
    try:
        return load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{name!r} cannot be loaded as {kind} ({error}); check the path, and that Python finds it"
        ) from error
    except Exception as error:
        at = error if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1]
        raised = f"{type(error).__name__} at {at.filename}:{at.lineno}: {error}"
        raise ConfigError(f"{name!r} cannot be loaded as {kind} ({raised}); mend that code") from error


def _checked(kind: str, name: str, found: object) -> Callable[..., Any]:
    if not callable(found):
        raise ConfigError(f"{name!r} in {kind} is a {type(found).__name__}, not a function")
    return found
