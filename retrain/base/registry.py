"""Plugins by name, each checked against the contract that its kind declares in its `__init__`, as `SPEC`.

A name is that of a built-in plugin (`retrain/plugins/<kind>/<name>.py`, or a folder of that name; backends
and launchers have rooms of their own), of an entry point in the group `retrain.<kind>`, or a dotted path: of
a function (`my_pkg.rewards.score`), or of a file or folder that defines the kind's entry function
(`my_pkg.launcher`). All follow the same contract. The keys of a plugin's table are its entry function's
keyword-only parameters, whose annotations say which values they take.

Importing a plugin's file is quick: what it needs is imported by its functions. So a plan can be checked
without that.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, cast, get_origin

from retrain.base.errors import ConfigError, Problem
from retrain.base.user_code import PACKAGE, import_module, is_in_own_code, located, remember

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
KEYED = re.compile(r"(?P<where>[a-z_]\w*): (?P<what>.+)", re.DOTALL)  # `length: got 0`
PLACED = re.compile(r"\[(?P<where>[\w.-]+\](\.[\w-]+)*): (?P<what>.+)", re.DOTALL)  # `[model].model: got ""`
KINDS = tuple(
    "backends tasks curricula environments rewards sandbox advantages transforms losses launchers "
    "loggers".split()
)
HOMES = {"backends": "backends", "launchers": "campaign.launchers"}  # those not in `retrain.plugins`

# Ranges of a plugin's numbers; checked by the annotation's name, without an import.
Positive: TypeAlias = Annotated[float, "Positive"]
NotNegative: TypeAlias = Annotated[float, "NotNegative"]
Fraction: TypeAlias = Annotated[float, "Fraction"]
Share: TypeAlias = Annotated[float, "Share"]
Count: TypeAlias = Annotated[int, "Count"]
Natural: TypeAlias = Annotated[int, "Natural"]
Workers: TypeAlias = Annotated[int, "Workers"]  # 0 is one per core
Megabytes: TypeAlias = Annotated[int, "Megabytes"]  # of a process's memory
LARGEST = sys.float_info.max  # a whole number in TOML may be larger than any float
NUMBERS = {"number": (int, float), "integer": (int,)}
TYPES = {**NUMBERS, "boolean": (bool,), "string": (str,), "array": (list, tuple), "object": (dict,)}
TEXTS = {"type": "array", "items": {"type": "string"}}
ACCEPTS: Mapping[str, tuple[Mapping[str, Any], str]] = {  # by annotation: JSON Schema, and for messages
    "float": ({"type": "number"}, "a finite number"),
    "Positive": ({"type": "number", "exclusiveMinimum": 0}, "a finite number above 0"),
    "NotNegative": ({"type": "number", "minimum": 0}, "a number of 0 or more"),
    "Fraction": ({"type": "number", "minimum": 0, "maximum": 1}, "a number from 0 to 1"),
    "Share": ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "a number above 0, at most 1"),
    "int": ({"type": "integer"}, "a whole number"),
    "Count": ({"type": "integer", "minimum": 1}, "a whole number of 1 or more"),
    "Natural": ({"type": "integer", "minimum": 0}, "a whole number of 0 or more"),
    "Workers": ({"type": "integer", "minimum": 0, "maximum": 1024}, "a whole number from 0 to 1024"),
    "Megabytes": ({"type": "integer", "minimum": 64, "maximum": 2**20}, "a whole number from 64 to 1048576"),
    "bool": ({"type": "boolean"}, "true or false"),
    "str": ({"type": "string"}, "a string"),
    **dict.fromkeys(("Sequence[str]", "list[str]", "tuple[str, ...]"), (TEXTS, "a list of strings")),
    **dict.fromkeys(("Mapping[str, Any]", "dict[str, Any]"), ({"type": "object"}, "a table")),
}


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """The contract of one kind of plugin.

    The entry function's keyword-only parameters are the keys of the plugin's table, whose values are passed
    under these names; those of the opener, if a plugin defines one.
    """

    noun: str  # one plugin of this kind
    entry: str  # the function that its file or folder defines
    arguments: tuple[str, ...] = ()  # positional, as retrain calls it
    given: tuple[str, ...] = ()  # keyword arguments that retrain passes, which are not keys of the table
    may_take: tuple[str, ...] = ()  # likewise, but only to a function that names them
    members: tuple[str, ...] = ()  # that what the entry function returns must have
    returns: type | None = None  # their class, which says what those that are functions are called with
    instead: type | None = None  # class whose functions it may have in place of these members
    by_name: str = ""  # parameter that marks a function of another convention, which the kind describes
    by_name_given: tuple[str, ...] = ()  # what such a function is called with, besides columns of the data
    opener: str = ""  # hook that takes the table's keys in place of the entry function, if it is defined
    functions: type = object  # whose static methods the file may define too, each as there without it
    has_defaults: bool = False  # each key of our plugins has one: an empty table needs no check
    judge: str = ""  # hook that checks the table's values; the only check if the entry function has no keys

    @property
    def one(self) -> str:
        """The noun with its article."""
        return f"{'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}"

    @property
    def hooks(self) -> Mapping[str, tuple[str, ...]]:
        """The arguments of each function that the file may define beside its entry function."""
        return functions_of(self.functions)


@cache
def functions_of(contract: type) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the positional arguments of each public function of a class."""
    return {
        name: tuple(key for key in positional_of(inspect.signature(getattr(contract, name))) if key != "self")
        for name, value in vars(contract).items()
        if not name.startswith("_") and isinstance(value, staticmethod | FunctionType)
    }


