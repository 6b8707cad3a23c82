"""A campaign's TOML file: read with those that it `extends`, changed and written.

The tables of several files are laid over each other as a condition's are over the file: key by key, where a
replaced plugin loses its parameters, and an array replaces another. Every file counts once, at its first
place. An input that a file names is relative to that file; merged, to the directory of the top file.
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from retrain.base import registry
from retrain.base.errors import LISTS, ConfigError, Location, as_key, place, records_error
from retrain.config.files import input_problems, located
from retrain.config.keys import Table, Tables, quote
from retrain.config.resolve import merge
from retrain.config.sweep import stands_in, with_plain_keys

EXTENDS = "extends"
BESIDE_TOP = "beside the file that extends this one"
BOM = "\ufeff"
TABLE = re.compile(r"\s*\[.*\]\s*(#.*)?$")  # a line that begins one
LARGEST_FILE_BYTES = 1_000_000  # a campaign file is a page or two; this limits the parser's input


@dataclass(frozen=True)
class CampaignTables:
    """What a file says together with those that it extends."""

    tables: Table
    origins: Mapping[Location, str]  # the file of each value, as messages name it; empty without `extends`
    files: Sequence[Path]  # the first is the most basic, the last the file itself


def read_tables(path: Path) -> CampaignTables:
    """Read a file and what it extends; a ConfigError names the file that cannot be read."""
    files: dict[Path, Table] = {}  # by resolved path, in the order of merging
    top = _read_below(path, path, (), files)
    if len(files) == 1:
        return CampaignTables(top, {}, [path])
    tables: Table = {}
    origins: dict[Location, str] = {}
    for file, own in files.items():
        name = _name_of(file, path)
        tables = merge(tables, own)
        origins = {at: origin for at, origin in origins.items() if stands_in(tables, at)}
        origins |= dict.fromkeys(locations(own), name)
    return CampaignTables(tables, origins, list(files))


def _read_below(path: Path, top: Path, above: tuple[Path, ...], files: dict[Path, Table]) -> Table:
    """Read a file after what it extends, each once; its inputs become relative to the top file."""
    file = path.resolve()
    if file in above:
        circle = " -> ".join(_name_of(each, top) for each in (*above[above.index(file) :], file))
        raise ConfigError(
            f"{_name_of(above[-1], top)} {EXTENDS}: goes in a circle: {circle}; remove one of them"
        )
    if file in files:
        return files[file]
    tables = with_plain_keys(read_toml(path))
    bases = tables.pop(EXTENDS, [])
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        problem = f'got {quote(bases)}; needs a file, as "base.toml", or a list of them'
        raise ConfigError(f"{_name_of(file, top)} {EXTENDS}: {problem}")
    for name in names:
        base = path.parent / name
        if not base.is_file():
            others = [other.name for other in base.parent.glob("*.toml") if other.name != path.name]
            fix = registry.hint(base.name, others, "it is relative to this file")
            raise ConfigError(f"{_name_of(file, top)} {EXTENDS}: got {quote(name)}, which is no file; {fix}")
        _read_below(base, top, (*above, file), files)
    if file.parent != top.resolve().parent:
        problems = input_problems(tables, path.parent, top.parent, BESIDE_TOP)
        if wrong := [f"{_name_of(file, top)} {problem}" for problem in problems]:
            raise ConfigError(wrong)
        tables = dict(located(tables, path.parent, top.parent))
    files[file] = tables
    return tables


def _name_of(file: Path, top: Path) -> str:
    """Return how messages name a file: from the directory of the top one."""
    return os.path.relpath(file, top.resolve().parent)


def locations(tables: Tables, above: Location = ()) -> Iterator[Location]:
    """Iterate over the place of every value and table."""
    for key, value in tables.items():
        yield (*above, key)
        if isinstance(value, Mapping):
            yield from locations(value, (*above, key))


def complete_content(path: Path) -> bytes:
    """Return a file as it is; with what it extends written out if it does."""
    content = read_file(path)
    merged = read_tables(path)
    if not merged.origins:
        return content
    names = ", ".join(_name_of(file, path) for file in merged.files[:-1])
    return f"# {path.name} with what it extends: {names}\n\n{tomli_w.dumps(merged.tables)}".encode()


@contextmanager
def naming_bases(path: Path) -> Iterator[None]:
    """Have problems of a file name the one that it extends where the key, or its innermost table, stands."""
    try:
        yield
    except ConfigError as error:
        try:
            origins = read_tables(path).origins
        except ConfigError:  # which is what was raised
            raise error from None
        places = {f"[{'.'.join(as_key(str(part)) for part in at)}]": name for at, name in origins.items()}
        places |= {LISTS.get((*at, "tables")) or LISTS.get(at) or place(at): n for at, n in origins.items()}
        named = []
        for line in error.problems:
            where = line.removeprefix(f"{path.name} ") if line.startswith(f"{path.name} [") else ""
            enclosing = [
                at for at in places if where.startswith(at) and not re.match(r"[\w-]", where[len(at) :])
            ]
            named.append(f"{places[max(enclosing, key=len)]} {where}" if enclosing else line)
        if named == list(error.problems):
            raise
        raise type(error)(named) from error


def templates_folder() -> Path:
    """Return the directory of the files that `retrain init` copies."""
    package = Path(__file__).parent.parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def read_file(path: Path) -> bytes:
    """Read a campaign file as it is; a ConfigError if it cannot be read or is too large for one."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is not a file; name the campaign's TOML file")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE_BYTES + 1)  # a device or pipe might never end
    except (FileNotFoundError, NotADirectoryError) as error:
        template = path.stem if (templates_folder() / path.name).is_file() else "campaign"
        others = [other.name for other in path.parent.glob("*.toml")]
        fix = registry.hint(path.name, others, f"`retrain init {template}` makes a file to start from")
        raise ConfigError(f"{path}: {error.strerror}; {fix}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(str(records_error(path, "read", error, then="try again"))) from error
    if len(data) > LARGEST_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes; a campaign file is a page or two")
    return data


def write_file(path: Path, text: str) -> None:
    """Write a campaign file, or leave what was there: even an empty one would be valid, with every default.

    Raises OSError if it cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(text, encoding="utf-8")
        with suppress(FileNotFoundError):
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        with suppress(OSError):  # a read-only file system refuses even if nothing is there
            new.unlink()


def with_keys(text: str, name: str, table: str, keys: Mapping[str, object]) -> str:
    """Return a file's text with keys of a table set; order and all other lines stay.

    A comment on the line of a value that changes goes with it, as it may be about that value.

    Args:
        name: of the file, for errors.

    Raises:
        ConfigError: the table is not written as `[table]`, or its lines cannot be told apart.
    """
    before = tomllib.loads(text.removeprefix(BOM))
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    header = re.compile(rf"{BOM}?\s*\[\s*{table}\s*\]\s*(#.*)?")
    start = next((number for number, line in enumerate(lines) if header.fullmatch(line)), None)
    if start is None:
        how = "is written in another way" if table in before else "is not in this file"
        raise ConfigError(f"{name} [{table}]: {how}, so it cannot be edited; write its keys by hand")
    for key, value in keys.items():
        if key in before[table] and before[table][key] == value:
            continue
        following = range(start + 1, len(lines))
        stop = next((number for number in following if TABLE.match(lines[number])), len(lines))
        written = tomli_w.dumps({key: value}, multiline_strings=False).strip()
        written = re.sub(r"\[\s+", "[", re.sub(r",?\s+\]", "]", re.sub(r",\s+", ", ", written)))
        place = next((n for n in range(start + 1, stop) if re.match(rf"\s*{key}\s*=", lines[n])), None)
        if place is None:
            while stop > start + 1 and not lines[stop - 1].strip():
                stop -= 1  # before the empty lines that divide tables
            lines.insert(stop, written)
            continue
        ends = range(place + 1, stop + 1)
        end_of_value = next((n for n in ends if _parsed("\n".join(lines[place:n])) is not None), place + 1)
        lines[place:end_of_value] = [written]
    changed = end.join(lines)
    if _parsed(changed.removeprefix(BOM)) != before | {table: before[table] | dict(keys)}:
        raise ConfigError(
            f"{name} [{table}]: its lines could not be told apart; write {', '.join(keys)} by hand"
        )
    return changed


def _parsed(text: str) -> Table | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None


def read_toml(path: Path) -> Table:
    """Read a file's tables; syntax, encoding, size and nesting problems are ConfigErrors."""
    data = read_file(path)
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: tables or arrays are nested too deep to read; flatten them") from error
    except ValueError as error:
        raise ConfigError(f"{path}: not valid TOML: {_syntax(str(error), data)}") from error


def _syntax(problem: str, data: bytes) -> str:
    """Return a problem of the parser, with the word or the repeated key that it only locates."""
    lines = data.decode("utf-8-sig").splitlines()
    place_named = re.search(r"line (\d+), column (\d+)", problem)
    number, column = (int(place_named[1]), int(place_named[2])) if place_named else (len(lines), 1)
    line = lines[number - 1] if 0 < number <= len(lines) else ""
    if problem.startswith("Illegal character '\\n'"):
        return f"a quote is not closed (at line {number})"
    if problem == "Invalid value (at end of document)":
        return f"its last value is missing, or a bracket of it is not closed (at line {number})"
    if problem.startswith("Invalid value") and (why := _no_value(line[column - 1 :])):
        return f"{why} (at line {number}, column {column})"
    if repeated := re.match(r"Duplicate inline table key '(.+)' \(at", problem):
        return f"{repeated[1]} is given twice in line {number}; keep one"
    key = re.match(r"\s*(\[\[?[^\]]*\]\]?|[^#=\[\s][^#=]*?(?=\s*=))", line)
    if problem.startswith(("Cannot overwrite", "Cannot declare", "Cannot mutate", "Cannot redefine")) and key:
        return f"{key[1]} is given twice, the second time in line {number}; keep one"
    return problem


def _no_value(text: str) -> str:
    """Return why no value begins with this text, and what to write; "" if that is not known."""
    if not text.partition("#")[0].strip():
        return "a value is missing"
    if text[0] in "\u201c\u201d\u2018\u2019\u00ab":
        return f"{text[0]} is no quote of TOML: write straight ones"
    word = re.match(r"[A-Za-z_][\w./-]{0,40}", text)
    if word is None:
        return ""
    if (lower := word[0].lower()) in ("true", "false"):
        right = f"write {lower}, in lower case"
    elif lower in ("none", "null", "nil"):
        right = "leave the key out"
    elif lower in ("yes", "no", "on", "off"):
        right = "write true or false"
    else:
        right = f'text stands in quotes: write "{word[0]}"'
    return f"{word[0]} is no value of TOML: {right}"
