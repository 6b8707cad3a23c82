"""Reads files that users write, one JSON object a line; every problem names its line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from retrain.errors import ConfigError


def numbered_lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is not blank, with its number counted from 1.

    Args:
        path: UTF-8, with or without a byte order mark.
        option: the key that names the file, for the error.

    Raises:
        ConfigError: the file cannot be read, or a line is not UTF-8.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot read {str(path)!r}: {error.strerror}; "
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
