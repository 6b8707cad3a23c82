"""Reads files that users write, one JSON object a line; every problem names its line.

A demonstration is `{"prompt": ..., "completion": ...}`. Each message of the assistant in `{"messages":
[{"role": ..., "content": ...}, ...]}` is one too, with the preceding messages as its prompt. A prompt may
be a list of messages, and its completion then a list of one message of the assistant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from retrain.base.errors import ConfigError, is_passing, records_error
from retrain.base.rollouts import Messages, Prompt, as_prompt

MOST_NUMBERS = 5  # of lines with the same problem
VALUE = re.compile(r"(?<= is ).*(?=; needs)|\d[\d.]*", re.DOTALL)  # of a problem: differs by line
MAX_PROBLEMS = 20  # shown per source; the rest are probably the same mistake
ROLES = ("system", "user", "assistant", "tool")
MESSAGE = '{"role": ..., "content": ...}'
FORMS = '{"prompt": ..., "completion": ...} or {"messages": [...]}'
KINDS = {
    list: "a list", str: "a string", int: "a number", float: "a number", bool: "true or false",
    NoneType: "null",
}  # fmt: skip
T = TypeVar("T")
R = TypeVar("R")


def read_rows(
    rows: Iterable[tuple[int, R]],
    read: Callable[[int, R], Iterable[T]],
    source: str,
    *,
    unit: str = ":",
    needs: str,
) -> list[T]:
    """Return what all numbered rows hold; a ConfigError lists the wrong ones, or says what is needed of none.

    `read` raises a ValueError for a wrong row; errors name its place by `source`, `unit` and number.
    """
    values: list[T] = []
    wrong: dict[str, tuple[str, list[int]]] = {}  # by problem: as it is first met, and where it is
    for number, row in rows:
        try:
            values += read(number, row)
        except ValueError as error:
            alike = VALUE.sub("", str(error))
            wrong.setdefault(alike, (str(error), []))[1].append(number)
    problems = []
    for what, (first, *others) in wrong.values():
        also = ""
        if others:
            numbers = ", ".join(map(str, others[:MOST_NUMBERS])) + (
                ", ..." if len(others) > MOST_NUMBERS else ""
            )
            also = f" (the same on {len(others)} other{'s' if len(others) > 1 else ''}: {numbers})"
        problems.append(f"{source}{unit}{first}: {what}{also}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"{source}: {len(problems) - MAX_PROBLEMS} more problems"]
    if not values and not problems:
        problems.append(f"{source}: no rows; needs {needs}")
    if problems:
        raise ConfigError(problems)
    return values


def object_of(line: str, needs: str) -> dict[str, Any]:
    """Return the JSON object of a line; a ValueError says what is needed."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); needs one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"got {KINDS[type(row)]}; needs {needs}")
    return row


def numbered_lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is not blank, with its number from 1; `option` names the file in a ConfigError.

    Raises:
        ConfigError: the file cannot be read, or a line is not UTF-8.
        RecordsError: the file cannot be read for now.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # the latter of a path with a null character
        if is_passing(error):
            raise records_error(path, "read", error) from error
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option}: cannot read {str(path)!r}: {why}; {how_to_correct(path)}") from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8"
            ) from error
        if text.strip():
            yield number, text


def how_to_correct(path: str | Path) -> str:
    """Return what to do about the path of a file that is not there."""
    if Path(path).is_absolute():
        return "correct the path"
    return "paths are relative to the file that names them, in --set to the working directory"


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
        messages = conversation("messages", row["messages"])
        turns = [at for at, (role, _) in enumerate(messages) if role == "assistant"]
        if not turns:
            raise ValueError('"messages": needs at least one message of the assistant')
        if turns[0] == 0:
            raise ValueError('"messages": begins with the assistant; needs a message before it')
        for at in turns:
            completion = messages[at][1]
            yield Demonstration(Prompt(number, *as_prompt(messages[:at], completion)), completion)
        return
    if isinstance(row.get("completion"), list):
        answers = conversation("completion", row["completion"])
        if [role for role, _ in answers] != ["assistant"]:
            raise ValueError('"completion": needs a text, or one message of the assistant')
        completion = answers[0][1]
    else:
        completion = _text(row, "completion")
    if isinstance(row.get("prompt"), list):
        messages = conversation("prompt", row["prompt"])
        if not messages or messages[-1][0] == "assistant":
            raise ValueError('"prompt": needs a last message that the model answers')
        yield Demonstration(Prompt(number, *as_prompt(messages, completion)), completion)
    else:
        yield Demonstration(Prompt(number, _text(row, "prompt"), completion), completion)


def conversation(key: str, messages: object) -> Messages:
    """Return a row's messages as (role, content); a ValueError names the key and what it needs."""
    if not isinstance(messages, list):
        raise ValueError(f'"{key}": needs a list of {MESSAGE}')
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f'"{key}": needs {MESSAGE}, the role one of {", ".join(ROLES)}')
    where = f'"{key}": '
    return tuple((message["role"], _text(message, "content", where, MESSAGE)) for message in messages)


def _text(row: dict[str, Any], key: str, where: str = "", needs: str = FORMS) -> str:
    if key not in row:
        raise ValueError(f"{where}has no {key!r}; needs {needs}")
    if not isinstance(row[key], str) or not row[key]:
        shown = json.dumps(row[key], default=repr)[:40]  # a program's messages may hold anything
        raise ValueError(f"{where}{key!r} is {shown}; needs a non-empty string")
    return str(row[key])
