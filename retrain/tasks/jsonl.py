"""Prompts and answers from a file of one JSON object a line.

The answer is compared as text by the reward; whoever wants another comparison writes a reward.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from retrain.errors import ConfigError
from retrain.rollouts import Prompt
from retrain.tasks import Task
from retrain.tasks._generated import check, held_out_count, held_out_problem

MAX_PROBLEMS = 20  # shown of one file; the rest are likely the same mistake


def build(
    *,
    path: str = "",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    held_out: float = 0.1,
    seed: int,
) -> Task:
    """Read the file and split it by prompt text; rows of one prompt stay on one side.

    Args:
        path: the file, UTF-8, relative to the current directory.
        prompt_field: name of the text that the policy is shown, not empty.
        answer_field: name of the text that a reward compares with.
        held_out: fraction of the distinct prompts that training never sees.
        seed: decides the order and the split.

    Raises:
        ConfigError: the file cannot be read, or rows are wrong: each with its line number.
    """
    named = (("path", path), ("prompt_field", prompt_field), ("answer_field", answer_field))
    check(
        [
            f"{key}: got {value!r}; needs a text that is not empty"
            for key, value in named
            if not (isinstance(value, str) and value)
        ]
        + held_out_problem(held_out)
    )
    prompts = _read(Path(path), prompt_field, answer_field)
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    generator = random.Random(seed)
    generator.shuffle(texts)
    generator.shuffle(prompts)
    kept = set(texts[: held_out_count(len(texts), held_out)])
    return Task(
        train=tuple(prompt for prompt in prompts if prompt.text not in kept),
        held_out=tuple(prompt for prompt in prompts if prompt.text in kept),
        alphabet="".join(sorted({c for prompt in prompts for c in prompt.text + prompt.answer})),
        longest_answer=max(len(prompt.answer) for prompt in prompts),
    )


def _read(path: Path, prompt_field: str, answer_field: str) -> list[Prompt]:
    prompts, problems = [], []
    for number, line in _lines(path):
        try:
            prompt, answer = _fields(line, prompt_field, answer_field)
            prompts.append(Prompt(number, prompt, answer))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if len(problems) > MAX_PROBLEMS:
        hidden = len(problems) - MAX_PROBLEMS
        problems[MAX_PROBLEMS:] = [f"{path}: {hidden} more lines are wrong"]
    check(problems)
    if not prompts:
        raise ConfigError(f"{path}: no rows; needs one JSON object a line")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each line that is not blank, with its number counted from 1."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"path: cannot read {str(path)!r}: {error.strerror}; "
            "the path is relative to the current directory"
        ) from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8"
            ) from error
        if text.strip():
            yield number, text


def _fields(line: str, prompt_field: str, answer_field: str) -> tuple[str, str]:
    """Give a row's prompt and answer; ValueError says what is wrong with it."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); needs one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(
            f"got a {type(row).__name__}; needs an object with {prompt_field!r} and {answer_field!r}"
        )
    return _text(row, prompt_field, "prompt_field") or _empty(prompt_field), _text(
        row, answer_field, "answer_field"
    )


def _text(row: dict[str, object], field: str, option: str) -> str:
    if field not in row:
        raise ValueError(f"no field {field!r}; add it, or name another with {option}")
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"{field!r} is {json.dumps(value)[:40]}; needs a text in quotes")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field!r} holds half a surrogate pair; write the whole character") from error
    return value


def _empty(field: str) -> str:
    raise ValueError(f"{field!r} is empty; a policy needs something to go on")
