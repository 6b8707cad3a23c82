"""Plugins by name, each checked against the contract that its kind declares.

A name is that of a built-in plugin (`retrain/plugins/<kind>/<name>.py`, or a folder of that name; backends
and launchers have rooms of their own), of an entry point in the group `retrain.<kind>`, or a dotted path: of
a function (`my_pkg.rewards.score`), or of a file or folder that defines the kind's entry function
(`my_pkg.launcher`).
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from retrain.base.errors import ConfigError, Problem
from retrain.base.registry.code import PACKAGE, defines, import_module, is_in_own_code, located, remember
from retrain.base.registry.code import Plugin as Plugin
from retrain.base.registry.code import fault_of as fault_of
from retrain.base.registry.code import names_place as names_place
from retrain.base.registry.code import search_first as search_first
from retrain.base.registry.contract import KINDS as KINDS
from retrain.base.registry.contract import LARGEST as LARGEST
from retrain.base.registry.contract import Count as Count
from retrain.base.registry.contract import Fraction as Fraction
from retrain.base.registry.contract import Megabytes as Megabytes
from retrain.base.registry.contract import Natural as Natural
from retrain.base.registry.contract import NotNegative as NotNegative
from retrain.base.registry.contract import PluginSpec as PluginSpec
from retrain.base.registry.contract import Positive as Positive
from retrain.base.registry.contract import Workers as Workers
from retrain.base.registry.contract import call_problem, functions_of, problem_with
from retrain.base.registry.contract import hint as hint
from retrain.base.registry.contract import lacking_problem as lacking_problem
from retrain.base.registry.contract import needed_by as needed_by
from retrain.base.registry.contract import package_of as package_of
from retrain.base.registry.contract import spec_of as spec_of
from retrain.base.registry.contract import takes as takes

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
KEYED = re.compile(r"(?P<where>[a-z_]\w*): (?P<what>.+)", re.DOTALL)  # `length: got 0`
PLACED = re.compile(r"\[(?P<where>[\w.-]+\](\.[\w-]+)*): (?P<what>.+)", re.DOTALL)  # `[model].model: got ""`


def plugin(kind: str, name: str) -> Plugin:
    """Return a plugin; a ConfigError says which names exist or what fails."""
    if is_built_in(kind, name):
        return _own_plugin(kind, name)
    spec = spec_of(kind)
    if "." in name:
        module, value = _at(spec.one, name)
        return _imported(kind, name, value, module, name.rpartition(".")[2])
    for entry in _installed(kind):
        if entry.name == name:
            value = _loaded(name, spec.one, entry.load)
            return _imported(kind, name, value, importlib.import_module(entry.module), entry.attr)
    known_names = names(kind)
    others = f"known: {', '.join(known_names)}, or a dotted path"
    raise ConfigError(f"{name!r} is not a known {spec.noun}; {hint(name, known_names, others)}")


def find_plugin(kind: str, name: str) -> Callable[..., Any]:
    """Return the entry function of a plugin, such as "math" of "rewards".

    Raises:
        ConfigError: there is no such plugin, or it does not take the arguments of its kind.
    """
    return plugin(kind, name).function()


def bound(kind: str, name: str, table: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the entry function of a plugin, bound to those keys of its table that it takes."""
    return plugin(kind, name).bound(table)


def check_made(kind: str, name: str, made: T) -> T:
    """Return what an entry function returned; ConfigError if it lacks a member that its kind requires."""
    spec = spec_of(kind)
    members, methods = spec.members, functions_of(spec.returns) if spec.returns else {}
    if spec.instead and any(hasattr(made, function) for function in functions_of(spec.instead)):
        methods = functions_of(spec.instead)
        members = tuple(methods)
    lacking = [member for member in members if not hasattr(made, member)]
    if lacking:
        what = f"{name!r} returned a {type(made).__name__} without {', '.join(lacking)}"
        raise ConfigError(f"{what}; see the page on extending for {spec.one}")
    for method in members:
        if method in methods and (problem := call_problem(getattr(made, method), methods[method])):
            raise ConfigError(f"{name!r}: {method} {problem}; see the page on extending")
    return made


def hook(kind: str, name: str, wanted: str) -> Callable[..., Any] | None:
    """Return a hook of a plugin, None if it defines none; ConfigError if it cannot be called as declared."""
    return plugin(kind, name).hook(wanted)


def ask(kind: str, name: str, wanted: str, *arguments: Any) -> Any:
    """Return what a hook of a plugin answers; the answer of the kind's own if the plugin defines none."""
    return getattr(plugin(kind, name).functions, wanted)(*arguments)


@cache  # asked for each run of a campaign
def _own_plugin(kind: str, name: str) -> Plugin:
    spec, module = spec_of(kind), importlib.import_module(f"{package_of(kind)}.{name}")
    return Plugin(spec, name, getattr(module, spec.entry), module)


