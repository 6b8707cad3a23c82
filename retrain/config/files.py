"""Files that a run's configuration names: found from any directory, and identified by content.

A value names a file if its field says so, or, in a plugin's table, if its key is one of `PLUGIN_INPUTS` or
ends in `_path`; and if a file or directory of that name exists. Anything else (a hub id, a dotted path) is
text. An input is relative to the file that names it; what is written, to the working directory.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from retrain.base.errors import ConfigError, Problem
from retrain.config.keys import Table, Tables, keys_of, quote
from retrain.config.resolve import RUN_SECTIONS, SECTIONS, build, deciding_keys, values_of
from retrain.config.schema import Config, SourceSection

PEFT, NUMPY, TINKER = "adapter_model.safetensors", "policy.npz", "tinker.json"
REMOTE = "tinker://"  # of states that the Tinker API saved
KEY = "model.adapter"

LARGEST_WHOLE = 256 * 2**20  # bytes; of a larger file (weights) only samples are read, to start quickly
SHOWN_RUNS = 6
STAMP = "-????????T??????Z-????"  # with which the directory of a campaign ends
SAMPLES = 256
SAMPLE_BYTES = 64 * 2**10
INPUTS = ("file", "adapter", "teacher")  # kinds of values
UNWRITTEN = ("self", "engine")  # teachers that are in no file, whatever there is of their name
PLUGIN_INPUTS = ("path", "chat_template", "tokenizer")  # keys
SOURCE_KEYS = keys_of(SourceSection)
DECLARED = {  # by section and key
    (section, key.name): key.path for section in RUN_SECTIONS for key in keys_of(SECTIONS[section]).values()
}


def located(tables: Tables, beside: Path, to: Path | None = None) -> Tables:
    """Return a file's tables with the inputs that are there, relative to `beside`, as absolute paths.

    With `to` they are relative to that directory instead.
    """

    def found(value: Any, _: str, kind: str) -> Any:
        if not _is_relative(value, kind) or not _exists(str(beside / value)):
            return value
        return _whole(beside / value) if to is None else os.path.relpath(beside / value, to)

    return _with_inputs(tables, found)


def input_problems(
    tables: Tables, beside: Path, other: Path | None = None, called: str = "in the working directory"
) -> Iterator[Problem]:
    """Iterate over inputs that another directory has, by default the working one, and `beside` should."""
    working = other or Path.cwd()
    named: list[tuple[str, str]] = []

    def note(value: Any, key: str, kind: str) -> Any:
        if _is_relative(value, kind) and _exists(str(working / value)):
            named.append((key, value))
        return value

    _with_inputs(tables, note)
    for key, value in named:
        beside_file, there = _whole(beside / value), _whole(working / value)
        if not _exists(beside_file):
            instead = quote(os.path.relpath(there, beside.absolute()))
            what = f"which is {called} only ({there})"
            fix = f"paths are relative to the file that names them: write {instead}"
        elif not Path(beside_file).samefile(there):
            what = f"which is beside this file ({beside_file}) and {called} ({there})"
            fix = "rename one of them, or write the absolute path"
        else:
            continue
        location = (int(part) if part.isdigit() else part for part in key.split("."))
        yield Problem(tuple(location), f"got {quote(value)}, {what}; {fix}")


def absolute_inputs(value: Any, key: str) -> Any:
    """Return an override of a dotted key with absolute paths of the inputs that the working directory has.

    Those of a sweep stay as they are, because they name its conditions.
    """
    if key.partition(".")[0] not in (*RUN_SECTIONS, "eval") and not key.startswith("campaign.conditions"):
        return value
    return mapped(
        value, key, _kind_of(key), lambda v, _, kind: _absolute(v, "", kind if kind in INPUTS else "")
    )


def weights_of(adapter: str | Path) -> Path | None:
    """Return the file of an adapter's weights, of a run that in its newest checkpoint; None if there is none.

    Its content identifies the adapter: rank, alpha and layers are the run's own, or the adapter is refused.
    """
    places = (Path(adapter), *_checkpoints(Path(adapter)))
    names = (PEFT, f"adapter/{PEFT}", NUMPY, TINKER)
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def model_of(directory: Path) -> Path | None:
    """Return a saved model's directory: this one, or that in the newest checkpoint of a run; None without."""
    places = (directory, *(checkpoint / "model" for checkpoint in _checkpoints(directory)))
    return next((place for place in places if (place / "config.json").is_file()), None)


