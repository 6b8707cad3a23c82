"""The user's own code: found beside the campaign's file, else where Python looks; located when it raises."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

from retrain.base.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
STANDARD = str(Path(os.__file__).parent)
LOCATED = re.compile(r"[^:\n]+\.py:\d+: ")
_beside: list[Path] = []  # the directory of the campaign's file
_added: set[str] = set()  # what was put on sys.path for it
_files: dict[str, str] = {}  # file of a plugin that is not built in -> what the last plugin in it is
_functions: dict[tuple[str, str], str] = {}  # the same by file and function


def search_first(directory: Path) -> None:
    """Look for dotted paths in the directory of a campaign's file, before the current one."""
    _beside[:] = [directory.absolute()]


def import_module(name: str) -> ModuleType:
    """Import a module that a dotted path names; the directory of the campaign's file comes first."""
    top = name.partition(".")[0]
    for directory in _beside:
        if PathFinder.find_spec(top, [str(directory)]) is None:
            continue
        with suppress(FileNotFoundError):  # the working directory may be gone
            beside, other = _source_of(name, directory), _source_of(name, Path.cwd())
            if beside is not None and other is not None and not beside.samefile(other):
                raise ConfigError(
                    f"module {name!r} is beside the file that names it ({beside}) and in the working "
                    f"directory ({other}); rename one of them"
                )
        _make_way(top, str(directory))
    return importlib.import_module(name)


def _source_of(name: str, directory: Path) -> Path | None:
    """Return the file or folder of a module below a directory; None if it has none there."""
    place = directory.joinpath(*name.split("."))
    return next((path for path in (place, place.with_name(f"{place.name}.py")) if path.exists()), None)


def _make_way(top: str, directory: str) -> None:
    """Put a directory on Python's path, and unload a module of that name from an earlier campaign's."""
    loaded = str(getattr(sys.modules.get(top), "__file__", None) or "")
    if loaded.startswith(directory + os.sep):
        return
    if any(loaded.startswith(earlier + os.sep) for earlier in _added):
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{top}.")]:
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry not in _added]
    if directory not in sys.path:
        _added.add(directory)
        working = str(Path.cwd())
        at = sys.path.index(working, 1) if working in sys.path[1:] else len(sys.path)
        sys.path.insert(at, directory)
    importlib.invalidate_caches()


def remember(module: ModuleType, found: object, what: str) -> None:
    """Record a plugin's files; `what` describes it in messages."""
    code = getattr(inspect.unwrap(found) if callable(found) else found, "__code__", None)
    for file in (getattr(module, "__file__", None), getattr(code, "co_filename", None)):
        if file:
            _files[str(file)] = what
    if code:
        _functions[code.co_filename, code.co_qualname] = what


def fault_of(error: BaseException) -> str:
    """Return what a user's own code raised and where, `file:line: Type: message`; "" for other errors."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    plugins = [
        *(_functions.get((code.co_filename, code.co_qualname)) for code in codes),
        *(_files.get(code.co_filename) for code in codes),
    ]
    plugin = next(filter(None, plugins), "")
    return f"{located(error)}; raised by the {plugin}" if plugin else ""


def located(error: BaseException) -> str:
    """Return `file:line: Type: message` in one line, of the innermost line outside libraries and retrain.

    Of a group of exceptions, such as an `asyncio.TaskGroup` raises, it is the first.
    """
    raised = error
    while isinstance(error, BaseExceptionGroup):  # its own text tells only how many it holds
        error = error.exceptions[0]
    message = " ".join((error.msg if isinstance(error, SyntaxError) else _text_of(error)).split())
    shown = type(error).__name__ + (f": {message}" if message else "")
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}: {shown}"
    file, line = (_own_lines(error) or _own_lines(raised) or _lines(raised))[-1]
    return f"{_shown(file)}:{line}: {shown}"


def told_by(error: BaseException) -> str:
    """Return an error's text; as `located` does where a user's own code raised it."""
    own_lines = _own_lines(error)
    is_of_users = bool(own_lines) and not own_lines[-1][0].startswith(f"{PACKAGE}{os.sep}")
    return located(error) if is_of_users else _text_of(error)


def is_in_own_code(error: BaseException) -> bool:
    """Whether an error was raised below a line outside libraries and retrain."""
    return bool(_own_lines(error))


def names_place(message: str) -> bool:
    """Whether a message begins with a file and a line."""
    return LOCATED.match(message) is not None


def _own_lines(error: BaseException) -> list[tuple[str, int]]:
    """Return the lines of a traceback that are neither in libraries nor in retrain."""
    of_users = []
    for file, line in _lines(error):
        is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
        if file in _files or not (is_installed or file.startswith(("<", STANDARD, f"{PACKAGE}{os.sep}"))):
            of_users.append((file, line))
    return of_users


def _lines(error: BaseException) -> list[tuple[str, int]]:
    return [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - a user's class may raise anything
        return f"its text cannot be made, for __str__ raised {type(failure).__name__}"


def _shown(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):
        return file
