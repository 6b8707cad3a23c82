"""Users' own code: found in the directory of the campaign's file, and located when it raises."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import traceback
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).parent.parent
STANDARD = str(Path(os.__file__).parent)
LOCATED = re.compile(r"[^:\n]+\.py:\d+: ")

_beside: list[Path] = []  # the directory of the campaign's file
_added: set[str] = set()  # what was put on sys.path for it
_files: dict[str, str] = {}  # file of a plugin that is not built in -> what the plugin is


def look_beside(directory: Path) -> None:
    """Look for dotted paths in the directory of a campaign's file, before the current one."""
    _beside[:] = [directory.absolute()]


def import_module(name: str) -> ModuleType:
    """Import a module that a dotted path names; the directory of the campaign's file comes first."""
    top = name.partition(".")[0]
    for directory in _beside:
        if PathFinder.find_spec(top, [str(directory)]) is not None:
            _make_way(top, str(directory))
    return importlib.import_module(name)


def remember(module: ModuleType, found: object, what: str) -> None:
    """Record a plugin's files; `what` describes it in messages."""
    code = getattr(inspect.unwrap(found) if callable(found) else found, "__code__", None)
    for file in (getattr(module, "__file__", None), getattr(code, "co_filename", None)):
        if file:
            _files[str(file)] = what


def fault_of(error: BaseException) -> str:
    """Return what a user's own code raised and where, `file:line: Type: message`; "" for other errors."""
    plugin = next((_files[file] for file, _ in _lines(error) if file in _files), "")
    if not plugin:
        return ""
    return f"{located(error)}; raised by the {plugin}"


def located(error: BaseException) -> str:
    """Return `file:line: Type: message` in one line, of the innermost line outside libraries and retrain."""
    message = " ".join((error.msg if isinstance(error, SyntaxError) else str(error)).split())
    said = type(error).__name__ + (f": {message}" if message else "")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: {said}"
    file, line = (_own_lines(error) or _lines(error))[-1]
    return f"{_shown(file)}:{line}: {said}"


def is_in_own_code(error: BaseException) -> bool:
    """Whether an error was raised below a line outside libraries and retrain."""
    return bool(_own_lines(error))


def names_place(message: str) -> bool:
    """Whether a message begins with a file and a line."""
    return LOCATED.match(message) is not None


def _lines(error: BaseException) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _own_lines(error: BaseException) -> list[tuple[str, int]]:
    return [at for at in _lines(error) if at[0] in _files or not _is_of_a_library(at[0])]


def _make_way(top: str, directory: str) -> None:
    """Put a directory on Python's path, and unload a module of that name from an earlier campaign's."""
    loaded = str(getattr(sys.modules.get(top), "__file__", None) or "")
    if loaded.startswith(directory + os.sep):
        return
    if any(loaded.startswith(earlier + os.sep) for earlier in _added):
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry not in _added]
    if directory not in sys.path:
        _added.add(directory)
        here = [at for at, entry in enumerate(sys.path) if at and entry == str(Path.cwd())]
        sys.path.insert(here[0] if here else len(sys.path), directory)
    importlib.invalidate_caches()


def _is_of_a_library(file: str) -> bool:
    inside = ("site-packages", "dist-packages")
    return file.startswith(("<", STANDARD, f"{PACKAGE}{os.sep}")) or not set(inside).isdisjoint(
        Path(file).parts
    )


def _shown(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):
        return file