def _checkpoints(run: Path) -> list[Path]:
    """Return a run's checkpoints, the newest first."""
    steps = run.glob("checkpoints/step-*")
    return sorted(steps, key=lambda step: (len(step.name), step.name), reverse=True)


def state_of(adapter: str) -> str:
    """Return the path at the Tinker API of an adapter that is a state there; "" of others."""
    if adapter.startswith(REMOTE):
        return adapter
    file = weights_of(adapter)
    if file is None or file.name != TINKER:
        return ""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def adapter_problem(adapter: str) -> str:
    """Return why there is nothing to start from; "" if there is, or if only an API knows."""
    directory = Path(adapter)
    if adapter.startswith(REMOTE):
        return ""
    if not os.path.isdir(adapter):  # noqa: PTH112 - a name may be too long for any file
        return f"{adapter!r} does not exist; name a finished run, or a directory that peft saved"
    is_run = (directory / "run.toml").is_file()
    if weights_of(directory) is None and is_run:
        whole = model_of(directory)
        if whole is None:
            return f"{adapter!r} is a run without a checkpoint; name another"
        return f"{adapter!r} is a run that trained every parameter; name {whole} as [model].model"
    if weights_of(directory) is None:
        run = next((path for path in sorted(directory.glob("runs/*")) if weights_of(path)), None)
        if run is not None:
            return f"{adapter!r} is a campaign; name one of its runs, such as {run}"
        fix = "name a finished run, or a directory that peft saved"
        return f"{adapter!r} has neither {PEFT} nor checkpoints; {fix}"
    if is_run and not (directory / "done.json").is_file():
        return f"{adapter!r} is a run that is not finished; finish it, or name a copy of a checkpoint"
    return ""


def run_named(name: str, log_dir: Path) -> Path | None:
    """Return the directory of "NAME/RUN" in the newest campaign of a name; None if there is none."""
    campaign, slash, run = name.partition("/")
    if not (campaign and slash and re.fullmatch(r"[\w+.-]+", run)):
        return None
    runs = log_dir.glob(f"{glob.escape(campaign)}{STAMP}/runs/{run}")
    return max(runs, key=lambda path: path.parent.parent.name, default=None)


def runs_instead(name: str, log_dir: Path) -> str:
    """Return which runs the newest campaign of "NAME/RUN" has in place of that one; "" without a campaign."""
    pattern = f"{glob.escape(name.partition('/')[0])}{STAMP}"
    campaign = max(log_dir.glob(pattern), default=None) if "/" in name else None
    runs = sorted(path.name for path in campaign.glob("runs/*")) if campaign else []
    return f"{campaign} has no such run, but {', '.join(runs[:SHOWN_RUNS])}" if runs else ""


def _with_inputs(tables: Tables, change: Callable[[Any, str, str], Any]) -> Tables:
    """Return a file's tables with what may name an input replaced, also in its conditions and its sweep."""
    changed = {
        name: mapped(table, name, "", change) if name in RUN_SECTIONS or name == "eval" else table
        for name, table in tables.items()
    }
    campaign = tables.get("campaign")
    if isinstance(campaign, dict):
        replaced = {
            name: mapped(campaign[name], f"campaign.{name}", "", change)
            for name in ("conditions", "sweep")
            if name in campaign
        }
        changed["campaign"] = {**campaign, **replaced}
    return changed


def _is_relative(value: Any, kind: str) -> bool:
    return kind in INPUTS and isinstance(value, str) and value != "" and not os.path.isabs(value)  # noqa: PTH117


def _whole(path: Path) -> str:
    """Return a path as an absolute one, without `..` unless that follows a symbolic link."""
    whole = os.path.abspath(path)  # noqa: PTH100
    return whole if _exists(whole) else str(path.absolute())


def with_absolute_paths(config: Config) -> Config:
    """Return a configuration with absolute paths, so that its run can resume from any directory."""
    changes: dict[str, Table] = {}
    for section, key, value in values_of(config):
        if not key.path and not isinstance(value, dict | list):
            continue
        absolute = mapped(value, key.name, key.path, partial(_absolute, log_dir=config.logging.log_dir))
        if absolute != value:
            changes.setdefault(section, {})[key.name] = absolute
    sections = {
        name: build(SECTIONS[name], {**vars(getattr(config, name)), **table})
        for name, table in changes.items()
    }
    return replace(config, **sections)


def found_below(tables: Any, project: Path) -> Any:
    """Return tables in which absolute paths that are gone name a project's files with the same last parts."""

    def present(value: Any, _: str, __: str) -> Any:
        if not isinstance(value, str) or not value.startswith("/") or _exists(value):
            return value
        parts = Path(value).parts
        there = (str(project.joinpath(*parts[first:])) for first in range(1, len(parts)))
        return next(filter(_exists, there), value)

    return mapped(tables, "", "", present)