def find_function(what: str, path: str) -> Callable[..., Any]:
    """Return the function that a dotted path names; `what` describes it in the ConfigError if it fails."""
    module, found = _at(what, path)
    remember(module, found, f"function {path!r}")
    if not callable(found):
        raise ConfigError(f"{path!r} is of type {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def function_of_option(key: str, path: str) -> Callable[..., Any]:
    """Return the function that an option names; a ConfigError begins with the option's key."""
    try:
        return find_function("a function", path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def find_module(path: str) -> ModuleType:
    """Return the module that a dotted path names, or that holds what it names; ConfigError if it fails."""
    if "." not in path and path.isidentifier():
        module: ModuleType = _loaded(path, "a plugin", lambda: import_module(path))
        return module
    parent, found = _at("a plugin", path)
    return found if isinstance(found, ModuleType) else parent


def may_lack_keys(kind: str, name: str) -> bool:
    """Whether a plugin's empty table may be a mistake; one of ours with defaults is not imported for that."""
    return not (spec_of(kind).has_defaults and is_built_in(kind, name))


def names(kind: str) -> list[str]:
    """List the plugins of a kind by TOML name: built-in ones, then installed entry points."""
    return [*built_in_names(kind), *sorted(entry.name for entry in _installed(kind))]


@cache
def built_in_names(kind: str) -> tuple[str, ...]:
    """List the built-in plugins of a kind, without importing any: files and folders that define its entry."""
    return tuple(sorted(name for name in _modules(kind) if is_built_in(kind, name)))


@cache
def is_built_in(kind: str, name: str) -> bool:
    """Whether a built-in plugin of a kind has this name; reads only that plugin's file."""
    return name in _modules(kind) and defines(f"{package_of(kind)}.{name}", spec_of(kind).entry)


@cache
def _modules(kind: str) -> frozenset[str]:
    return frozenset(
        module.name
        for module in pkgutil.iter_modules([str(PACKAGE.parent.joinpath(*package_of(kind).split(".")))])
    )


def problem_with_name(kind: str, name: str) -> str | None:
    """Return why a plugin's name cannot be used; None if it can."""
    try:
        if not is_built_in(kind, name):
            plugin(kind, name).function()
    except ConfigError as error:
        return str(error)
    return None


def problems_with_params(kind: str, name: str, params: Mapping[str, object]) -> list[Problem]:
    """Check a plugin's table against its entry function's keyword-only parameters."""
    part = plugin(kind, name)
    parameters = part.parameters
    if parameters is None or (not parameters and part.spec.judge and part.hook(part.spec.judge)):
        return []
    missing = [(p.name, f"is needed by {name!r}") for p in parameters if p.required and p.name not in params]
    judged = ((key, problem_with(name, parameters, key, value)) for key, value in params.items())
    return [Problem((key,), what) for key, what in (*missing, *judged) if what]


def problems_with_table(kind: str, name: str, table: Mapping[str, Any]) -> list[Problem]:
    """Check a plugin's table: keys and types, then by the plugin's own hook."""
    return problems_with_params(kind, name, table) or judged(kind, name, table)


def judged(kind: str, name: str, table: Mapping[str, Any]) -> list[Problem]:
    """Return what a plugin's own hook finds wrong with its table: `key: what` each, or a Problem."""
    judge = spec_of(kind).judge
    return [read_problem(one) for one in ask(kind, name, judge, table) or ()] if judge else []


def problems_of(kind: str, name: str, wanted: str, *arguments: Any) -> list[Problem]:
    """Return what a plugin's hook finds wrong with a run: `[section].key: what` each, or a Problem."""
    return [read_problem(one, PLACED) for one in ask(kind, name, wanted, *arguments) or ()]


def read_problem(text: str | Problem, form: re.Pattern[str] = KEYED) -> Problem:
    """Return the problem that a plugin's code wrote in a form; without a place if in another."""
    if isinstance(text, Problem):
        return text
    read = form.fullmatch(text)
    keys = read["where"].replace("]", "").split(".") if read else ()
    return Problem(tuple(keys), read["what"] if read else text)


@cache  # reading the metadata of everything that is installed takes 30 ms
def _installed(kind: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points

    return entry_points(group=f"retrain.{kind}")


def _imported(kind: str, name: str, found: Any, module: ModuleType, attribute: str) -> Plugin:
    """Return a plugin found by its module, or by a function in it."""
    spec = spec_of(kind)
    entries = [spec.entry, spec.opener] if spec.opener else [spec.entry]
    if isinstance(found, ModuleType):
        defined = [getattr(found, entry) for entry in entries if hasattr(found, entry)]
        if not defined:
            raise ConfigError(f"{name!r} in {kind} is a module that defines no function {spec.entry!r}")
        remember(found, defined[0], f"{spec.noun} {name!r}")
        return Plugin(spec, name, defined[0], found)
    remember(module, found, f"{spec.noun} {name!r}")
    return Plugin(spec, name, found, module if attribute in entries else None)


def _at(what: str, path: str) -> tuple[ModuleType, Any]:
    """Import what a dotted path names: a module, or something in one."""
    parent, _, last = path.rpartition(".")
    if not parent or not all(part.isidentifier() for part in path.split(".")):
        raise ConfigError(f"{path!r} is not a dotted path; write it as in Python: my_pkg.my_module.name")

    def load() -> tuple[ModuleType, Any]:
        module = import_module(parent)
        if not hasattr(module, last) and hasattr(module, "__path__"):
            try:
                importlib.import_module(path)  # sets the attribute
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        return module, getattr(module, last)

    found: tuple[ModuleType, Any] = _loaded(path, what, load)
    return found


def _loaded(name: str, what: str, load: Callable[[], Any]) -> Any:
    """Run third-party code; report any exception as a problem of the file that names it."""
    try:
        return load()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        why, fix = located(error), "fix that code"
        if isinstance(error, ImportError | AttributeError) and not is_in_own_code(error):
            why, fix = str(error), "check the path, and that Python finds it"
        raise ConfigError(f"{name!r} cannot be loaded as {what} ({why}); {fix}") from error
