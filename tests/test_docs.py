"""The documentation says what the code does: its reference is fresh, its files load, its commands exist."""

from __future__ import annotations

import dataclasses
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from docs.metrics_page import metrics_page
from retrain.base import registry
from retrain.cli import app
from retrain.config import reference
from retrain.config.keys import keys_of
from retrain.config.load import parse
from retrain.config.schema import AlgorithmSection
from retrain.config.toml_files import EXTENDS
from retrain.records.run_row import RunRow
from retrain.records.windows import steps_averaged
from retrain.results.status import table_of

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCKS = [
    pytest.param(page, language, text, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (language, text) in enumerate(
        re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    )
]


def test_the_configuration_page_is_what_the_schema_says() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference.markdown(), "run: retrain schema --markdown > docs/configuration.md"


def test_the_metrics_page_is_what_the_row_declares() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    assert page == metrics_page(), "run: python docs/metrics_page.py"


def test_the_columns_of_status_that_the_readme_shows_are_those_that_it_has() -> None:
    text = (ROOT / "README.md").read_text()
    header, _, first, *_ = text[text.index(" condition   seed") :].splitlines()
    steps = int(re.findall(r"(\d+)/", first)[0])
    run = RunRow(
        run_id="a_s0",
        condition="a",
        seed=0,
        state="done",
        max_steps=steps,
        reward_steps=steps_averaged(steps),
    )
    names = [name.removeprefix(">") for name in table_of([run])[0]]
    assert re.split(r"  +", header.strip()) == names


def test_every_page_is_in_the_table_of_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f": {page.name}\n" not in contents] == []


def test_the_readme_is_short_and_links_every_page() -> None:
    text = (ROOT / "README.md").read_text()
    assert 500 <= len(text.split()) <= 800
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in text] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.py)[` ]", page.read_text())
    places = (ROOT, ROOT / "retrain")
    assert [name for name in named if not any((place / name).is_file() for place in places)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_has_an_end(page: Path) -> None:
    fences = [line.strip() for line in page.read_text().splitlines() if "```" in line]
    assert [fence for fence in fences[1::2] if fence != "```"] == []
    assert [fence for fence in fences[::2] if not re.fullmatch(r"```\w+", fence)] == []


@pytest.fixture
def shown_files(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Write the Python files that a page, or its guide, shows, so that its TOML can name them."""
    monkeypatch.syspath_prepend(tmp_path)
    text = "\n".join(
        each.read_text() for each in {page, page.with_stem(page.stem.removesuffix("-reference"))}
    )
    shown = re.findall(r"^```python\n# (my_\w+)\.py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    for name, text in shown:
        (tmp_path / f"{name}.py").write_text(text)
    yield
    for name, _ in shown:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_that_a_page_names_with_its_section_exists(page: Path) -> None:
    text = page.read_text()
    if page.name == "coming-from.md":  # the first cell of a row has another program's keys
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    known = {name.strip("[]"): keys_of(table).keys() for name, table in reference.tables()}
    endings = {"jsonl", "log", "toml", "lock", "json"}  # of files, such as `data.jsonl`
    named = [pair for pair in re.findall(r"`(\w+)\.(\w+)(?=[` .])", text) if pair[1] not in endings]
    assert [key for section, key in named if section in known and key not in known[section]] == []


@pytest.mark.usefixtures("shown_files")
@pytest.mark.parametrize(("page", "language", "text"), BLOCKS)
def test_every_block_is_valid_in_its_language(page: Path, language: str, text: str) -> None:
    if language == "toml":
        tables = tomllib.loads(text)
        tables.pop(EXTENDS, None)  # other files
        parse(tables, page.name, try_plugins=False)
    if language == "python":
        compile(text, page.name, "exec")
    assert language in {"toml", "python", "sh", "console", "text", "json", "yaml"}


@pytest.mark.parametrize(("page", "language", "text"), BLOCKS)
def test_every_command_and_option_that_is_shown_exists(page: Path, language: str, text: str) -> None:
    group = typer.main.get_command(app)
    shown = {"sh": r"(?:^|&& )retrain +([^\n#&|>]*)", "console": r"(?:^\$ |&& )retrain +([^\n#&|>]*)"}
    for line in re.findall(shown[language], text, re.MULTILINE) if language in shown else []:
        name, *arguments = line.split()
        if name.endswith(".toml") or name.startswith("-"):
            continue
        command = group.get_command(None, name)  # type: ignore[attr-defined]
        assert command is not None, f"{page.name}: retrain {name}"
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.split("=")[0] for word in arguments if re.match(r"--?[a-z]", word)} <= known, line


@pytest.mark.parametrize("key", ["advantage_mode", "loss_mode", "transform_mode"])
def test_keys_that_list_the_built_in_plugins_list_all(key: str) -> None:
    (declared,) = (each for each in dataclasses.fields(AlgorithmSection) if each.name == key)
    listed = declared.metadata["description"].partition(";")[0].split(", ")
    assert {*listed, "none"} == {*registry.built_in_names(declared.metadata["plugin"]), "none"}
