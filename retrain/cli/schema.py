"""`retrain schema`: every key, for readers and editors."""

from __future__ import annotations

import typer
from typer import Option


def command(
    markdown: bool = Option(False, "--markdown", help="Print the configuration reference as Markdown."),
) -> None:
    """Print the JSON Schema of a campaign file, or a page of its keys.

    Editors complete and check a file whose first line is `#:schema ./retrain.schema.json`. `retrain init`
    writes both; after an upgrade, write the schema again.

    Example: retrain schema > retrain.schema.json
    """
    from retrain.cli.render.tables import print_json
    from retrain.config import reference

    if markdown:
        typer.echo(reference.markdown(), nl=False)
    else:
        print_json(reference.json_schema())
