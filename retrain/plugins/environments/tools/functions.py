"""What a policy may call: functions of the user's, and `python`, which runs programs in a sandbox.

JSON schemas of signatures and docstrings describe them, by which calls are checked.
"""

from __future__ import annotations

import inspect
import json
import re
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import pydantic

from retrain.base.errors import first_line
from retrain.plugins.sandbox import Limits, Sandbox, SandboxError, choose
from retrain.plugins.sandbox.cell import Cell

ARGUMENT = re.compile(r"^\s*(\w+)(?: \([^)]*\))?:\s*(.+)$")  # of a docstring's section
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):\s*$")
PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LONGEST_OUTPUT = 1 << 16  # bytes
# what a program prints is what the policy reads, so its error is printed as well
SHOWING = """\
import traceback
try:
    exec(compile({program!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error)
    print("".join(traceback.format_exception(error)), end="")
"""


class ToolError(Exception):
    """Why a call fails; the policy reads it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]  # as chat templates take it
    arguments: type[pydantic.BaseModel]

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def bound(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, checked against the function's type hints.

        Raises:
            ToolError: they do not fit.
        """
        try:
            checked = self.arguments.model_validate_json(json.dumps(arguments))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ToolError(": ".join(filter(None, (self.name, where, first["msg"])))) from error
        except (TypeError, ValueError, RecursionError) as error:  # no JSON: bytes, a set, too many digits
            raise ToolError(f"{self.name}: an argument is not a plain value") from error
        return {one.alias or name: getattr(checked, name) for name, one in type(checked).model_fields.items()}

    @property
    def parameters(self) -> list[str]:
        return [one.alias or name for name, one in self.arguments.model_fields.items()]


def tool_of(name: str, function: Callable[..., Any]) -> Tool:
    """Return a function as a tool.

    Raises:
        ValueError: it lacks a docstring or a type hint, or takes what JSON cannot express.
    """
    description, notes = _documentation(function)
    if not description:
        raise ValueError("it has no docstring; the policy reads from it what the function does")
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, one in enumerate(inspect.signature(function).parameters.values()):
        if one.kind not in PLAIN:
            what = one.kind.description
            raise ValueError(f"its parameter {one.name!r} is {what}; a call gives each argument by name")
        if one.name not in hints:
            raise ValueError(
                f"its parameter {one.name!r} has no type hint; write one, such as {one.name}: int"
            )
        default = ... if one.default is one.empty else one.default
        described = pydantic.Field(alias=one.name, description=notes.get(one.name))
        fields[f"field{number}"] = Annotated[hints[one.name], described], default  # pydantic drops `_name`
    try:
        config = pydantic.ConfigDict(extra="forbid", strict=True)
        model = pydantic.create_model(name, __config__=config, **fields)
        parameters = _bare(model.model_json_schema())
    except (pydantic.errors.PydanticUserError, NameError, TypeError) as error:
        raise ValueError(f"its parameters cannot be written as JSON: {first_line(error)}") from error
    schema = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, function, {"type": "function", "function": schema}, model)


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says of a function, and of each of its parameters."""
    before: list[str] = []
    notes: dict[str, str] = {}
    section = ""
    for line in (inspect.getdoc(function) or "").splitlines():
        if heading := SECTION.match(line):
            section = heading[1]
        elif not section:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters") and (found := ARGUMENT.match(line)):
            notes[found[1]] = found[2].strip()
    return "\n".join(before).strip(), notes


def _bare(schema: Any, *, is_names: bool = False) -> Any:
    """Return a schema without titles, which repeat names, and without `additionalProperties`."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = () if is_names else ("title", "additionalProperties")
    return {
        key: _bare(value, is_names=key == "properties")
        for key, value in schema.items()
        if key not in left_out
    }


class PythonTool:
    """Runs programs in sandboxes that wait for them; they are opened when first needed."""

    def __init__(self, sandbox: str, options: Mapping[str, Any], limit_s: float, memory_bytes: int) -> None:
        self._name, self._options = sandbox, options
        self._limits = Limits(limit_s, memory_bytes)
        self._idle: list[Cell] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @cached_property
    def sandbox(self) -> Sandbox:
        """Where programs run; ConfigError if it cannot be used here."""
        return choose(self._name, self._options)

    def python(self, program: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            program: the source text; print what you want to know.
        """
        try:
            cell = self._take()
        except SandboxError as error:
            raise ToolError(f"the sandbox failed: {error}") from error
        is_sound = True
        try:
            return self._run(cell, program)
        except SandboxError as error:
            is_sound = False
            raise ToolError(f"the sandbox failed: {error}") from error
        finally:
            self._give_back(cell, is_sound)

    def close(self) -> None:
        """End all sandboxes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for cell in idle:
            cell.close()

    def _take(self) -> Cell:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Cell(self.sandbox)

    def _give_back(self, cell: Cell, is_sound: bool) -> None:
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(cell)
                return
        cell.close()

    def _run(self, cell: Cell, program: str) -> str:
        job = {"job": "stdio", "source": SHOWING.format(program=program), "input": ""}
        ended, output = cell.run(self._limits, job, LONGEST_OUTPUT)
        if output is None:
            raise ToolError(f"the program printed more than {LONGEST_OUTPUT >> 10} KB")
        if not ended.in_time:
            raise ToolError(f"the program took longer than {self._limits.seconds:g} s")
        if ended.over:
            raise ToolError(f"the program ran out of {' and '.join(sorted(ended.over))}")
        if ended.broke:
            raise ToolError(f"the program {ended.broke}")
        if ended.code < 0:
            raise ToolError(f"the program was ended by signal {-ended.code}")
        return output.decode("utf-8", "replace")
