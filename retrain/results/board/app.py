"""The board's web server: who may ask, and what is answered, a function for each part of the page.

- It listens on 127.0.0.1 and answers only requests whose Host is a name of this machine and whose Origin, if
  there is one, is the board itself: a page of another site reaches nothing, also by DNS rebinding.
- Data need the token of the address line, which the page sends as a header. No cookie is set, thus
  nothing is sent by itself. To stop or resume needs a second token.
- A content security policy keeps the browser from fetching anything elsewhere, and from running any script
  but the board's own. Text from runs is JSON, which the page shows as text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeAlias

from retrain.base import extras
from retrain.base.errors import ConfigError, RetrainError
from retrain.records.run_row import RunRow, last_output
from retrain.records.text import plain, plain_lines
from retrain.results.board import drawn
from retrain.results.board.live import Live, Shown, decisions, listed, notices, summary
from retrain.results.board.reading import rollouts
from retrain.results.report.charts import STYLE
from retrain.results.report.page import bundle

LOCAL = ("127.0.0.1", "localhost", "[::1]")
FILES = {  # of the page: the folder and the type of each
    "": ("board", "text/html"),
    "board.css": ("board", "text/css"),
    "board.js": ("board", "text/javascript"),
    "charts.js": ("report", "text/javascript"),
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'self' "
    "'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
ACTIONS = {
    "stop": ("stop",),
    "stop now": ("stop", "--now"),
    "resume": ("resume", "--detach"),
    "resume failed": ("resume", "--detach", "--failed"),
}
ACTION_S = 600.0  # a stop waits until checkpoints are saved
LOG_LINES = 200
LINE_LIMIT = 2000
Query: TypeAlias = Any  # starlette's QueryParams


@dataclass
class Board:
    """What the server knows."""

    live: Live
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    change_token: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    histories: drawn.Histories = field(default_factory=drawn.Histories)
    drawing: asyncio.Lock = field(default_factory=asyncio.Lock)  # one at a time: they share what they follow

    def campaign(self, name: str) -> Shown:
        """Return a campaign by its id."""
        shown = self.live.campaigns.get(name)
        if shown is None:
            raise ConfigError(f"{plain(name)}: no such campaign in {self.live.log_dir}")
        return shown

    def run(self, name: str, run_id: str) -> tuple[Shown, RunRow]:
        """Return a campaign, and one of its runs."""
        shown = self.campaign(name)
        run = next((run for run in shown.status.runs if run.run_id == run_id), None)
        if run is None:
            raise ConfigError(f"{plain(name)}: has no run {plain(run_id)!r}")
        return shown, run

    def chosen(self, name: str, query: Query) -> tuple[Shown, list[RunRow]]:
        """Return a campaign, and the runs of the conditions that are asked for; without any, all."""
        shown, conditions = self.campaign(name), query.getlist("condition")
        return shown, [run for run in shown.status.runs if not conditions or run.condition in conditions]


def _campaigns(board: Board, name: str, query: Query) -> Any:
    del name
    since = _refreshed(board, query)
    version = board.live.version
    return None if since == version else {"version": version, **listed(board.live, since)}


def _campaign(board: Board, name: str, query: Query) -> Any:
    since, shown = _refreshed(board, query), board.campaign(name)
    return None if shown.version <= since else {"version": shown.version, **summary(shown, since)}


def _refreshed(board: Board, query: Query) -> int:
    """Look at the files; return the version that the page has."""
    board.live.refresh()
    return int(query.get("since", "0"))


def _log(board: Board, name: str, query: Query) -> Any:
    shown, run = board.run(name, query.get("run", ""))
    lines = plain_lines("\n".join(last_output(shown.files_of(run), LOG_LINES)))
    return {"lines": [line[:LINE_LIMIT] for line in lines], "message": run.message}


def _rollouts(board: Board, name: str, query: Query) -> dict[str, Any]:
    shown, run = board.run(name, query.get("run", ""))
    against = board.run(name, query["against"])[1] if query.get("against") else None
    return rollouts(board.histories, shown, run, against, query)


Answer: TypeAlias = Callable[[Board, str, Query], Any]
READ: Mapping[str, Answer] = {
    "campaigns": _campaigns,
    "campaign": _campaign,
    "style": lambda board, name, query: STYLE,
    "metrics": lambda board, name, query: drawn.metrics_of(board.campaign(name)),
    "decisions": lambda board, name, query: decisions(board.campaign(name)),
    "notices": lambda board, name, query: notices(board.campaign(name)),
    "log": _log,
}
DRAW: Mapping[str, Answer] = {  # sent only if they are others than the page has
    "curves": lambda board, name, query: drawn.curves_of(
        board.histories,
        *board.chosen(name, query),
        query.get("metric", "mean_reward"),
        query.get("per", "steps"),
    ).as_json(),
    "pressure": lambda board, name, query: drawn.pressure_of(
        board.histories, *board.chosen(name, query)
    ).as_json(),
    "engines": lambda board, name, query: drawn.engines_of(
        board.histories, *board.chosen(name, query)
    ).as_json(),
    "rollouts": _rollouts,
}


def drawing(draw: Answer, board: Board, name: str, query: Query) -> dict[str, Any]:
    """Return charts or rollouts, or only when to ask again if they are those that the page has."""
    began_s = time.thread_time()
    body: dict[str, Any] = draw(board, name, query)
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
    again = {"again_s": drawn.again_s(time.thread_time() - began_s)}
    return again if query.get("have") == digest else {**body, **again, "digest": digest}


def act(board: Board, name: str, query: Query) -> dict[str, Any]:
    """Start the command that a user would type to stop or resume; return its output and exit code."""
    shown, action = board.campaign(name), query.get("action", "")
    if action not in ACTIONS:
        raise ConfigError(f"{plain(action)!r}: no such action; there are {', '.join(ACTIONS)}")
    command, *flags = ACTIONS[action]
    words = [sys.executable, "-m", "retrain", command, str(shown.directory), *flags]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(ACTION_S)
        except subprocess.TimeoutExpired:
            return {"code": None, "lines": [f"still going on after {ACTION_S:.0f} s"]}
        output.seek(0)
        return {"code": code, "lines": plain_lines(output.read().decode(errors="replace"))}


def why_refused(board: Board, method: str, path: str, headers: Any) -> tuple[int, str] | None:
    """Return the status and the reason for which a request is refused; None if it is answered."""
    host = headers.get("host", "")
    if host.rpartition(":")[0] not in LOCAL and host not in LOCAL:
        return 421, "this board answers to 127.0.0.1 and localhost only"
    origin = headers.get("origin")
    if origin is not None and origin != f"http://{host}":
        return 403, "this board answers its own page only"
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        return 403, "this board answers its own page only"
    if not path.startswith("/api/"):
        return None if method in ("GET", "HEAD") else (405, "only GET")
    given = headers.get("authorization", "").removeprefix("Bearer ")
    if not secrets.compare_digest(given.encode(), board.token.encode()):
        return 401, "the token is missing or wrong: open the address that `retrain board` printed"
    if method == "POST":
        if origin is None:
            return 403, "a change needs the Origin of this board"
        if not secrets.compare_digest(
            headers.get("x-change-token", "").encode(), board.change_token.encode()
        ):
            return 403, "to stop or resume, open the second address that `retrain board` printed"
    return None


def application(board: Board) -> Any:
    """Return the ASGI application."""
    from starlette.applications import Starlette
    from starlette.datastructures import Headers
    from starlette.responses import Response
    from starlette.routing import Route

    def in_json(value: Any, status: int = 200) -> Any:
        return Response(json.dumps(value, allow_nan=False), status, HEADERS, "application/json")

    async def answer(request: Any) -> Any:
        """Answer with what the function of this name returns; 204 if that is None, as nothing changed."""
        what, name, query = request.path_params["what"], request.path_params["id"], request.query_params
        try:
            if what in DRAW:
                async with board.drawing:
                    value = await asyncio.to_thread(drawing, DRAW[what], board, name, query)
            elif what in READ:
                value = await asyncio.to_thread(READ[what], board, name, query)
            else:
                return in_json({"error": "there is no such address"}, 404)
        except (RetrainError, ValueError) as error:
            return in_json({"error": "\n".join(plain_lines(str(error)))}, 400)
        return Response(status_code=204, headers=HEADERS) if value is None else in_json(value)

    async def change(request: Any) -> Any:
        name, query = request.path_params["id"], request.query_params
        try:
            return in_json(await asyncio.to_thread(act, board, name, query))
        except RetrainError as error:
            return in_json({"error": str(error)}, 400)

    def file(request: Any) -> Any:
        found = _static(request.path_params.get("name", ""))
        content, kind = found or ("there is no such address", "text/plain")
        return Response(content, 200 if found else 404, HEADERS, kind)

    routes = [
        Route("/api/act/{id}", change, methods=["POST"]),
        Route("/api/{what}/{id}", answer),
        Route("/{name}", file),
        Route("/", file),
    ]
    inner = Starlette(routes=routes)

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        refused = why_refused(board, scope["method"], scope["path"], Headers(scope=scope))
        if refused is not None:
            status, why = refused
            await in_json({"error": why}, status)(scope, receive, send)
            return
        await inner(scope, receive, send)

    return guarded


def serve(log_dir: Path, port: int, say: Callable[[Board, int], None]) -> None:
    """Serve a log directory on 127.0.0.1 until a signal ends it; `say` is called when it listens.

    Raises:
        ConfigError: there is no such directory, or the port is taken.
    """
    extras.load("starlette.applications", "board", "retrain board")
    uvicorn = extras.load("uvicorn", "board", "retrain board")
    board = Board(Live(log_dir))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; choose another, or 0 for a free one") from error
    config = uvicorn.Config(
        application(board),
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
    )
    threading.Thread(target=bundle, daemon=True).start()  # takes seconds, until the first chart
    say(board, listener.getsockname()[1])
    uvicorn.Server(config).run(sockets=[listener])


@cache
def _static(name: str) -> tuple[str, str] | None:
    """Return a file of the page and its type; None if there is none of this name."""
    if name == "vega.js":
        return bundle(), "text/javascript"
    if name not in FILES:
        return None
    folder, kind = FILES[name]
    text = resources.files(f"retrain.results.{folder}").joinpath(name or "page.html").read_text("utf-8")
    return text, kind
