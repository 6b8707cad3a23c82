"""`retrain init`: a file to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from retrain.cli.options import complete_templates


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
    from retrain.config.templates import read_template, templates
    from retrain.errors import ConfigError

    if show_list:
        for name, summary in templates().items():
            typer.echo(f"{name:<12} {summary}")
        return
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
    _write_schema()
    typer.echo(f"{said}; next: retrain explain {target}, then retrain {target}")


def _holds(target: Path, text: str) -> bool:
    """Whether a file holds exactly this text."""
    try:
        return target.read_text(encoding="utf-8") == text
    except (OSError, ValueError):
        return False


def _write_schema() -> None:
    """Write the JSON Schema that the file's first line names; a failure costs only completion."""
    import contextlib
    import json

    from retrain.config.json_schema import NAME
    from retrain.config.load import json_schema

    with contextlib.suppress(OSError):
        Path(NAME).write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
