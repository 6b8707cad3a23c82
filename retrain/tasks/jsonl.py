"""Prompts and answers from a file with one JSON object per line.

Answers are text; how a completion is compared with the answer is up to the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrain.json_lines import numbered_lines
from retrain.rollouts import Prompt
from retrain.tasks import Task
from retrain.tasks.generated import check
from retrain.tasks.rows import PLACEHOLDER, Fields, option_problems, read_prompts, split_prompts


def build(
    *,
    path: str = "",
    held_out_path: str = "",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    template: str = PLACEHOLDER,
    columns: Sequence[str] = (),
    held_out: float = 0.1,
    seed: int,
) -> Task:
    """Read the file and split it by prompt text; rows of one prompt stay on one side.

    Args:
        path: the file, UTF-8, relative to the current directory.
        held_out_path: a second file to evaluate on; then all of the first is used for training.
        prompt_field: field of the prompt text, not empty.
        answer_field: field of the reference answer; "" if the reward needs none.
        template: wording of the prompt; {prompt} is replaced by the text.
        columns: further fields that a reward gets in `prompt.row`; ["*"] is all.
        held_out: fraction of the distinct prompts that training never sees; unused with `held_out_path`.
        seed: determines the order and the split.

    Raises:
        ConfigError: a file cannot be read, or rows are invalid; lists their line numbers.
    """
    fields = Fields(prompt_field, answer_field, template, columns, are_typed=False)
    check(option_problems(fields, held_out, path=path))
    prompts = _read(path, "path", fields)
    given = _read(held_out_path, "held_out_path", fields) if held_out_path else []
    return split_prompts(prompts, given, held_out, seed)


def _read(path: str, option: str, fields: Fields) -> list[Prompt]:
    return read_prompts(numbered_lines(Path(path), option), fields, path, ":")
