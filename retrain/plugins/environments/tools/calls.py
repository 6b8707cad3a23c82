"""Finds calls in what a policy wrote: as the model's chat template writes them, or as Python does."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.base.rollouts import CallForm

BETWEEN = " \t\r\n;,"  # what may separate the calls of a turn


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()
    problem: str = ""  # why it cannot be made


def calls_in(text: str, form: CallForm | None) -> list[ToolCall]:
    """Return the calls of a turn; none if it is an answer. Without a form, calls are lines of Python."""
    if form is None:
        return _python_calls(text)
    if not form.opening:
        return _json_calls(text, form)[0] if text.lstrip()[:1] in ("{", "[") else []
    found: list[ToolCall] = []
    rest = text.partition(form.opening)[2]
    while rest:
        calls, rest = _json_calls(rest, form)
        found += calls
        rest = rest.partition(form.opening)[2]
    return found


def _json_calls(text: str, form: CallForm) -> tuple[list[ToolCall], str]:
    """Return the calls that a text begins with, and the text after them."""
    found: list[ToolCall] = []
    text = text.lstrip()
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*found, ToolCall("", {}, problem=f"the call is not valid JSON: {error}")], text
        found += [_call_of(one, form) for one in (value if isinstance(value, list) else [value])]
        text = text[end:].lstrip(BETWEEN)
        if text[:1] not in ("{", "["):
            break
    return found, text


def _call_of(value: Any, form: CallForm) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get(form.name) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall("", {}, problem=f"the call has no {form.name!r}")
    arguments = value.get(form.arguments, {})
    if isinstance(arguments, str):  # some templates write them as a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, problem=f"{form.arguments!r} is not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, problem=f"{form.arguments!r} is not an object")
    return ToolCall(name, arguments)


def _python_calls(text: str) -> list[ToolCall]:
    """Return the calls of a text that consists of nothing else."""
    calls: list[ToolCall] = []
    try:
        lines = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    for line in lines:
        call = line.value if isinstance(line, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return []
        name, problem = call.func.id, ""
        try:
            positional = tuple(map(ast.literal_eval, call.args))
            keywords = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            calls.append(ToolCall(name, {}, problem=f"{name}: an argument is not a plain value"))
            continue
        named = {key: value for key, value in keywords.items() if key is not None}
        if len(named) < len(call.keywords):  # **{...}, or a name twice
            problem = f"{name}: write each argument once, by its place or as name=value"
            named, positional = {}, ()
        calls.append(ToolCall(name, named, positional, problem))
    return calls
