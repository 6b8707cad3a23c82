"""Prompts and answers from a file with one JSON object per line.

Answers are text; how a completion is compared with the answer is up to the reward. The options are described
by `retrain.plugins.tasks.rows.task_of_files`.
"""

from __future__ import annotations

from pathlib import Path

from retrain.base.json_lines import numbered_lines
from retrain.base.rollouts import Prompt
from retrain.plugins.tasks.rows import Fields, read_prompts, task_of_files


def _read(path: str, option: str, fields: Fields) -> list[Prompt]:
    return read_prompts(numbered_lines(Path(path), option), fields, path, ":")


build = task_of_files(_read)
