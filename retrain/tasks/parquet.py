"""Prompts and answers from two columns of a Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError
from retrain.extras import load
from retrain.json_lines import how_to_correct
from retrain.rollouts import Prompt
from retrain.tasks import Task
from retrain.tasks.generated import check
from retrain.tasks.rows import (
    PLACEHOLDER,
    Fields,
    check_columns,
    option_problems,
    read_prompts,
    split_prompts,
)

EXTRA = "parquet"
PACKAGES = ("pyarrow",)


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

    The options are those of the task `jsonl`, with columns for fields; whole numbers are converted to text.

    Raises:
        ConfigError: pyarrow is not installed, a file cannot be read, or rows are invalid.
    """
    fields = Fields(prompt_field, answer_field, template, columns)
    check(option_problems(fields, held_out, path=path))
    prompts = _read(path, "path", fields)
    given = _read(held_out_path, "held_out_path", fields) if held_out_path else []
    return split_prompts(prompts, given, held_out, seed)


def _read(path: str, option: str, fields: Fields) -> list[Prompt]:
    return read_prompts(_rows(_open(path, option), path, fields), fields, path)


def _open(path: str, option: str) -> Any:
    parquet = load("pyarrow.parquet", EXTRA, "parquet")
    if not Path(path).is_file():
        raise ConfigError(f"{option}: no file {path!r}; {how_to_correct(path)}")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {path!r} is not a Parquet file that can be read: {error}") from error


def _rows(file: Any, path: str, fields: Fields) -> Iterator[tuple[int, dict[str, Any]]]:
    columns = check_columns(file.schema_arrow.names, fields, path)
    number = 0
    try:
        for batch in file.iter_batches(columns=columns):
            for values in batch.to_pylist():
                number += 1
                yield number, values
    except (OSError, ValueError, NotImplementedError) as error:  # damaged pages, or text that is not UTF-8
        raise ConfigError(
            f"{path} row {number + 1}: cannot be read, nor any later row: {error}; write the file again"
        ) from error