def positional_of(signature: inspect.Signature) -> list[str]:
    """Return the names of the parameters that may be given by their place."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in signature.parameters.values() if p.kind in kinds]


def package_of(kind: str) -> str:
    """Return the package that holds the built-in plugins of a kind."""
    return f"retrain.{HOMES.get(kind, f'plugins.{kind}')}"


def spec_of(kind: str) -> PluginSpec:
    """Return the contract that a kind declares."""
    return cast(PluginSpec, importlib.import_module(package_of(kind)).SPEC)


@dataclass(frozen=True)
class Plugin:
    """A plugin. The hooks of a module belong to the function that has the entry's name."""

    spec: PluginSpec
    name: str
    found: Callable[..., Any]
    module: ModuleType | None  # of hooks and constants; None for a function with another name

    def function(self) -> Callable[..., Any]:
        """Return the named function; raise ConfigError if it does not take the arguments of its kind."""
        if self.found is getattr(self.module, self.spec.opener, None):
            return self._checked(self.found, self.name, ())
        if takes(self.found, self.spec.by_name):
            return self.found
        return self._checked(self.found, self.name, self.spec.arguments, self.spec.given)

    def bound(self, table: Mapping[str, Any]) -> Callable[..., Any]:
        """Return the function, bound to those keys of its table that it takes."""
        parameters = self.parameters
        keys = table.keys() if parameters is None else table.keys() & {p.name for p in parameters}
        return partial(self.function(), **{key: table[key] for key in keys})

    def hook(self, name: str) -> Callable[..., Any] | None:
        """Return a hook, None if there is none; ConfigError if it cannot be called as the contract says."""
        function = getattr(self.module, name, None)
        if function is None:
            return None
        return self._checked(function, f"{self.name}: {name}", self.spec.hooks[name])

    @cached_property
    def functions(self) -> Any:
        """What its file may define beside its entry function: an object of its kind's `SPEC.functions`."""
        functions = self.spec.functions()
        for name in self.spec.hooks:
            if (function := self.hook(name)) is not None:
                setattr(functions, name, function)
        return functions

    @cached_property
    def parameters(self) -> tuple[Parameter, ...] | None:
        """The keys of its table, keyword-only parameters; None if it takes any."""
        parameters = from_function(getattr(self.module, self.spec.opener, self.found))
        passed = self.spec.given + self.spec.may_take
        return None if parameters is None else tuple(p for p in parameters if p.name not in passed)

    def constant(self, name: str, default: Any) -> Any:
        """Return a constant that its file sets."""
        return getattr(self.module, name, default)

    def summary(self) -> str:
        """Return the first line of its description."""
        return ((self.module or self.found).__doc__ or "").strip().partition("\n")[0]

    def _checked(
        self, found: Any, what: str, arguments: tuple[str, ...], given: tuple[str, ...] = ()
    ) -> Callable[..., Any]:
        if not callable(found):
            raise ConfigError(f"{what!r} is of type {type(found).__name__}, not a function")
        if problem := call_problem(found, arguments, given):
            raise ConfigError(f"{what!r} {problem}; see the page on extending for {self.spec.one}")
        return cast(Callable[..., Any], found)


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


