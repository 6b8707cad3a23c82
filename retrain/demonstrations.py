"""Demonstrations: written completions for supervised warm-up before reinforcement learning.

A row is `{"prompt": ..., "completion": ...}` or `{"messages": [{"role": ..., "content": ...}, ...]}`. Every
assistant message is a demonstration, with the preceding messages as its prompt.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.json_lines import numbered_lines, object_of, read_rows
from retrain.rollouts import Messages, Prompt

ROLES = ("system", "user", "assistant", "tool")
FORMS = '{"prompt": ..., "completion": ...} or {"messages": [...]}'


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the completion to learn."""

    prompt: Prompt
    completion: str


def read_demonstrations(path: str) -> list[Demonstration]:
    """Read a JSONL file; a ConfigError lists the numbers of wrong lines."""
    lines = numbered_lines(Path(path), "path")
    return read_rows(lines, _demonstrations, path, needs=f"one object per line: {FORMS}")


def _demonstrations(number: int, line: str) -> Iterator[Demonstration]:
    row = object_of(line, FORMS)
    if "messages" in row:
        yield from _of_messages(number, row["messages"])
    else:
        prompt, completion = (_text(row, key) for key in ("prompt", "completion"))
        yield Demonstration(Prompt(number, prompt, completion), completion)


def _of_messages(number: int, messages: object) -> Iterator[Demonstration]:
    said = conversation("messages", messages)
    turns = [at for at, (role, _) in enumerate(said) if role == "assistant"]
    if not turns:
        raise ValueError('"messages": needs at least one message of the assistant')
    if turns[0] == 0:
        raise ValueError('"messages": begins with the assistant; needs a message before it')
    for at in turns:
        completion = said[at][1]
        yield Demonstration(Prompt(number, *as_prompt(said[:at], completion)), completion)


def conversation(key: str, messages: object) -> tuple[tuple[str, str], ...]:
    """Return a row's messages as (role, content); a ValueError names the key and what it needs."""
    if not isinstance(messages, list):
        raise ValueError(f'"{key}": needs a list of {{"role": ..., "content": ...}}')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f'"{key}": needs {{"role": ..., "content": ...}}, the role one of {", ".join(ROLES)}'
            )
    return tuple((message["role"], _text(message, "content")) for message in messages)


def as_prompt(
    messages: tuple[tuple[str, str], ...], answer: str
) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return a prompt's text, answer and messages; a user's only message is a prompt like any other."""
    if len(messages) == 1 and messages[0][0] == "user":
        return messages[0][1], answer, ()
    return json.dumps(messages, ensure_ascii=False), answer, messages


def next_prompt(prompt: Prompt, said: Messages, *, has_template: bool) -> Prompt:
    """Return a prompt that continues a task's conversation; without a template, texts follow each other."""
    if not has_template:
        return replace(prompt, text="".join(content for _, content in said), messages=())
    text, _, messages = as_prompt(said, prompt.answer)
    return replace(prompt, text=text, messages=messages)


def _text(row: dict[str, Any], key: str) -> str:
    if key not in row:
        raise ValueError(f"has no {key!r}; needs {FORMS}")
    if not isinstance(row[key], str) or not row[key]:
        raise ValueError(f"{key!r} is {json.dumps(row[key])[:40]}; needs a non-empty string")
    return str(row[key])
