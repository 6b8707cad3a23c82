"""Prompts and answers from two columns of a Parquet file; whole numbers are converted to text.

The options are those of the task `jsonl`, with columns for fields.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.json_lines import how_to_correct
from retrain.base.rollouts import Prompt
from retrain.plugins.tasks.rows import Fields, check_columns, read_prompts, task_of_files

EXTRA = "parquet"
PACKAGES = ("pyarrow",)


def _read(path: str, option: str, fields: Fields) -> list[Prompt]:
    parquet = load("pyarrow.parquet", EXTRA, "parquet")
    if not os.path.isfile(path):  # noqa: PTH113 - Path raises for a name too long
        raise ConfigError(f"{option}: no file {path!r}; {how_to_correct(path)}")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {path!r} is not a Parquet file that can be read: {error}") from error
    return read_prompts(_rows(file, path, fields), fields, path)


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


build = task_of_files(_read)