def contents_of(config: Config) -> dict[str, str]:
    """Fingerprint every file that decides results, by the dotted key that names it."""
    return {key: fingerprint(path) for key, path in _files(config).items()}


def data_files(config: Config) -> dict[str, str]:
    """Return the paths of the files that hold prompts and answers, by dotted key."""
    files = _files(config).items()
    return {key: path for key, path in files if not key.startswith(("model.", "backend.", "algorithm."))}


def changed_files(config: Config, before: Mapping[str, str]) -> list[Problem]:
    """Return which files have changed; OSError if one cannot be read, perhaps only now."""
    paths = _files(config)
    changed = " has changed since the run was planned"
    return [
        Problem(tuple(key.split(".")), f"{paths[key]}{changed}" if key in paths else "the file is missing")
        for key, known in before.items()
        if key not in paths or _of_path(paths[key]) != known
    ]


def fingerprint(path: str) -> str:
    """Identify the content of a file or a directory of files: 16 hex digits, the same at any path.

    Raises ConfigError if one cannot be read.
    """
    try:
        return _of_path(path)
    except OSError as error:
        why = f"{error.filename or path} cannot be read ({error.strerror})"
        raise ConfigError(f"{path}: decides the result, and {why}; make it readable") from error


def _of_path(path: str) -> str:
    if not Path(path).is_dir():
        return _of_file(path)
    whole = hashlib.sha256()
    for inside in sorted(inside for inside in Path(path).rglob("*") if inside.is_file()):
        whole.update(os.fsencode(f"{inside.relative_to(path)}\0{_of_file(str(inside))}\n"))
    return whole.hexdigest()[:16]


def _of_file(path: str) -> str:
    status = os.stat(path)  # noqa: PTH116
    return _of_content(path, status.st_size, (status.st_ino, status.st_mtime_ns))


@cache  # all runs of a campaign name the same files
def _of_content(path: str, size: int, _: tuple[int, int]) -> str:
    with open(path, "rb") as file:  # noqa: PTH123
        if size <= LARGEST_WHOLE:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
        digest = hashlib.sha256(str(size).encode())
        for number in range(SAMPLES):
            file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()[:16]


def _files(config: Config) -> dict[str, str]:
    """Return the paths of the files that decide results, by dotted key."""
    paths = {}

    def note(value: Any, key: str, kind: str) -> None:
        named = value if kind and _exists(value) else ""
        path: Path | str | None = named
        if named and kind in ("adapter", "teacher"):
            path = weights_of(named) or (model_of(Path(named)) if kind == "teacher" else None)
        if path:
            paths[key] = str(path)

    for section, key, value in values_of(config, deciding_keys):
        mapped(value, f"{section}.{key.name}", key.path, note)
    return paths


def mapped(value: Any, key: str, kind: str, change: Callable[[Any, str, str], Any]) -> Any:
    """Return a copy of tables and lists, each value replaced by a function of it, its key and its kind."""
    if isinstance(value, dict):
        return {
            name: mapped(inner, f"{key}.{name}", _kind_of(f"{key}.{name}"), change)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [mapped(inner, f"{key}.{number}", kind, change) for number, inner in enumerate(value)]
    return change(value, key, "" if kind == "teacher" and value in UNWRITTEN else kind)


def _absolute(value: Any, _: str, kind: str, log_dir: str = "") -> Any:
    """Return a value with an absolute path; with `log_dir`, the name of a run in it is a path, too."""
    is_name = kind == "teacher" and log_dir and isinstance(value, str) and not _exists(value)
    if is_name and (run := run_named(value, Path(log_dir))):
        return str(run.absolute())
    is_made = kind == "directory" and value  # where it is missing
    return str(Path(value).absolute()) if is_made or (kind and _exists(value)) else value


def _kind_of(dotted: str) -> str:
    """Return what the value of a key names, if it is a path; in a plugin's table by the key's name."""
    above, _, key = dotted.rpartition(".")
    if re.search(r"\bsource\.\d+$", above) and key in SOURCE_KEYS:
        return SOURCE_KEYS[key].path
    declared = DECLARED.get((above.rpartition(".")[2], key), "")
    return declared or ("file" if key in PLUGIN_INPUTS or key.endswith("_path") else "")


def _exists(value: Any) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value and os.path.exists(value)  # noqa: PTH110
