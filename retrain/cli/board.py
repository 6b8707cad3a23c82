"""`retrain board`: campaigns in a browser, live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

if TYPE_CHECKING:
    from retrain.results.board.app import Board

PORT = 8420


def command(
    directory: Path = Argument(Path("logs"), metavar="DIR", help="A log directory, a campaign or a run."),
    port: int = Option(
        PORT, "--port", min=0, max=65535, metavar="N", help="Port on 127.0.0.1; 0: a free one"
    ),
) -> None:
    """Show campaigns in a browser while they run: tables, curves, decisions, rollouts. Ctrl-C ends it.

    Prints two addresses: one only shows, the other can also stop and resume campaigns. Files are only read.

    Example: retrain board logs
    """
    from retrain.results.board.app import serve

    def say(board: Board, port: int) -> None:
        address = f"http://127.0.0.1:{port}/#token={board.token}"
        typer.echo(f"to look: {address}")
        typer.echo(f"to stop and resume as well: {address}&change={board.change_token}")
        typer.echo(f"from another machine, first: ssh -L {port}:127.0.0.1:{port} HOST", err=True)

    serve(directory, port, say)
