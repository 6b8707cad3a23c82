"""Files to start from; each one is loaded, planned and run by the tests."""

from __future__ import annotations

from pathlib import Path

from retrain.errors import ConfigError
from retrain.registry import nearest


def templates() -> dict[str, str]:
    """List templates, each with its purpose (the file's first comment)."""
    found = sorted(_folder().glob("*.toml"))
    return {path.stem: _summary(path) for path in found}


def read_template(name: str) -> str:
    """Return a template's text.

    Raises:
        ConfigError: there is none of that name.
    """
    known = templates()
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else f"there are: {', '.join(known)}"
        raise ConfigError(f"--template {name}: no such template; {hint}")
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def _folder() -> Path:
    package = Path(__file__).parent.parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"


def _summary(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        comments = (line.lstrip("# ").strip() for line in file if line.startswith("# "))
        return next(comments, "")
