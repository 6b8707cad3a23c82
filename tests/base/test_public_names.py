"""What scripts and plugins may import: names of `retrain` itself, and nothing below it."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import retrain
from retrain.base.registry import KINDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "templates").glob("*.toml")]
    if page.name not in {"how-it-is-built.md", "CONTRIBUTING.md"}  # for those who change the package itself
)
OF_USERS = [
    ROOT / "tests" / name for name in ("plugins/__init__.py", "reward_functions.py", "logger_plugins.py")
]
PUBLIC = {*retrain.__all__, "AdaptiveDataParallel"}  # which needs PyTorch
NUMBERS = {"Count", "Fraction", "Natural", "NotNegative", "Positive"}  # annotations cannot have a docstring
FILES_AND_COMMANDS = {
    "json",
    "schema.json",
    "trainer.worker",
}  # retrain.json, `python -m retrain.trainer.worker`


def imported_by(text: str) -> set[str]:
    """Return the names that lines of Python import from retrain; of a module below it, its dotted path."""
    names = set[str]()
    for module, imported in re.findall(r"from (retrain[\w.]*) import (\([^)]*\)|[^\n`;]+)", text):
        found = re.findall(r"\w+", imported)
        names |= {name if module == "retrain" else f"{module}.{name}" for name in found}
    return names | set(re.findall(r"(?m)^\s*import (retrain\.[\w.]+)", text))


def test_imports_are_found_in_blocks_and_in_sentences() -> None:
    text = "`from retrain import Task` and\nfrom retrain.plugins.tasks import (\n    Task,\n)\n"
    text += "import retrain.cli\n"
    assert imported_by(text) == {"Task", "retrain.plugins.tasks.Task", "retrain.cli"}


@pytest.mark.parametrize("page", [*PAGES, *OF_USERS], ids=lambda page: page.name)
def test_users_are_shown_imports_of_public_names_only(page: Path) -> None:
    assert imported_by(page.read_text(encoding="utf-8")) - PUBLIC == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_dotted_name_on_a_page_is_public_or_a_group_of_entry_points(page: Path) -> None:
    named = set(re.findall(r"(?<![\w/.])retrain\.(\w[\w.]*\w)", page.read_text(encoding="utf-8")))
    assert named - PUBLIC - {*KINDS} - FILES_AND_COMMANDS == set()


@pytest.mark.parametrize("name", sorted({*retrain.__all__} - NUMBERS))
def test_every_public_class_and_function_says_what_it_is(name: str) -> None:
    value = getattr(retrain, name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}(")  # which a dataclass writes itself


def test_the_page_on_extending_lists_every_public_name() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    table = page.split("\n## Public names\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"(?m)^\| .*", table)))) == PUBLIC | {
        "RetrainError"
    }


def test_types_are_those_of_the_names() -> None:
    tree = ast.parse(Path(retrain.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == {name: retrain._HOME[name] for name in PUBLIC}


def test_a_name_that_is_not_public_is_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = retrain.nothing


@pytest.mark.parametrize(
    ("code", "excluded"),
    [("import retrain", r"retrain\..*|numpy"), ("from retrain import *", "torch|scipy|jinja2|typer|rich")],
)
def test_an_import_brings_nothing_that_it_does_not_need(code: str, excluded: str) -> None:
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [name for name in modules if re.fullmatch(excluded, name)] == []
