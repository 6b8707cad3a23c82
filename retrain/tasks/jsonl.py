"""Prompts and answers from a file of one JSON object a line.

The answer is compared as text by the reward; whoever wants another comparison writes a reward.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from retrain.json_lines import numbered_lines
from retrain.rollouts import Prompt
from retrain.tasks import Task
from retrain.tasks.generated import check
from retrain.tasks.rows import (
    PLACEHOLDER,
    Fields,
    Row,
    option_problems,
    read_prompts,
    split_as_given,
    split_by_fraction,
)


def build(
    *,
    path: str = "",
    held_out_path: str = "",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    template: str = PLACEHOLDER,
    held_out: float = 0.1,
    seed: int,
) -> Task:
    """Read the file and split it by prompt text; rows of one prompt stay on one side.

    Args:
        path: the file, UTF-8, relative to the current directory.
        held_out_path: a second file to evaluate on; then the first is trained on whole.
        prompt_field: name of the text that the policy is shown, not empty.
        answer_field: name of the text that a reward compares with;
            "" where none does.
        template: what the policy is shown, {prompt} being that text.
        held_out: fraction of the distinct prompts that training never sees, without `held_out_path`.
        seed: decides the order and the split.

    Raises:
        ConfigError: a file cannot be read, or rows are wrong: each with its line number.
    """
    fields = Fields(prompt_field, answer_field, template, text="a text in quotes")
    check(option_problems(fields, held_out, path=path))
    prompts = _read(path, "path", fields)
    if held_out_path:
        return split_as_given(prompts, _read(held_out_path, "held_out_path", fields), seed)
    return split_by_fraction(prompts, held_out, seed)


def _read(path: str, option: str, fields: Fields) -> list[Prompt]:
    return read_prompts(_rows(path, option, fields), fields, path)


def _rows(path: str, option: str, fields: Fields) -> Iterator[Row]:
    for number, line in numbered_lines(Path(path), option):
        place = f"{path}:{number}"
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield Row(number, place, {}, f"not JSON ({error}); needs one object a line")
            continue
        if isinstance(values, dict):
            yield Row(number, place, values)
        else:
            wanted = f"an object with {fields.prompt!r} and {fields.answer!r}"
            yield Row(number, place, {}, f"got a {type(values).__name__}; needs {wanted}")