def defines(module: str, function: str) -> bool:
    """Whether the file of a module defines a function, which is not imported; others only serve plugins."""
    pattern = rf"^(?:(?:async )?def {function}\(|{function} = )"
    return re.search(pattern, _source(module), re.MULTILINE) is not None


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""


def names_parameter(kind: str, name: str, parameter: str) -> bool:
    """Whether a plugin's entry function has a parameter; a built-in one is read, not imported."""
    if not is_built_in(kind, name):
        return takes(find_plugin(kind, name), parameter)
    head = rf"^def {spec_of(kind).entry}\([^)]*\b{parameter}:"
    return re.search(head, _source(f"{package_of(kind)}.{name}"), re.MULTILINE) is not None


def find_function(what: str, path: str) -> Callable[..., Any]:
    """Return the function that a dotted path names; `what` describes it in the ConfigError if it fails."""
    module, function = _at(what, path)
    remember(module, function, f"function {path!r}")
    if not callable(function):
        raise ConfigError(f"{path!r} is of type {type(function).__name__}, not a function")
    return cast(Callable[..., Any], function)


def function_of_option(key: str, path: str) -> Callable[..., Any]:
    """Return the function that an option names; a ConfigError begins with the option's key."""
    try:
        return find_function("a function", path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def find_module(path: str) -> ModuleType:
    """Return the module that a dotted path names, or that holds what it names; ConfigError if it fails."""
    if "." not in path and path.isidentifier():
        return cast(ModuleType, _loaded(path, "a plugin", lambda: import_module(path)))
    parent, value = _at("a plugin", path)
    return value if isinstance(value, ModuleType) else parent


@cache  # asked for each run of a campaign
def _own_plugin(kind: str, name: str) -> Plugin:
    spec, module = spec_of(kind), importlib.import_module(f"{package_of(kind)}.{name}")
    return Plugin(spec, name, getattr(module, spec.entry), module)


@cache  # reading the metadata of everything that is installed takes 30 ms
def _installed(kind: str) -> Iterable[EntryPoint]:
    from importlib.metadata import entry_points

    return entry_points(group=f"retrain.{kind}")


def _imported(kind: str, name: str, value: Any, module: ModuleType, attribute: str) -> Plugin:
    """Return a plugin found by its module, or by a function in it."""
    spec = spec_of(kind)
    entries = [spec.entry, spec.opener] if spec.opener else [spec.entry]
    if isinstance(value, ModuleType):
        defined = [getattr(value, entry) for entry in entries if hasattr(value, entry)]
        if not defined:
            raise ConfigError(f"{name!r} in {kind} is a module that defines no function {spec.entry!r}")
        remember(value, defined[0], f"{spec.noun} {name!r}")
        return Plugin(spec, name, defined[0], value)
    remember(module, value, f"{spec.noun} {name!r}")
    return Plugin(spec, name, value, module if attribute in entries else None)


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

    return cast(tuple[ModuleType, Any], _loaded(path, what, load))


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


def problem_with_name(kind: str, name: str) -> str | None:
    """Return why a plugin's name cannot be used; None if it can."""
    try:
        if not is_built_in(kind, name):
            plugin(kind, name).function()
    except ConfigError as error:
        return str(error)
    return None


def problems_with_table(kind: str, name: str, table: Mapping[str, Any]) -> list[Problem]:
    """Check a plugin's table: keys and types, then by the plugin's own hook."""
    return problems_with_params(kind, name, table) or judged(kind, name, table)


def problems_with_params(kind: str, name: str, params: Mapping[str, object]) -> list[Problem]:
    """Check a plugin's table against its entry function's keyword-only parameters."""
    part = plugin(kind, name)
    parameters = part.parameters
    if parameters is None or (not parameters and part.spec.judge and part.hook(part.spec.judge)):
        return []
    missing = [(p.name, f"is needed by {name!r}") for p in parameters if p.required and p.name not in params]
    judged = ((key, problem_with(name, parameters, key, value)) for key, value in params.items())
    return [Problem((key,), what) for key, what in (*missing, *judged) if what]


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


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Whether a function has a parameter of this name."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a function, or one written in C
        return False


def lacking_problem(function: Callable[..., Any], given: Collection[str]) -> str:
    """Return what a function that is called by name needs besides what it is given; "" if nothing."""
    lacking = ", ".join(sorted(needed_by(function) - {*given}))
    what = "if the data has it, name it in [data.options].columns, else give it a default in the function"
    return f"needs {lacking}; {what}" if lacking else ""


def needed_by(function: Callable[..., Any]) -> set[str]:
    """Return the parameters that a function cannot be called without."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind in kinds and p.default is p.empty}


def call_problem(function: Callable[..., Any], arguments: Sequence[str], given: Sequence[str] = ()) -> str:
    """Return why a function cannot be called as agreed, or has the names in another order; "" if it can."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function written in C
        return ""
    keys = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    places = zip(positional_of(signature), arguments, strict=False)
    try:
        signature.bind(*arguments, **dict.fromkeys([*keys, *given]))
        if all(name == argument or name not in arguments for name, argument in places):
            return ""
    except TypeError:
        pass
    called = ", ".join([*arguments, *(f"{name}=..." for name in given)])
    return f"is {_shown(signature)}, and is called with ({called})"


def _shown(signature: inspect.Signature) -> str:
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else ...)
        for p in signature.parameters.values()
    ]
    shown = signature.replace(parameters=bare, return_annotation=signature.empty)
    return str(shown).replace("Ellipsis", "...")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword-only parameter of a plugin's function."""

    name: str
    annotation: str
    required: bool


