"""Prompts and answers from a Hugging Face data set: by hub id, or a local directory or file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.json_lines import how_to_correct
from retrain.base.rollouts import Prompt
from retrain.plugins.tasks import Task
from retrain.plugins.tasks.generated import check
from retrain.plugins.tasks.rows import (
    PLACEHOLDER,
    Fields,
    check_columns,
    option_problems,
    read_prompts,
    split_prompts,
)

EXTRA = "datasets"
PACKAGES = ("datasets",)
READERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}


def build(
    *,
    path: str = "",
    subset: str = "",
    split: str = "train",
    held_out_split: str = "",
    revision: str = "",
    prompt_field: str = "prompt",
    answer_field: str = "answer",
    template: str = PLACEHOLDER,
    columns: Sequence[str] = (),
    held_out: float = 0.1,
    seed: int,
) -> Task:
    """Load the data set and split it by prompt text; rows of one prompt stay on one side.

    The options that are not listed are those of the task `jsonl`, with columns for fields; whole numbers are
    converted to text.

    Args:
        path: hub id such as "openai/gsm8k"; or a directory, written by `save_to_disk` or with files that
            `load_dataset` reads; or one file: .json, .jsonl, .csv, .tsv, .parquet or .arrow.
        subset: name of a configuration, if the data set has several.
        split: split to train on; slices such as "train[:1000]" work.
        held_out_split: split to evaluate on, such as "test"; then all of `split` is used for training.
        revision: branch, tag or commit on the hub.

    Raises:
        ConfigError: the package is not installed, the data set cannot be loaded, or rows are invalid.
    """
    fields = Fields(prompt_field, answer_field, template, columns)
    check(option_problems(fields, held_out, path=path, split=split))

    def read(split: str) -> list[Prompt]:
        place = f"{path} [{split}]"
        loaded = _load(path, split, fields, name=subset or None, revision=revision or None)
        rows = loaded.select_columns(check_columns(loaded.column_names, fields, place))
        return read_prompts(enumerate(rows, start=1), fields, place)

    return split_prompts(read(split), read(held_out_split) if held_out_split else [], held_out, seed)


def _load(path: str, split: str, fields: Fields, **at_hub: str | None) -> Any:
    library = load("datasets", EXTRA, "datasets")
    saved = Path(path)
    reader, how = READERS.get(saved.suffix.lower(), ("", {}))
    if reader == "csv":
        # cells as text: "007" stays "007", and "NA" stays "NA"
        columns = dict.fromkeys((fields.prompt, fields.answer), str)
        how = {**how, "keep_default_na": False, "converters": columns}
    may_be_hub_id = not path.startswith((".", "/", "~")) and path.count("/") <= 1
    if not os.path.exists(path) and (reader or not may_be_hub_id):  # noqa: PTH110 - Path raises
        raise ConfigError(f"path: no file or directory {path!r}; {how_to_correct(path)}")
    try:
        if reader and saved.is_file():
            return library.load_dataset(reader, data_files=path, split=split, **how)
        if (saved / "dataset_dict.json").is_file():
            return library.load_from_disk(path)[split]
        if (saved / "state.json").is_file():
            return library.load_from_disk(path)
        return library.load_dataset(path, split=split, **at_hub)
    except (OSError, ValueError, LookupError, library.exceptions.DatasetsError) as error:
        raise ConfigError(f"path: cannot load {path!r} [{split}]: {error}") from error
