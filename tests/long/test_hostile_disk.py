"""A disk that is full, read-only or failing: a clear error, nothing lost, and the rest can follow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_INFRASTRUCTURE, EXIT_RUN_FAILED, RecordsError
from retrain.campaign.run import reopen, start
from retrain.records.files import make_directory, read_json, write_json
from retrain.records.layout import RunFiles
from retrain.records.metrics import MetricsWriter, read_metrics
from retrain.records.run_state import read_attempts
from retrain.trainer import checkpoint
from tests.scanned import scan_metrics

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SMALL = 64 * 1024
# A module's byte code would be cut off too, and whoever imported it next would fail.
WITHOUT_BYTE_CODE = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """64 kB in memory where mounting is allowed; else any disk, filled up to the file size limit instead."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", str(place)]
    mounted = shutil.which("mount") is not None and subprocess.run(mount, capture_output=True).returncode == 0
    yield place
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


def limited(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process that may write files of at most 64 kB."""
    return subprocess.run(
        [
            "bash",
            "-c",
            f'ulimit -f {SMALL // 1024}; exec "$0" "$@"',
            sys.executable,
            "-c",
            code,
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=WITHOUT_BYTE_CODE,
    )


FILL = """
import sys
from pathlib import Path
from retrain.base.errors import RecordsError
from retrain.records.metrics import MetricsWriter
told = 0
try:
    with MetricsWriter(Path(sys.argv[1]) / "metrics.jsonl", 1) as rows:
        for step in range(1, 10_000):
            rows.append({"step": step, "filler": "x" * 100})
            told = step
except RecordsError as error:
    print(told, error)
"""


def test_a_full_disk_costs_no_row_that_was_accepted(small_disk: Path) -> None:
    told, _, message = limited(FILL, small_disk).stdout.partition(" ")
    assert "metrics.jsonl: cannot append to" in message
    assert "then resume" in message
    scan = scan_metrics(small_disk)
    assert [row["step"] for row in scan.rows] == list(range(1, int(told) + 1))
    assert scan.skipped_lines == 0


def test_a_full_disk_keeps_the_old_file_and_the_old_checkpoint(small_disk: Path) -> None:
    write_json(small_disk / "manifest.json", {"n": "old"})
    make_directory(small_disk / "checkpoints")
    checkpoint.save(small_disk / "checkpoints", 1, {}, lambda at: (at / "w").write_bytes(b"w"), keep=2)
    code = (
        "import sys; from pathlib import Path; from retrain.trainer import checkpoint\n"
        "from retrain.records.files import write_json\n"
        "here = Path(sys.argv[1]); big = 'x' * 80_000; saved = here / 'checkpoints'\n"
        "for write in (\n"
        "  lambda: write_json(here / 'manifest.json', {'n': big}),\n"
        "  lambda: checkpoint.save(saved, 2, {'n': big}, lambda at: None, keep=2),\n"
        "  lambda: checkpoint.save(saved, 2, {}, lambda at: (at / 'w').write_text(big), keep=2),\n"
        "):\n"
        "  try: write()\n"
        "  except Exception as error: print(type(error).__name__, error)\n"
    )
    said = limited(code, small_disk).stdout.splitlines()
    assert [line.split()[0] for line in said] == ["RecordsError"] * 3
    assert read_json(small_disk / "manifest.json") == {"n": "old"}
    found = checkpoint.newest(small_disk / "checkpoints")
    assert found is not None
    assert found.step == 1
    assert [p.name for p in small_disk.rglob("*") if p.name.endswith((".tmp", ".partial"))] == []


def test_a_worker_whose_checkpoint_does_not_fit_says_so_and_goes_on_once_there_is_room(
    campaign_file: Path,
) -> None:
    campaign = start(campaign_file, ["campaign.seeds=[0]", "campaign.launcher=inline"])
    run = RunFiles(campaign.directory / "runs" / "grpo_s0")
    ended = subprocess.run(
        [
            "bash",
            "-c",
            'ulimit -f 4; exec "$@"',
            "-",
            sys.executable,
            "-m",
            "retrain.trainer.worker",
            str(run.directory),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=WITHOUT_BYTE_CODE,
    )
    assert ended.returncode == EXIT_INFRASTRUCTURE, ended.stderr
    assert "cannot write the checkpoint" in ended.stderr
    assert [row["step"] for row in read_metrics(run.directory)] == [1, 2]
    assert read_attempts(run.attempts)[-1].ending == "infrastructure"
    assert checkpoint.newest(run.checkpoints) is None
    assert reopen(campaign.directory).execute().exit_code == 0
    assert [row["step"] for row in read_metrics(run.directory)] == [1, 2, 3, 4]


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory to which nothing on the way is closed for others, as pytest's own are."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        (Path(place) / "logs").mkdir()
        yield Path(place)


def test_a_directory_that_may_not_be_written_is_refused_with_a_reason(reachable: Path) -> None:
    locked = reachable / "locked"
    locked.mkdir(mode=0o500)
    # what it imports only on an error may lie where this user alone may read
    code = (
        "import os, socket, sys; from pathlib import Path\n"
        "from retrain.records.layout import create_directory\n"
        "from retrain.base.errors import ConfigError\n"
        f"os.geteuid() or os.setuid({NOBODY})\n"
        "try: create_directory(Path(sys.argv[1]), 'c')\n"
        "except ConfigError as error: print(error)\n"
    )
    said = limited(code, locked).stdout
    assert "Permission denied" in said
    assert "writable for this user" in said
    locked.chmod(0o700)


FORBIDDEN = """
import os, sys
from pathlib import Path
from retrain.campaign.run import reopen, run_campaign
from retrain.campaign.stop import stop_campaign
from retrain.base.errors import RecordsError
directory = run_campaign(Path(sys.argv[1]), ["campaign.launcher=inline", "campaign.max_steps=1"]).directory
for path in (directory, *directory.rglob("*")):
    os.geteuid() or os.chown(path, NOBODY, NOBODY)
os.geteuid() or os.setuid(NOBODY)
def attempt(name, mode):
    (directory / name).chmod(mode)
    for call in (lambda: reopen(directory).execute(), lambda: stop_campaign(directory)):
        try: call(); print("went on")
        except RecordsError as error: print(error)
    (directory / name).chmod(0o700)
(directory / "stop.json").write_text("{}")
attempt(".", 0o500)
attempt(".", 0)
attempt("runs", 0)
attempt("runs", 0o400)  # its runs can be named, not looked at
attempt("runs/grpo_s0", 0)
"""


def test_what_may_not_be_written_or_read_is_refused_with_a_reason_and_stops_what_it_can(
    campaign_file: Path, reachable: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN.replace("NOBODY", str(NOBODY)), str(campaign_file)],
        capture_output=True,
        text=True,
        check=True,
        cwd=reachable,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    resumed, stopped = done.stdout.splitlines()[::2], done.stdout.splitlines()[1::2]
    assert all("Permission denied" in line and "for this user" in line for line in resumed)
    assert ["Permission denied" in line for line in stopped] == [False, True, True, True, False]


WRITE_ROWS = """
import sys
from pathlib import Path
from retrain.base.errors import RecordsError
from retrain.records.metrics import MetricsWriter
rows = MetricsWriter(Path(sys.argv[1]) / "metrics.jsonl", 1)
try:
    for step in (1, 2, 3):
        rows.append({"step": step})
        rows.sync()
except RecordsError as error:
    print(error)
"""


def can_trace() -> bool:
    tracing = ["strace", "-e", "inject=fsync:error=EIO:when=1", "true"]
    return shutil.which("strace") is not None and subprocess.run(tracing, capture_output=True).returncode == 0


@pytest.mark.parametrize("way", ["in the process", *(["in the kernel"] if can_trace() else [])])
def test_a_failing_disk_is_an_error_that_says_so(way: str, tmp_path: Path) -> None:
    inside = (
        "import errno, os\ncount = iter(range(9))\nreal = os.fsync\ndef fsync(fd):\n"
        "    if next(count) == 2: raise OSError(errno.EIO, os.strerror(errno.EIO))\n"
        "    real(fd)\nos.fsync = fsync\n"
    )
    code = (inside if way == "in the process" else "") + WRITE_ROWS
    tracing = ["strace", "-o", "/dev/null", "-e", "inject=fsync:error=EIO:when=3"]
    command = [*(tracing if way == "in the kernel" else []), sys.executable, "-c", code, str(tmp_path)]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ).stdout
    assert "cannot sync (Input/output error); the disk reports an error" in said
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


def test_rows_go_on_after_space_was_made(small_disk: Path) -> None:
    told = int(limited(FILL, small_disk).stdout.partition(" ")[0])
    kept = (small_disk / "metrics.jsonl").read_bytes().splitlines(keepends=True)[: told // 2]
    (small_disk / "metrics.jsonl").write_bytes(b"".join(kept))
    with MetricsWriter(small_disk / "metrics.jsonl", 2) as rows:
        rows.append({"step": told // 2 + 1})
    assert [row["step"] for row in read_metrics(small_disk)] == list(range(1, told // 2 + 2))


def test_an_orchestrator_whose_records_cannot_be_written_says_which(tmp_path: Path) -> None:
    (tmp_path / "status.json").mkdir()
    with pytest.raises(RecordsError, match=r"status.json: is not a regular file"):
        write_json(tmp_path / "status.json", {})


RUN_INLINE = """
import sys
from pathlib import Path
from retrain.campaign.run import reopen
print(reopen(Path(sys.argv[1])).execute().exit_code)
"""


def test_an_output_that_does_not_fit_ends_no_campaign_that_runs_in_one_process(campaign_file: Path) -> None:
    sets = ["campaign.launcher=inline", "reward.reward=tests.plugins.broken", "campaign.seeds=[0]"]
    directory = start(campaign_file, sets).directory.absolute()
    for name in ("grpo_s0", "maxrl_s0"):
        (directory / "runs" / name / "output.log").write_bytes(b"x" * SMALL)
    assert limited(RUN_INLINE, directory).stdout == f"{EXIT_RUN_FAILED}\n"
