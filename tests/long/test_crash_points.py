"""Records and checkpoints are cut short at every file operation: nothing lost, doubled or unreadable."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from retrain.base import locks as locks
from retrain.records import files, lines
from retrain.records.metrics import MetricsWriter
from retrain.trainer import checkpoint
from tests.crash_run import every_point, losses_after_kills, power_losses, random_kills

MEMORY = Path("/dev/shm")  # the disk below is a simulated one: what carries it should be quick
KILL_PLANS, LOSS_PLANS = 200, 60  # in which careless writers are caught below; `benchmarks.chaos` makes more


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as directory:
        yield Path(directory)


def test_a_death_at_any_operation_loses_doubles_and_spoils_nothing(scratch: Path) -> None:
    verdict = every_point(scratch)
    assert verdict.kills > 150
    assert verdict.problems == []


def test_a_loss_of_power_soon_after_a_kill_costs_no_checkpoint_that_was_saved(scratch: Path) -> None:
    verdict = losses_after_kills(scratch)
    assert verdict.plans > 200
    assert verdict.problems == []


def test_kills_in_a_row_lose_double_and_spoil_nothing(scratch: Path) -> None:
    verdict = random_kills(scratch, plans=KILL_PLANS, seed=21)
    assert verdict.kills > KILL_PLANS
    assert verdict.problems == []


def test_losses_of_power_in_a_row_cost_nothing_that_was_synced(scratch: Path) -> None:
    verdict = power_losses(scratch, plans=LOSS_PLANS, seed=22)
    assert verdict.kills > LOSS_PLANS
    assert verdict.problems == []


class Careless:
    """A module of Python's as another module sees it, but for some functions."""

    def __init__(self, real: ModuleType, **replaced: Callable[..., object]) -> None:
        self._real, self._replaced = real, replaced

    def __getattr__(self, name: str) -> object:
        return self._replaced.get(name) or getattr(self._real, name)


def sync_directories_only(fd: int) -> None:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        os.fsync(fd)


def write_in_place(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        files.write_all(fd, content.encode() if isinstance(content, str) else content)
    finally:
        os.close(fd)


same = SimpleNamespace(hexdigest=lambda: "the same")
no_directory_is_empty = Careless(os, scandir=lambda path: contextlib.nullcontext(iter([path])))
syncs_directories_only = Careless(os, fsync=sync_directories_only)
# what writers that do without some care have in place of it
CARELESS: dict[str, list[tuple[object, str, object]]] = {
    "names not synced again": [(files, "os", no_directory_is_empty)],
    "checkpoints not synced again": [(checkpoint, "sync_directory", lambda path: None)],
    "no tail repair": [(lines, "os", Careless(os, ftruncate=lambda fd, size: None))],
    "no lock": [(locks, "hold", lambda path: contextlib.nullcontext())],
    "files replaced in place": [(files, "write_atomic", write_in_place)],
    "leftovers stay": [(files, "remove_leftovers", lambda directory: None)],
    "rows not synced before a checkpoint": [(MetricsWriter, "sync", lambda self: None)],
    "files not synced before their rename": [(files, "os", syncs_directories_only)],
    "checkpoints neither synced nor verified": [
        (checkpoint, "os", syncs_directories_only),
        (checkpoint, "hashlib", Careless(hashlib, file_digest=lambda file, name: same)),
    ],
}


@pytest.fixture
def careless(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name, instead in CARELESS[request.param]:
        monkeypatch.setattr(where, name, instead)


def with_writers(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("careless", names, indirect=True)


@with_writers("names not synced again", "checkpoints not synced again")
def test_a_loss_of_power_after_a_kill_catches_who_relies_on_the_killed_ones_syncs(
    careless: None, scratch: Path
) -> None:
    assert losses_after_kills(scratch).problems != []


@with_writers("no tail repair", "no lock", "files replaced in place", "leftovers stay")
def test_the_kills_catch_writers_that_are_careless(careless: None, scratch: Path) -> None:
    assert random_kills(scratch, plans=KILL_PLANS, seed=3).problems != []


@with_writers(
    "rows not synced before a checkpoint",
    "files not synced before their rename",
    "checkpoints neither synced nor verified",
)
def test_power_losses_catch_writers_that_do_not_sync(careless: None, scratch: Path) -> None:
    assert power_losses(scratch, plans=LOSS_PLANS, seed=4).problems != []


def test_a_damaged_newer_checkpoint_never_costs_the_one_just_saved(tmp_path: Path) -> None:
    def save(step: int) -> None:
        checkpoint.save(tmp_path, step, {}, lambda at: (at / "weights").write_bytes(b"w"), keep=1)

    save(20)
    (tmp_path / "step-000020" / "weights").write_bytes(b"damaged")
    assert checkpoint.newest(tmp_path) is None
    save(12)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 12
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


def test_what_a_killed_worker_left_of_a_checkpoint_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-000004.partial").mkdir()
    (tmp_path / ".step-000004.partial" / "weights").write_bytes(b"half")
    checkpoint.save(tmp_path, 2, {}, lambda at: None, keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
