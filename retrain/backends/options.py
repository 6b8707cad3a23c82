"""How backends declare and check `[backend.options]`: a dataclass whose fields carry their rule.

A field without a rule accepts what its default is: true or false, a string, or a list of strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

from retrain.base.errors import ConfigError
from retrain.base.registry import hint

Options = TypeVar("Options")
Rule = tuple[Callable[[Any], bool], str]  # whether a value is valid, and what is needed instead


def is_words(value: object) -> bool:
    """Whether a value is a list of strings, none of them empty."""
    return isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)


def is_number(value: object) -> bool:
    """Whether a value is a number; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


PLAIN: Mapping[type, Rule] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    str: (lambda value: isinstance(value, str), "a string"),
    tuple: (is_words, "a list of strings, none of them empty"),
}


def option(default: Any, fits: Callable[[Any], bool], wanted: str) -> Any:
    """Declare an option: its default, whether a value is valid, and what is needed instead."""
    return field(default=default, metadata={"rule": (fits, wanted)})


def number(default: float, least: float, most: float, wanted: str = "") -> Any:
    """Declare a number in a range, a whole one if its default is; `wanted` replaces the usual description."""
    kind, what = (int, "whole number") if isinstance(default, int) else (int | float, "number")

    def fits(value: Any) -> bool:
        return is_number(value) and isinstance(value, kind) and bool(least <= value <= most)

    return option(default, fits, wanted or f"a {what} from {least:g} to {most:g}")


def one_of(*choices: str) -> Any:
    """Declare one of several words, the first of them by default."""
    *others, last = map(repr, choices)
    return option(choices[0], lambda value: value in choices, f"{', '.join(others)} or {last}")


def words(default: str, wanted: str) -> Any:
    """Declare a list of strings, at least one; by default this one."""
    return option((default,), lambda value: is_words(value) and bool(value), wanted)


def table() -> Any:
    """Declare a table of any keys, empty by default."""
    rule: Rule = (lambda value: isinstance(value, Mapping), "a table")
    return field(default_factory=dict, metadata={"rule": rule})


def is_file(path: str) -> bool:
    """Whether a text is the path of a file."""
    return "\0" not in path and Path(path).is_file()


def chat_template() -> Any:
    """Declare whether prompts are shown in a chat template: the tokenizer's, or that of a file."""
    needed = "true (the tokenizer's), false, or a file with a template"

    return option(
        False, lambda value: isinstance(value, bool) or (isinstance(value, str) and is_file(value)), needed
    )


def template_in(chosen: bool | str) -> str:
    """Return the template of the file that `chat_template` names, "" for none; or a ConfigError."""
    if not isinstance(chosen, str):
        return ""
    try:
        return Path(chosen).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"[backend.options].chat_template: {chosen} cannot be read: {error}") from error


def template_problems(options: Mapping[str, object]) -> list[str]:
    """Return the problems of options that only a chat template uses, without one, and of a file of one."""
    chosen = options.get("chat_template")
    if isinstance(chosen, str):
        problem = _syntax_problem(chosen) if is_file(chosen) else ""
        return [f"chat_template: {problem}"] if problem else []
    unused = ("system_prompt", "chat_template_kwargs") if not chosen else ()
    return [f"{key}: needs chat_template" for key in unused if options.get(key)]


def _syntax_problem(file: str) -> str:
    """Return where a template is none of transformers' dialect of Jinja; "" if it is, or without Jinja."""
    try:
        import jinja2  # not at the top: an extra, of which backends that show templates have it
        from jinja2.ext import Extension
    except ImportError:
        return ""

    class Generation(Extension):
        """The block that marks what the assistant wrote, of whose tokens transformers makes a mask."""

        tags = {"generation"}  # noqa: RUF012 - as its base

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    try:
        dialect = jinja2.Environment(extensions=[Generation, "jinja2.ext.loopcontrols"], autoescape=False)
        dialect.compile(template_in(file))
    except jinja2.TemplateSyntaxError as error:
        return f"{file}, line {error.lineno}: {error.message}"
    except ConfigError as error:
        return str(error).removeprefix("[backend.options].chat_template: ")
    return ""


def problems_of(kind: type, options: Mapping[str, object]) -> list[str]:
    """Return one line per unknown key or invalid value of a table, starting with the key."""
    rules = {f.name: f.metadata.get("rule") or PLAIN[type(f.default)] for f in fields(kind)}
    judged = ((key, _problem(key, value, rules)) for key, value in options.items())
    return [f"{key}: {problem}" for key, problem in judged if problem]


def parsed(kind: Callable[..., Options], options: Mapping[str, Any], problems: Sequence[str]) -> Options:
    """Return checked options as a backend's own type; a ConfigError lists every problem."""
    if problems:
        raise ConfigError([f"[backend.options].{problem}" for problem in problems])
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()})


def _problem(key: str, value: object, rules: Mapping[str, Rule]) -> str:
    if key == "devices" and key not in rules:
        return 'this backend has no devices to choose; remove it, or use backend = "local"'
    if key not in rules:
        return "unknown key; " + hint(key, rules, f"known: {', '.join(rules)}")
    fits, wanted = rules[key]
    return "" if fits(value) else f"got {value!r}; needs {wanted}"
