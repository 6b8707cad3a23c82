"""Finds calls in what a policy wrote: as the model's chat template writes them, or as Python does."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from retrain.rollouts import CallForm

BETWEEN = " \t\r\n;,"  # what may separate the calls of a turn


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()
    problem: str = ""  # why it cannot be made


def calls_in(text: str, form: CallForm | None) -> list[Call]:
    """Return the calls of a turn; none if it is an answer. Without a form, calls are lines of Python."""
    if form is None:
        return list(_python_calls(text))
    if form.opening:
        return [call for part in text.split(form.opening)[1:] for call in _json_calls(part, form)]
    return list(_json_calls(text, form)) if text.lstrip()[:1] in ("{", "[") else []


def _json_calls(text: str, form: CallForm) -> Iterator[Call]:
    text = text.lstrip()
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except ValueError as error:
            yield Call("", {}, problem=f"the call is not valid JSON: {error}")
            return
        for one in value if isinstance(value, list) else [value]:
            yield _call_of(one, form)
        text = text[end:].lstrip(BETWEEN)
        if text[:1] not in ("{", "["):
            return


def _call_of(value: Any, form: CallForm) -> Call:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get(form.name) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return Call("", {}, problem=f"the call has no {form.name!r}")
    arguments = value.get(form.arguments, {})
    if isinstance(arguments, str):  # some templates write them as a text
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return Call(name, {}, problem=f"{form.arguments!r} is not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(name, {}, problem=f"{form.arguments!r} is not an object")
    return Call(name, arguments)


def _python_calls(text: str) -> Iterator[Call]:
    """Iterate over the calls of a text that consists of nothing else."""
    try:
        lines = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    found = [line.value for line in lines if isinstance(line, ast.Expr)]
    calls = [one for one in found if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
    if len(calls) == len(lines):
        yield from map(_python_call, calls)


def _python_call(call: ast.Call) -> Call:
    assert isinstance(call.func, ast.Name)
    name = call.func.id
    try:
        positional = tuple(map(ast.literal_eval, call.args))
        keywords = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords if one.arg}
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Call(name, {}, problem=f"{name}: an argument is not a plain value")
    return Call(name, keywords, positional)
