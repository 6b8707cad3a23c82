"""This copy of retrain: its version, what it requires, and the command that installs an extra beside it.

The distribution has a name of its own: the index has another project that is called `retrain`. A source tree,
installed in editable mode or not at all, is read from its pyproject.toml, a wheel from its metadata.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from importlib.metadata import Distribution

NAME = "retrain-campaigns"
TREE = Path(__file__).parents[2]


def version() -> str:
    """Return the version, or "unknown"."""
    project, installed = _project(TREE), _installed()
    return str(project["version"]) if project else installed.version if installed else "unknown"


def requirements() -> list[str]:
    """Return what is needed without any extra, as `name>=version`."""
    project, installed = _project(TREE), _installed()
    if project:
        return list(project["dependencies"])
    requires = (installed.requires if installed else None) or []
    return [one for one in requires if "extra ==" not in one]


def install_command(extra: str) -> str:
    """Return the shell command that adds an extra to this copy."""
    return command_for(extra, _installed(), TREE)


def command_for(extra: str, installed: Distribution | None, tree: Path) -> str:
    """Return the shell command that adds an extra to a copy: one that lies in `tree`, and its metadata."""
    tool = ((installed and installed.read_text("INSTALLER")) or "").strip()
    install = "uv pip install" if tool == "uv" else "pip install"
    if _project(tree):
        return f"{install} -e {shlex.quote(f'{tree}[{extra}]')}"
    origin = json.loads((installed and installed.read_text("direct_url.json")) or "{}")
    return f"{install} {shlex.quote(_source(origin, extra))}"


def _source(origin: dict[str, Any], extra: str) -> str:
    """Return what to name to an installer, from a direct_url.json (PEP 610); {} for an index."""
    name, url = f"{NAME}[{extra}]", str(origin.get("url", ""))
    if vcs := origin.get("vcs_info"):
        return f"{name} @ {vcs['vcs']}+{url}@{vcs['commit_id']}"
    if not url.startswith("file:"):
        return f"{name} @ {url}" if url else name
    path = Path(unquote(urlsplit(url).path))
    return f"{path}[{extra}]" if path.exists() else name  # what is installed has that name, so it is kept


def _project(tree: Path) -> dict[str, Any]:
    """Return the [project] of a source tree; empty for anything else."""
    try:
        project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError):
        return {}
    return project if project.get("name") == NAME else {}


def _installed() -> Distribution | None:
    from importlib import metadata  # not at the top: takes 15 ms, and most commands never need it

    try:
        return metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        return None
