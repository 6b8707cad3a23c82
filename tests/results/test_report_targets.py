"""Where reports and tables are written: what is replaced, what is refused, and before what."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from io import BytesIO, StringIO
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain.base.errors import ConfigError
from retrain.cli import app
from retrain.records.lines import Row
from retrain.results.report.gather import gather_all
from retrain.results.report.outputs import FIRST, marked, prepare, rows_of, write_csv
from tests.simulated import flat, write_campaign

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def logs(here: Path) -> Path:
    for name in ("one-aaaa", "two-bbbb"):
        write_campaign(here / "logs", {("grpo", 0): flat(0.5), ("maxrl", 0): flat(0.6)}, name=name)
    return here / "logs"


def test_no_name_in_a_csv_is_a_formula_of_a_spreadsheet(here: Path) -> None:
    names = ["=1+2", "@SUM(A1)", "+x", "-x", "plain"]
    write_campaign(here / "logs", {(name, 0): flat(0.5) for name in names}, name="c-aaaa")
    with closing(BytesIO()) as out:
        write_csv(rows_of(gather_all(here / "logs")), out)
        rows = list(csv.DictReader(StringIO(out.getvalue().decode())))
    assert {row["condition"] for row in rows} == {"'=1+2", "'@SUM(A1)", "'+x", "'-x", "plain"}


def never(what: str) -> bool:
    raise AssertionError(f"asked about {what}")


def test_rows_of_a_csv_have_all_columns_whenever_a_column_first_appeared() -> None:
    """Rows are read once, so the columns are known after the last of them only."""
    rows: list[Row] = [
        {"step": 1, "note": 'two\r\nlines, "quoted"', "mean_reward": 0.1},
        {"step": 2, "note": "", "rewards": [0.25] * 50_000},  # longer than the csv module reads by default
        {"step": 3, "note": "é\ud800", "is_last": True, "loss": 1e-05},
        {"step": 4, "note": None},
    ]
    out = BytesIO()
    write_csv(iter(rows), out)
    columns = [*FIRST, "note", "mean_reward", "rewards", "is_last", "loss"]
    expected = StringIO(newline="")
    writer = csv.DictWriter(expected, columns, lineterminator="\n")
    writer.writeheader()
    texts = {"rewards": str([0.25] * 50_000)}
    writer.writerows(row | (texts if "rewards" in row else {}) for row in rows)
    assert out.getvalue() == expected.getvalue().encode(errors="replace")


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_a_table_of_ours_is_written_again_and_a_strangers_file_is_not(
    form: str, retrain: Call, logs: Path, here: Path
) -> None:
    table = here / f"rows.{form}"
    assert [retrain("export", logs, "-o", table).returncode for _ in range(2)] == [0, 0]
    table.write_text("mine\n")
    refused = retrain("export", logs, "-o", table)
    assert (refused.returncode, table.read_text()) == (2, "mine\n")
    assert "retrain did not write it; --force replaces it" in refused.stderr
    assert retrain("export", logs, "-o", table, "--force").returncode == 0
    assert table.read_text() != "mine\n"


def test_a_link_is_not_written_through(retrain: Call, logs: Path, here: Path) -> None:
    (here / "mine.csv").write_text("mine\n")
    (here / "rows.csv").symlink_to(here / "mine.csv")
    for force in ((), ("--force",)):
        refused = retrain("export", logs, "-o", "rows.csv", *force)
        assert (refused.returncode, "is a link" in refused.stderr) == (2, True)
    assert (here / "mine.csv").read_text() == "mine\n"


def test_a_missing_folder_is_made_and_a_directory_is_refused(retrain: Call, logs: Path, here: Path) -> None:
    assert retrain("export", logs, "-o", here / "a" / "b" / "rows.csv").returncode == 0
    (here / "rows.csv").mkdir()
    refused = retrain("export", logs, "-o", "rows.csv")
    assert (refused.returncode, "is a directory" in refused.stderr) == (2, True)


def test_a_folder_that_cannot_be_made_is_told_before_records_are_read(retrain: Call, here: Path) -> None:
    (here / "file").touch()
    refused = retrain("report", here / "nowhere", "-o", here / "file" / "report.html")
    assert (refused.returncode, "nowhere" in refused.stderr) == (5, False)
    assert "file" in refused.stderr


def test_reports_of_directories_with_the_same_name_do_not_replace_each_other(here: Path) -> None:
    for folder in ("monday", "tuesday"):
        write_campaign(here / folder, {("grpo", 0): flat(0.5)}, name="study-aaaa")
    directories = ["monday/study-aaaa", "tuesday/study-aaaa"]
    answer = CliRunner().invoke(app, ["report", *directories, "--format", "csv"])
    assert str(answer.exception).startswith("report-study-aaaa.csv: would hold 2 directories' reports; ")
    assert [*here.glob("*.csv")] == []


def test_a_full_disk_is_told_with_what_helps_a_report(logs: Path) -> None:
    answer = CliRunner().invoke(app, ["export", str(logs), "-o", "/dev/full", "--format", "csv"])
    assert str(answer.exception).endswith("; free some disk space, then try again")


def test_standard_output_and_devices_are_nobodys_file() -> None:
    prepare([Path("/dev/null")], never)


@pytest.mark.parametrize("form", ["svg", "png"])
def test_an_image_is_known_again_by_its_mark(form: str, tmp_path: Path) -> None:
    image = tmp_path / f"chart.{form}"
    image.write_bytes(b"x" * 200)
    with pytest.raises(ConfigError, match="did not write it"):
        prepare([image], lambda what: False)
    image.write_bytes(marked(b"x" * 200, form))
    prepare([image], never)


def test_on_a_terminal_somebody_is_asked(logs: Path, here: Path) -> None:
    (here / "rows.csv").write_text("mine\n")
    for answer, code in ((b"n\n", 2), (b"y\n", 0)):
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        words = [sys.executable, "-m", "retrain", "export", str(logs), "-o", "rows.csv"]
        done = subprocess.run(words, cwd=here, stdin=theirs, stderr=theirs, timeout=60, check=False)
        asked = os.read(ours, 4096).decode()
        os.close(ours), os.close(theirs)
        assert (done.returncode, "overwrite?" in asked) == (code, True)
    assert (here / "rows.csv").read_text() != "mine\n"


def test_several_campaigns_get_a_file_each(retrain: Call, logs: Path, here: Path) -> None:
    both = sorted(logs.iterdir())
    for _ in range(2):
        made = retrain("report", *both, "--format", "csv")
        assert made.returncode == 0, made.stderr
    assert [line.split()[0] for line in made.stdout.splitlines()] == [f"report-{p.name}.csv" for p in both]
    first, second = (here / f"report-{p.name}.csv" for p in both)
    assert first.read_text().replace("one-aaaa", "two-bbbb") == second.read_text()


def test_json_lines_are_known_again_though_rows_differ(here: Path) -> None:
    row = {
        "step": 1,
        "x": "y" * 50,
        "campaign": "c",
        "run": "r",
        "condition": "a",
        "seed": 0,
        "state": "done",
    }
    (here / "rows.jsonl").write_text(json.dumps(row) + "\n")
    prepare([here / "rows.jsonl"], never)
