"""How a chat template writes calls of functions, seen from a call that it renders."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from retrain.backends.text import Text
from retrain.errors import ConfigError
from retrain.rollouts import CallForm

NAME, ARGUMENTS = "f58217", {"x58218": 58219}  # a call that no template writes by itself
SHOWS_NONE = "does not show functions to the policy"
KEY = "[environment].environment"


def form_of(text: Text, schemas: Sequence[Mapping[str, Any]]) -> CallForm:
    """Return the form of the calls of functions that were offered.

    Raises:
        ConfigError: the template does not show the functions, or writes calls other than as JSON.
    """
    asked = {"role": "user", "content": "1"}
    shown = text.rendered([asked], "a conversation with functions")
    if not all(schema["function"]["name"] in shown for schema in schemas):
        raise form_refused(SHOWS_NONE)
    call = {"type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with_call = text.rendered([asked, turn], "the call of a function", add_generation_prompt=False)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(shown, with_call, strict=False))
    written = with_call[len(list(same)) :]
    for place, value in _values(written):
        keys = {kind: key for key, given in _call_in(value).items() if (kind := _kind(given))}
        if sorted(keys) == ["arguments", "name"]:
            return CallForm(text.without_special(written[:place]).strip(), **keys)
    raise form_refused("does not write calls of functions as JSON with a name and arguments")


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """Iterate over the JSON values that begin in a text, each with its place."""
    for place, character in enumerate(text):
        if character in "{[":
            try:
                yield place, json.JSONDecoder().raw_decode(text, place)[0]
            except ValueError:
                continue


def _call_in(value: Any) -> dict[str, Any]:
    """Return the object that may be a call: a value itself, or the first of a list, or its `function`."""
    one = value[0] if isinstance(value, list) and value else value
    if not isinstance(one, dict):
        return {}
    return one["function"] if isinstance(one.get("function"), dict) else one


def _kind(given: Any) -> str:
    """Return which part of the call a value is; "" for neither."""
    if given == NAME:
        return "name"
    return "arguments" if given in (ARGUMENTS, json.dumps(ARGUMENTS)) else ""


def form_refused(what: str) -> ConfigError:
    """Return the error of a template that cannot be used for calls."""
    return ConfigError(
        f"{KEY}: the tokenizer's chat template {what}; use another template, or set "
        '[environment.options].calls = "python", with which a turn such as add(2, 3) is a call'
    )
