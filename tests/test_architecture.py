"""How the package is built: no import cycles, no plugin known by name outside its kind."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from retrain.base import registry
from retrain.base.registry import KINDS

ROOT = Path(__file__).parent.parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PAGE = ROOT / "docs" / "how-it-is-built.md"


def section_of(heading: str) -> str:
    return PAGE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (ROOT / "retrain").rglob("*.py")}


def imported_by(node: ast.AST, *, lazily: bool) -> Iterator[str]:
    """Iterate over the package's modules that code imports, but for those that only types need."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module:
            names = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (name if name in MODULES else child.module for name in names)
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.expr if lazily else (ast.expr, *FUNCTIONS)):
            yield from imported_by(child, lazily=lazily)


def parse(text: str) -> ast.Module:
    """Return a tree, built without a collection of garbage.

    Python 3.11 counts depth once for all trees, and fails if another one is built meanwhile, as by whoever
    formats the traceback of something unclosed that is collected.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()


@cache
def tree_of(name: str) -> ast.Module:
    return parse(MODULES[name].read_text(encoding="utf-8"))


class Unclosed:
    """Garbage whose end is told with a traceback."""

    def __init__(self, collected: list[str]) -> None:
        self.itself, self._collected = self, collected

    def __del__(self) -> None:
        self._collected.append(ast.unparse(ast.parse("told(1 + 1)")))


def test_garbage_does_not_hinder_reading_a_module() -> None:
    collected: list[str] = []
    gc.collect()  # the next collection is as far away as can be
    Unclosed(collected)
    parse("x = (1, [2, {3: 4}])\n" * 1000)
    assert (collected, gc.isenabled()) == ([], True)
    gc.collect()
    assert collected == ["told(1 + 1)"]


@cache
def imports(name: str, *, lazily: bool) -> set[str]:
    return set(imported_by(tree_of(name), lazily=lazily)) & MODULES.keys() - {name}


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions count, but for those of what a module's own package defines."""
    graph = {
        name: {used for used in imports(name, lazily=True) if not name.startswith(f"{used}.")}
        for name in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def at_start(name: str) -> set[str]:
    """Return all modules that a module's import leads to."""
    found, new = set[str](), {name}
    while new:
        found |= new
        new = set().union(*(imports(one, lazily=False) for one in new)) - found
    return found


def test_a_worker_starts_without_what_checks_files_and_without_manifests() -> None:
    """Its run.toml was checked before it was written, and the manifest is its campaign's."""
    assert not at_start("retrain.trainer.opening") & {"retrain.config.checks", "retrain.records.manifest"}


def named_in(cell: str) -> list[str]:
    """Return the modules and folders that a cell of a table names; `dir/`: `a`, `b` are dir/a and dir/b."""
    found = []
    for part in cell.split(";"):
        folder, names = "", part
        if listed := re.match(r"\s*`([\w/]+/)`: ", part):
            folder, names = listed[1], part[listed.end() :]
        found += [folder + name for name in re.findall(r"`([\w/]+(?:\.py)?)`", names)]
    return found


def is_there(name: str) -> bool:
    """Whether a name is a file's or a folder's, from the root or from the package."""
    paths = [place / name for place in (ROOT, ROOT / "retrain")]
    return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)


def test_names_after_a_folder_are_in_it() -> None:
    cell = " `one/two/`: `a`, `__init__` (the `b`); `c.py`, of `[table]`: `--option`; `three/` and `d/e` "
    assert named_in(cell) == ["one/two/a", "one/two/__init__", "one/two/b", "c.py", "three/", "d/e"]
    assert [is_there(name) for name in ("campaign/", "cli/run", "cli/run.py", "tests/", "cli/two")] == [
        1,
        1,
        1,
        1,
        0,
    ]


@pytest.mark.parametrize("heading", ["Where to make a change", "What to read"])
def test_every_module_that_a_table_on_the_package_names_exists(heading: str) -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", section_of(heading), re.MULTILINE)
    named = [name for row in rows[1:] for name in named_in(row)]
    assert named
    assert [name for name in named if not is_there(name)] == []


def test_a_path_through_the_package_takes_as_many_files_as_the_page_says() -> None:
    rows = re.findall(r"^\| .* \| (.*) \|$", section_of("What to read"), re.MULTILINE)
    assert {row: len(named_in(row)) for row in rows[1:] if len(named_in(row)) > 8} == {}


def test_every_module_and_folder_that_the_page_on_the_package_names_exists() -> None:
    named = set(re.findall(r"[\w/]+\.py\b", PAGE.read_text(encoding="utf-8")))
    named |= set(re.findall(r" (\w+/)(?=[\s,:;])", section_of("The house")))
    missing = {name for name in named if not any((ROOT / "retrain").rglob(name))}
    assert {name for name in missing if not (ROOT / name).is_file()} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_names_the_shared_modules_beside_its_plugins(kind: str) -> None:
    package = registry.package_of(kind)
    depth = len(package.split("."))
    beside = {name.split(".")[depth] for name in MODULES if name.startswith(f"{package}.")}
    told = set(re.findall(r"`(\w+)`", ast.get_docstring(tree_of(package)) or ""))
    assert beside - set(registry.built_in_names(kind)) - told == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_plugin_is_imported_by_name_in_its_kinds_folder_only(kind: str) -> None:
    package = registry.package_of(kind)
    plugins = {f"{package}.{name}" for name in registry.built_in_names(kind)}
    outside = [name for name in MODULES if not f"{name}.".startswith(f"{package}.")]
    found = {
        f"{name} imports {used}"
        for name in outside
        for used in imports(name, lazily=True)
        if ".".join(used.split(".")[: package.count(".") + 2]) in plugins
    }
    assert found == set()
