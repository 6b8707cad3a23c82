"""The report's servers: what the rows of several runs tell of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.results.report.contents import Contents, contents
from retrain.results.report.engines import MOST_POINTS
from retrain.results.report.gather import gather
from tests.simulated import Row, Simulated, write_campaign

LOG = "/tmp/engines/server.log"
CRASH = "the server ended with signal SIGKILL\n\x1b[31mlast words"


def told(server: str = LOG, **more: object) -> Row:
    row = {"engine_running": 8, "engine_waiting": 1, "engine_kv_fraction": 0.25, "engine_tokens_per_s": 100.0}
    return row | {"engine_server": server} | more


def crashed(step: int) -> Row:
    return told(engine_restarts=int(step > 2), **({"engine_crash": CRASH} if step == 3 else {}))


def moved(step: int) -> Row:
    return crashed(step) if step < 4 else told("http://gpu:8000", engine_tokens_per_s=None)


def report_of(tmp_path: Path, **runs: Simulated) -> Contents:
    return contents(gather(write_campaign(tmp_path, {(name, 0): run for name, run in runs.items()})))


@pytest.fixture
def shown(tmp_path: Path) -> Contents:
    return report_of(tmp_path, a=Simulated([0.5] * 5, more=crashed), b=Simulated([0.5] * 5, more=moved))


def test_runs_that_name_one_log_share_a_server(shown: Contents) -> None:
    head, rows = shown.tables["sampling-servers"]
    assert head[0] == "server"
    assert rows == [
        ("server 1", "8", "1", "25%", "100", "1", "a_s0, b_s0", LOG),
        ("server 2", "8", "1", "25%", "-", "-", "b_s0", "http://gpu:8000"),
    ]


def test_a_crash_that_two_runs_saw_is_shown_once_and_is_safe_to_print(shown: Contents) -> None:
    [(title, lines)] = shown.crashes
    assert title.startswith("server 1 crashed, seen ")
    assert lines == ["the server ended with signal SIGKILL", "last words"]


def test_each_figure_that_is_known_has_a_chart_over_time(shown: Contents) -> None:
    charts = {chart.name: chart.spec for chart in shown.sections["sampling-servers"]}
    assert list(charts) == [
        "engine-running", "engine-waiting", "engine-kv-fraction", "engine-tokens-per-s",
    ]  # fmt: skip
    points, crashes = (layer["data"]["values"] for layer in charts["engine-running"]["layer"])
    assert [(point["c"], point["v"]) for point in points] == [("server 1", 8)] * 8 + [("server 2", 8)] * 2
    assert [crash["c"] for crash in crashes] == ["server 1"]


def test_a_long_campaign_keeps_the_peaks(tmp_path: Path) -> None:
    run = Simulated([0.5] * 2000, more=lambda step: told(engine_waiting=float(step == 1234)))
    charts = {chart.name: chart.spec for chart in report_of(tmp_path, a=run).sections["sampling-servers"]}
    points = charts["engine-waiting"]["layer"][0]["data"]["values"]
    assert len(points) <= MOST_POINTS
    assert sum(point["v"] for point in points) == 1


@pytest.mark.parametrize("runs", [{}, {"a": Simulated([0.5] * 5)}])
def test_without_a_server_there_is_nothing(runs: dict[str, Simulated], tmp_path: Path) -> None:
    report = report_of(tmp_path, **runs)
    assert ("sampling-servers" in report.tables, report.crashes) == (False, ())
    assert report.sections["sampling-servers"] == ()
