"""What the board answers, a function for each part of its page: of a campaign's id and the query."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from retrain.base.errors import ConfigError
from retrain.records.run_row import RunRow, last_output
from retrain.records.text import plain, plain_lines
from retrain.results.board import drawn
from retrain.results.board.live import Live, Shown, decisions, listed, notices, summary
from retrain.results.board.reading import rollouts
from retrain.results.report.charts import STYLE

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
