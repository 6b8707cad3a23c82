"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from retrain.report.tables import Table


def table(found: Table) -> Iterator[str]:
    """Iterate over the lines of a table; '>' before a header aligns its column right."""
    headers, rows = found
    yield _row([name.lstrip(">") for name in headers])
    yield _row(["---:" if name.startswith(">") else "---" for name in headers])
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
