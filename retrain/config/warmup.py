"""What is wrong with [warmup]: keys that need each other, the file's rows, and who can show them."""

from __future__ import annotations

from collections.abc import Iterator

from retrain import registry
from retrain.config.schema import Backend
from retrain.errors import ConfigError

Found = Iterator[tuple[tuple[str | int, ...], str]]


def warm_up_problems(table: object, backend: object, read_file: bool) -> Found:
    """Return (location, problem) pairs; what has a wrong type is passed over.

    `steps = 0` written down is a decision (a condition may leave the warm-up out); forgotten is a mistake.
    """
    if not isinstance(table, dict) or not isinstance(backend, dict):
        return
    steps, path = table.get("steps", 0), table.get("path", "")
    if type(steps) is not int or not isinstance(path, str) or (steps <= 0 and not path):
        return
    if not path:
        yield ("warmup", "path"), f"steps = {steps} need a JSONL file to learn from"
    elif "steps" not in table:
        yield ("warmup", "steps"), "is not given, so path would not be read; say how many updates, 0 for none"
    elif steps <= 0:
        return
    elif read_file:
        yield from _file_problems(path, backend)


def _file_problems(path: str, backend: dict[str, object]) -> Found:
    from retrain.demonstrations import read_demonstrations  # not at the top: few files have a warm-up

    try:
        rows = read_demonstrations(path)
    except ConfigError as error:
        for problem in error.problems:
            yield ("warmup", "path"), problem.removeprefix("path: ")
        return
    name, options = backend.get("backend", Backend.backend), backend.get("options", {})
    built_in = registry.is_built_in("backends", name)
    has_template = isinstance(options, dict) and options.get("chat_template") is True
    talks = next((row.prompt.id for row in rows if row.prompt.messages), None)
    if talks is not None and built_in and not has_template:
        yield (
            ("warmup", "path"),
            f"{path}:{talks}: a conversation needs a chat template: [backend.options] chat_template = true "
            "(backends local and tinker); a row of one user message does without",
        )
