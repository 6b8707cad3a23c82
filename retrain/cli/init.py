"""`retrain init`: a file to start from."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from retrain.errors import ConfigError


def complete_templates(incomplete: str) -> list[str]:
    """Return the templates that begin so."""
    return [name for name in templates() if name.startswith(incomplete)]


def command(
    template: Annotated[
        str,
        typer.Option(
            "--template", "-t", help="Name of the template; see --list.", autocompletion=complete_templates
        ),
    ] = "campaign",
    force: Annotated[bool, typer.Option("--force", help="Overwrite NAME.toml if it exists.")] = False,
    show_list: Annotated[bool, typer.Option("--list", help="List the templates and exit.")] = False,
) -> None:
    """Write NAME.toml, a commented file to start from, and the JSON Schema with which editors complete it.

    Example: retrain init --template quickstart
    """
    if show_list:
        for name, summary in templates().items():
            typer.echo(f"{name:<12} {summary}")
        return
    from retrain.config.json_schema import NAME, json_schema

    text = read_template(template)
    target = Path(f"{template}.toml")
    if not force and _holds(target, text):
        said = f"{target} exists and is the same"
    else:
        said = f"wrote {target}"
        try:
            with target.open("w" if force else "x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"{target}: exists and differs; use --force to overwrite it") from None
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written ({error.strerror})") from error
    with contextlib.suppress(OSError):  # its first line names the schema; a failure costs only completion
        Path(NAME).write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    typer.echo(f"{said}; next: retrain explain {target}, then retrain {target}")


def _holds(target: Path, text: str) -> bool:
    """Whether a file holds exactly this text."""
    try:
        return target.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def templates() -> dict[str, str]:
    """List templates, each with its purpose (the file's first comment)."""
    found = {}
    for path in sorted(_folder().glob("*.toml")):
        with path.open(encoding="utf-8") as file:
            comments = (line.lstrip("# ").strip() for line in file if line.startswith("# "))
            found[path.stem] = next(comments, "")
    return found


def read_template(name: str) -> str:
    """Return a template's text; raise ConfigError if there is none of that name."""
    from retrain.registry import hint

    known = templates()
    if name not in known:
        others = f"there are: {', '.join(known)}"
        raise ConfigError(f"--template {name}: no such template; {hint(name, known, others)}")
    return (_folder() / f"{name}.toml").read_text(encoding="utf-8")


def _folder() -> Path:
    package = Path(__file__).parent.parent
    installed = package / "templates"
    return installed if installed.is_dir() else package.parent / "templates"
