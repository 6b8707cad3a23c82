"""What a shell offers at a press of Tab, beside commands, options and files."""

from __future__ import annotations

from pathlib import Path

import typer


def templates(incomplete: str) -> list[str]:
    """Templates that `init` knows."""
    from retrain.config.templates import templates as known

    return [name for name in known() if name.startswith(incomplete)]


def plugin_kinds(incomplete: str) -> list[str]:
    """Kinds of plugins."""
    from retrain.registry import KINDS

    return [kind for kind in KINDS if kind.startswith(incomplete)]


def keys(incomplete: str) -> list[str]:
    """Keys for `--set`."""
    from retrain.config.reference import sections

    found = [f"{section.name}.{key.name}=" for section in sections() for key in section.keys]
    return [key for key in found if key.startswith(incomplete) and not key.startswith("[")]


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Runs of the campaign that was named before."""
    folder = Path(ctx.params.get("directory") or ".") / "runs"
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(incomplete))
