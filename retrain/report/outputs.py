"""Writes a report's files: never through a link, and over another program's file only on request."""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from retrain.errors import ConfigError, records_error
from retrain.report.charts import VEGA_LITE, Chart, converter
from retrain.report.contents import contents
from retrain.report.export import FIRST, TABLES, rows_of, write_table, written
from retrain.report.gather import CampaignRecord
from retrain.report.page import MARK, page
from retrain.report.sides import check_metrics, known_metrics

FORMATS = ("html", "png", "svg", "csv", "parquet")
IMAGES = ("png", "svg")
READ_BYTES = 65536  # at either end of a file
PNG_START = 33  # bytes of the signature and the first chunk, which precede any other
SCALE = 3.0  # pixels per point of a PNG: 300 dpi at the width of a page


def chosen_format(output: Path | None, form: str | None, known: Collection[str] = FORMATS) -> str:
    """Return the requested format, else the one of the file's suffix, else the first known one.

    Raises:
        ConfigError: the suffix is unknown.
    """
    if form is not None:
        return str(form)
    ending = output.suffix.lstrip(".").lower() if output else next(iter(known))
    if ending not in known:
        raise ConfigError(f"{output}: unknown file format; add --format {', '.join(known)}")
    return ending


def check_target(target: Path, form: str, may_replace: Callable[[str], bool]) -> None:
    """Check, before anything is computed, that the target may be written; see `prepare`."""
    prepare([target.with_name(f"{target.stem}-chart.{form}") if form in IMAGES else target], may_replace)


def write(
    campaign: CampaignRecord,
    target: Path,
    form: str,
    metrics: Sequence[str],
    may_replace: Callable[[str], bool] = lambda what: False,
) -> list[Path]:
    """Write a report.

    Returns:
        The files: one, or for images one per chart beside `target`.

    Raises:
        ConfigError: an extra is not installed, a metric is unknown, there is nothing to draw, or an
            image would replace another program's file.
        RecordsError: the file cannot be written.
    """
    check_metrics(metrics, known_metrics(campaign.runs))
    if form in TABLES:
        write_table(rows_of([campaign]), form, target)
        return [target]
    shown = contents(campaign, metrics)
    if form == "html":
        files = {target: page(shown).encode("utf-8", "replace")}
    elif shown.charts:
        named = {target.with_name(f"{target.stem}-{one.name}.{form}"): one for one in shown.charts}
        prepare(list(named), may_replace)  # their names are known only now
        files = {path: marked(_draw(one, form), form) for path, one in named.items()}
    else:
        raise ConfigError(f"{campaign.directory}: no run has rows yet, so there is nothing to draw")
    for path, content in files.items():
        with written(path):
            path.write_bytes(content)
    return list(files)


def _draw(chart: Chart, form: str) -> bytes:
    spec = json.dumps(chart.spec, allow_nan=False)
    if form == "svg":
        return str(converter().vegalite_to_svg(spec, vl_version=VEGA_LITE)).encode()
    return bytes(converter().vegalite_to_png(spec, vl_version=VEGA_LITE, scale=SCALE))


def prepare(paths: Sequence[Path], may_replace: Callable[[str], bool]) -> None:
    """Create the folders of files, and check that the files may be written.

    `may_replace` is called with a description before a file that retrain did not write is replaced.

    Raises:
        ConfigError: a link or directory is in the way, or a file that must not be replaced.
        RecordsError: a folder cannot be created.
    """
    foreign = [path for path in paths if _is_foreign(path)]
    if foreign and not may_replace(", ".join(map(str, foreign))):
        raise ConfigError(
            f"{foreign[0]}: exists, and retrain did not write it; --force replaces it, or name another file"
        )
    for folder in {path.parent for path in paths}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise records_error(folder, "create the folder", error) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: cannot be written by this user; name another folder")


def marked(content: bytes, form: str) -> bytes:
    """Return an image with the mark by which retrain recognizes its own files."""
    if form == "svg":
        return content + b"<!-- " + MARK.encode() + b" -->\n"
    chunk = b"tEXtSoftware\0" + MARK.encode()
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content[:PNG_START] + framed + content[PNG_START:]


def _is_foreign(path: Path) -> bool:
    """Whether the path is a file that retrain did not write; devices and pipes are not."""
    linked = path.is_symlink()
    try:
        found = path.stat()
    except FileNotFoundError:
        if linked:
            raise ConfigError(f"{path}: is a broken link; remove it, or name another file") from None
        return False
    except OSError as error:
        raise records_error(path, "access", error) from error
    if stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{path}: is a directory; name a file in it")
    if not stat.S_ISREG(found.st_mode):
        return False
    if linked:
        raise ConfigError(f"{path}: is a link; name its target if that file may be replaced")
    return found.st_size > 0 and not _is_ours(path)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(READ_BYTES)
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            end = file.read()
    except OSError:
        return False
    if start.startswith(b"PAR1"):  # names of columns are in the footer
        return all(name.encode() in end for name in FIRST)
    first_line = start.partition(b"\n")[0]
    is_table = first_line.startswith(",".join(FIRST).encode())
    is_json = first_line.startswith(b"{") and all(f'"{name}": '.encode() in first_line for name in FIRST)
    return is_table or is_json or MARK.encode() in start[:1000] or MARK.encode() in end[-100:]