def from_function(function: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """Return a function's keyword-only parameters; None if it takes any (**params)."""
    try:
        signature = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function written in C
        return None
    if any(p.kind is p.VAR_KEYWORD for p in signature):
        return None
    return tuple(
        Parameter(p.name, _annotation(p.annotation), p.default is p.empty)
        for p in signature
        if p.kind is p.KEYWORD_ONLY
    )


def _annotation(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return str(annotation.__metadata__[0])
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def problem_with(plugin: str, known: Sequence[Parameter], key: str, value: object) -> str | None:
    """Return what is wrong with a key of a plugin's table, or with its value; None if nothing."""
    parameter = next((p for p in known if p.name == key), None)
    if parameter is None:
        names = [p.name for p in known]
        takes = f"it takes {', '.join(names) or 'nothing'}"
        return f"unknown parameter of {plugin!r}; {hint(key, names, takes)}"
    annotation = parameter.annotation.removesuffix(" | None")  # which no file can give
    if choices := choices_of(annotation):
        return None if value in choices else f"got {value!r}; needs one of {', '.join(map(repr, choices))}"
    if annotation not in ACCEPTS:
        return None
    schema, wanted = ACCEPTS[annotation]
    return None if _fits(value, schema) else f"got {value!r}; needs {wanted}"


def choices_of(annotation: str) -> tuple[Any, ...]:
    """Return the values of a Literal; none of another annotation, or of names that only Python knows."""
    if not annotation.startswith("Literal["):
        return ()
    try:
        return tuple(ast.literal_eval(f"({annotation[8:-1]},)"))
    except (SyntaxError, ValueError):
        return ()


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if type(value) not in TYPES[schema["type"]]:  # the very type: true is no number in TOML
        return False
    if schema["type"] not in NUMBERS:
        return all(_fits(one, schema["items"]) for one in value) if "items" in schema else True
    above = schema.get("exclusiveMinimum")
    low, high = schema.get("minimum", above or -LARGEST), schema.get("maximum", LARGEST)
    return bool(low <= value <= high and (above is None or value > above))


def hint(word: str, known: Iterable[str], otherwise: str) -> str:
    """Return a question after the known word that is most similar, or `otherwise` if none is."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {matches[0]!r}?" if matches else otherwise
