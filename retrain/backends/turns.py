"""The tokens of what an environment said: rendered as the model's chat template does after a turn.

Earlier tokens are never rendered again. The template is rendered with a mark in the place of the policy's
turn, and what follows the mark is appended. How it writes calls of functions is seen from a call in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice, takewhile
from typing import Any

from retrain.backends.text import FIRST_MARK, Schemas, Text, messages_of
from retrain.base.errors import ConfigError, PromptError
from retrain.base.rollouts import CallForm, Given, Messages, NextTurn, Rollout

MARKS = 100  # that are tried
THOUGHT = "<think>\n5\n</think>\n\n"
KEY = "[backend.options].chat_template"
NAME, ARGUMENTS = "f58217", {"x58218": 58219}  # a call that no template writes by itself
SHOWS_NONE = "does not show functions to the policy"
NEEDS_TEMPLATE = f"{KEY}: functions are shown in the model's chat template; set it to true, or name a file"


def tokens_given(text: Text, turn: NextTurn) -> Given:
    """Return the tokens to append: the end of the policy's turn if it has none, then the messages."""
    text, said = text.of(turn.rollout.prompt), turn.messages
    place, shown = len(turn.rollout.tokens), "\n".join(content for _, content in said)
    if turn.tokens:
        return Given(place, text.checked(turn.tokens), shown)
    if not text.chat:
        return Given(place, text.tokens_of(shown), shown)
    tokens = text.tokens_of(_after(text, messages_of(turn.rollout.prompt), said))
    has_ended = turn.rollout.tokens[-1] in text.end_ids and tokens[0] in text.end_ids
    return Given(place, tokens[1:] if has_ended else tokens, shown)


def with_messages(text: Text, turn: NextTurn, context: int | None) -> Rollout:
    """Return a rollout with what was said after its last turn; PromptError if that fills the context."""
    new = tokens_given(text, turn)
    if context is not None and len(new.tokens) >= context:
        raise PromptError(
            f"an observation has {len(new.tokens)} tokens, which leaves no room in the model's context "
            f"of {context}; shorten what the environment says"
        )
    return replace(turn.rollout, given=(*turn.rollout.given, new))


def offer_functions(text: Text, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
    """Show functions to the policy, and return how it writes calls.

    Raises:
        ConfigError: the template does not support them, or, if it is to be extended with their results,
            cannot be.
    """
    if not text.chat:
        raise ConfigError(NEEDS_TEMPLATE)
    text.offer(schemas)
    if is_extended:
        check_turns(text, (("tool", "2"), ("tool", "3")))
    return form_of(text, schemas)


def check_turns(text: Text, asked: Messages = (("user", "2"),)) -> None:
    """Raise a ConfigError if the template would render earlier turns, answered so, in another way."""
    if not text.chat:
        return
    first: Messages = (("user", "1"),)
    marks = ("58211", "58212")
    conversation = (*first, ("assistant", marks[0]), *asked, ("assistant", marks[1]), *asked)
    after = _after(text, first, asked)
    parts = [text.shown(first), marks[0], after, marks[1], after]
    whole = text.shown(conversation)
    if whole != "".join(parts):
        raise _refused("renders earlier turns of a conversation in another way")
    if text.tokens_of(whole) != sum(map(text.tokens_of, parts), ()):
        raise _refused("has no special token between turns, so tokens would span two of them")
    thought = text.shown((*first, ("assistant", THOUGHT + marks[0]), *asked))
    if text.may_reason and THOUGHT.strip() not in thought:
        advice = "; chat_template_kwargs = { enable_thinking = false } trains it without"
        try:
            check_turns(text.with_variables(enable_thinking=False), asked)
        except ConfigError:
            advice = ""
        raise _refused(f"drops the reasoning of earlier turns, which the policy would still read{advice}")


def _after(text: Text, before: Messages, said: Messages) -> str:
    """Return what the template shows after a turn of the assistant that answers `before`."""
    for mark in map(str, islice(count(FIRST_MARK), MARKS)):
        shown = text.shown((*before, ("assistant", mark), *said))
        if shown.count(mark) == 1:
            return shown.partition(mark)[2]
    raise _refused("does not show the assistant's turns as they are")


def _refused(what: str) -> PromptError:
    return PromptError(
        f"{KEY}: the tokenizer's template {what}, so turns cannot be appended token by token; "
        "set [environment].separate_turns = true, which trains each turn as a sample of its own, or "
        "name a file with another template"
    )


def form_of(text: Text, schemas: Schemas) -> CallForm:
    """Return the form of the calls of functions that were offered.

    Raises:
        ConfigError: the template does not show the functions, or writes calls other than as JSON.
    """
    question = {"role": "user", "content": "1"}
    shown = text.rendered([question], "a conversation with functions")
    if not all(schema["function"]["name"] in shown for schema in schemas):
        raise form_refused(SHOWS_NONE)
    call = {"type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with_call = text.rendered([question, turn], "the call of a function", add_generation_prompt=False)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(shown, with_call, strict=False))
    written = with_call[len(list(same)) :]
    for place, value in _values(written):
        shown_call = value[0] if isinstance(value, list) and value else value
        if isinstance(shown_call, dict) and isinstance(shown_call.get("function"), dict):
            shown_call = shown_call["function"]
        parts = shown_call.items() if isinstance(shown_call, dict) else ()
        keys = {kind: key for key, part in parts if (kind := _kind(part))}
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


def _kind(given: Any) -> str:
    """Return which part of the call a value is; "" for neither."""
    if given == NAME:
        return "name"
    return "arguments" if given in (ARGUMENTS, json.dumps(ARGUMENTS)) else ""


def form_refused(what: str) -> ConfigError:
    """Return the error of a template that cannot be used for calls."""
    return ConfigError(
        f"[environment].environment: the chat template {what}; name a file with another in {KEY}, or set "
        '[environment.options].calls = "python", with which a turn such as add(2, 3) is a call'
    )
