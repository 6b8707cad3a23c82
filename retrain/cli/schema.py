"""`retrain schema`: every key, for readers and editors."""

from __future__ import annotations

import typer
from typer import Option


def command(
    keys: bool = Option(False, "--keys", help="Print a table of keys instead."),
    markdown: bool = Option(False, "--markdown", help="Print the configuration reference as Markdown."),
    as_json: bool = Option(False, "--json", help="With --keys: print the table as JSON."),
) -> None:
    """Print the JSON Schema of a campaign file, or a table of its keys.

    Editors complete and check a file whose first line is `#:schema ./retrain.schema.json`. `retrain init`
    writes both; after an upgrade, write the schema again.

    Example: retrain schema > retrain.schema.json
    """
    from retrain.cli.render.tables import print_json, print_result, print_wrapped
    from retrain.config import reference

    if markdown:
        typer.echo(reference.markdown(), nl=False)
        return
    if keys and as_json:
        print_result(reference.sections(), "sections")
        return
    if not keys:
        print_json(reference.json_schema())
        return
    for section in reference.sections():
        rows = [(key.name, key.type, key.default, key.help) for key in section.keys]
        title = f"[{section.name}] {section.description}"
        print_wrapped(title, ("key", "type", "default", "meaning"), rows)
