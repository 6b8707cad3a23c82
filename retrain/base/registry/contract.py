"""What a kind of plugin must and may define: each kind declares it in its `__init__`, as `SPEC`.

Built-in plugins, installed plugins and a user's own files follow the same contract. The keys of a plugin's
table are its entry function's keyword-only parameters, whose annotations say which values they take.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Annotated, Any, TypeAlias, get_origin

KINDS = (
    "backends",
    "tasks",
    "environments",
    "rewards",
    "sandbox",
    "advantages",
    "transforms",
    "losses",
    "launchers",
    "loggers",
)

HOMES = {
    "backends": "backends",
    "launchers": "campaign.launchers",
}  # kinds that are not below `retrain.plugins`

# Ranges of a plugin's numbers; checked by the annotation's name, without an import.
Positive: TypeAlias = Annotated[float, "Positive"]
NotNegative: TypeAlias = Annotated[float, "NotNegative"]
Fraction: TypeAlias = Annotated[float, "Fraction"]
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


@cache
def functions_of(contract: type) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the positional arguments of each public function of a class."""
    functions = {
        name: inspect.signature(value.__func__ if isinstance(value, staticmethod) else value).parameters
        for name, value in vars(contract).items()
        if not name.startswith("_") and isinstance(value, staticmethod | FunctionType)
    }
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {
        name: tuple(p.name for p in parameters.values() if p.kind in kinds and p.name != "self")
        for name, parameters in functions.items()
    }


class NoFunctions:
    """Nothing that a plugin's file may define beside its entry function."""


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
    members: tuple[str, ...] = ()  # that what the entry function returns must have
    returns: type | None = None  # their class, which says what those that are functions are called with
    instead: type | None = None  # class whose functions it may have in place of these members
    by_name: str = ""  # parameter that marks a function of another convention, which the kind describes
    by_name_given: tuple[str, ...] = ()  # what such a function is called with, besides columns of the data
    opener: str = ""  # hook that takes the table's keys in place of the entry function, if it is defined
    functions: type = NoFunctions  # whose static methods the file may define too, each as there without it
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


def package_of(kind: str) -> str:
    """Return the package that holds the built-in plugins of a kind."""
    return f"retrain.{HOMES.get(kind, f'plugins.{kind}')}"


def spec_of(kind: str) -> PluginSpec:
    """Return the contract that a kind declares."""
    found: PluginSpec = importlib.import_module(package_of(kind)).SPEC
    return found


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
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p.name for p in signature.parameters.values() if p.kind in kinds]
    try:
        signature.bind(*arguments, **dict.fromkeys([*keys, *given]))
        if all(
            name == one or name not in arguments for name, one in zip(positional, arguments, strict=False)
        ):
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


def _annotation(annotation: Any) -> str:
    if get_origin(annotation) is Annotated:
        return str(annotation.__metadata__[0])
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__name__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")
