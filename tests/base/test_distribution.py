"""The command that installs an extra, for each way in which a copy can have been installed."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path

import pytest

from retrain.base import distribution
from retrain.base.distribution import NAME, TREE, command_for

WHEEL = {"archive_info": {}}
GIT = {"vcs_info": {"vcs": "git", "commit_id": "4f30980", "requested_revision": "main"}}


def installed(site: Path, origin: dict[str, object] | None, installer: str = "pip") -> Distribution:
    """Write a .dist-info as installers do, and read it."""
    info = site / "retrain_campaigns-0.2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {NAME}\nVersion: 0.2.0\n")
    (info / "INSTALLER").write_text(f"{installer}\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    return PathDistribution(info)


@pytest.mark.parametrize(
    ("origin", "wanted"),
    [
        (None, [f"{NAME}[report]"]),
        ({"url": "https://x.example/a.whl", **WHEEL}, [f"{NAME}[report] @ https://x.example/a.whl"]),
        (
            {"url": "https://x.example/r.git", **GIT},
            [f"{NAME}[report] @ git+https://x.example/r.git@4f30980"],
        ),
        ({"url": "file:///gone/retrain_campaigns-0.2.0-py3-none-any.whl", **WHEEL}, [f"{NAME}[report]"]),
    ],
)
def test_a_copy_from_elsewhere_names_where_it_came_from(
    tmp_path: Path, origin: dict[str, object] | None, wanted: list[str]
) -> None:
    command = command_for("report", installed(tmp_path, origin), tmp_path)
    assert shlex.split(command) == ["pip", "install", *wanted]


@pytest.mark.parametrize("name", ["my wheel.whl", "source"])
def test_a_local_wheel_or_directory_is_named_by_its_path(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    command = command_for("report", installed(tmp_path, {"url": (tmp_path / name).as_uri()}), tmp_path)
    assert shlex.split(command) == ["pip", "install", f"{tmp_path / name}[report]"]


def test_a_source_tree_is_installed_in_editable_mode_whether_it_was_installed_or_not(tmp_path: Path) -> None:
    editable = installed(tmp_path, {"url": TREE.as_uri(), "dir_info": {"editable": True}})
    for copy in (editable, None):
        assert shlex.split(command_for("ray", copy, TREE)) == ["pip", "install", "-e", f"{TREE}[ray]"]


def test_what_uv_installed_is_extended_by_uv(tmp_path: Path) -> None:
    command = command_for("report", installed(tmp_path, None, "uv"), tmp_path)
    assert command == f"uv pip install '{NAME}[report]'"


def test_another_project_beside_the_package_is_not_taken_for_its_source(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "retrain"\nversion = "0.3.0"\n')
    assert command_for("report", None, tmp_path) == f"pip install '{NAME}[report]'"


def test_this_copy_knows_its_version_and_what_it_requires() -> None:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    assert (distribution.version(), project["name"]) == (project["version"], NAME)
    assert distribution.requirements() == project["dependencies"]
    shown = subprocess.run([sys.executable, "-m", "retrain", "--version"], capture_output=True, check=True)
    assert shown.stdout.decode().split() == ["retrain", project["version"]]


def test_the_name_that_belongs_to_another_project_is_installed_nowhere() -> None:
    texts = [*TREE.glob("*.md"), *TREE.glob("*.toml")]
    for folder in ("docs", "templates", "retrain", "benchmarks"):
        texts += [path for path in (TREE / folder).rglob("*") if path.suffix in (".md", ".toml", ".py")]
    assert [path for path in texts if "retrain[" in path.read_text()] == []
