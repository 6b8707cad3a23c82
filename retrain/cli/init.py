"""`retrain init`: a file to start from."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.base.errors import ConfigError


def command(
    name: str = Argument(
        "", metavar="NAME", help="The template; default: campaign.", autocompletion=lambda: [*templates()]
    ),
    template: str = Option(
        "",
        "--template",
        "-t",
        metavar="NAME",
        help="The same as NAME.",
        autocompletion=lambda: [*templates()],
    ),
    force: bool = Option(False, "--force", help="Overwrite NAME.toml if it exists."),
    show_list: bool = Option(False, "--list", help="List the templates and exit."),
) -> None:
    """Write NAME.toml, a commented file to start from, and the JSON Schema with which editors complete it.

    Example: retrain init quickstart
    """
    if show_list:
        for listed, summary in templates().items():
            typer.echo(f"{listed:<12} {summary}")
        return
    from retrain.config.reference import NAME, json_schema
    from retrain.config.toml_files import templates_folder, write_file

    if name and template:
        raise ConfigError(f"{name} --template {template}: name one template")
    name, names = name or template or "campaign", templates()
    if name not in names:
        from retrain.base.registry import hint  # not at the top: only an error needs it

        others = f"there are: {', '.join(names)}"
        raise ConfigError(f"{name}: no such template; {hint(name, names, others)}")
    source = templates_folder() / f"{name}.toml"
    text = source.read_text(encoding="utf-8")
    target, is_there = Path(source.name), False
    with contextlib.suppress(OSError):
        is_there = not force and target.read_bytes() == text.encode()
    if not is_there:
        if not force and os.path.lexists(target):
            raise ConfigError(f"{target}: exists and differs; use --force to overwrite it")
        if target.is_symlink():
            raise ConfigError(f"{target}: is a symbolic link; remove it, or use another directory")
        try:
            write_file(target, text)
        except OSError as error:
            raise ConfigError(f"{target}: cannot be written ({error.strerror})") from error
    with contextlib.suppress(OSError):  # its first line names the schema; a failure costs only completion
        Path(NAME).write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    result = f"{target} exists and is the same" if is_there else f"wrote {target}"
    typer.echo(f"{result}; next: retrain explain {target}, then retrain {target}")


def templates() -> dict[str, str]:
    """List templates, each with its purpose (the file's first comment)."""
    from retrain.config.toml_files import templates_folder  # not at the top, like all that `--help` needs not

    purposes = {}
    for path in sorted(templates_folder().glob("*.toml")):
        with path.open(encoding="utf-8") as file:
            comments = (line.lstrip("# ").strip() for line in file if line.startswith("# "))
            purposes[path.stem] = next(comments, "")
    return purposes
