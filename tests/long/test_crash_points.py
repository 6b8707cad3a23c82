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

from retrain.locks import held as locks
from retrain.records import files, lines
from retrain.records.metrics import MetricsWriter
from retrain.trainer import checkpoint
from tests.crash_run import every_point, losses_after_kills, power_losses, random_kills

Patch = pytest.MonkeyPatch
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


def names_not_synced_again(patch: Patch) -> None:
    no_directory_is_empty = Careless(os, scandir=lambda path: contextlib.nullcontext(iter([path])))
    patch.setattr(files, "os", no_directory_is_empty)


def checkpoints_not_synced_again(patch: Patch) -> None:
    patch.setattr(checkpoint, "sync_directory", lambda path: None)


@pytest.mark.parametrize("mutate", [names_not_synced_again, checkpoints_not_synced_again])
def test_a_loss_of_power_after_a_kill_catches_who_relies_on_the_killed_ones_syncs(
    mutate: Callable[[Patch], None], scratch: Path, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    assert losses_after_kills(scratch).problems != []


def no_tail_repair(patch: Patch) -> None:
    patch.setattr(lines, "os", Careless(os, ftruncate=lambda fd, size: None))


def no_lock(patch: Patch) -> None:
    patch.setattr(locks, "hold", lambda path: contextlib.nullcontext())


def files_replaced_in_place(patch: Patch) -> None:
    def write_in_place(path: Path, content: str | bytes, *, durable: bool = True) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            files.write_all(fd, content.encode() if isinstance(content, str) else content)
        finally:
            os.close(fd)

    patch.setattr(files, "write_atomic", write_in_place)


def leftovers_stay(patch: Patch) -> None:
    patch.setattr(files, "remove_leftovers", lambda directory: None)


@pytest.mark.parametrize("mutate", [no_tail_repair, no_lock, files_replaced_in_place, leftovers_stay])
def test_the_kills_catch_writers_that_are_careless(
    mutate: Callable[[Patch], None], scratch: Path, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
    assert random_kills(scratch, plans=KILL_PLANS, seed=3).problems != []


def rows_not_synced_before_a_checkpoint(patch: Patch) -> None:
    patch.setattr(MetricsWriter, "sync", lambda self: None)


def files_not_synced_before_their_rename(patch: Patch) -> None:
    patch.setattr(files, "os", Careless(os, fsync=sync_directories_only))


def checkpoints_not_synced_nor_verified(patch: Patch) -> None:
    same = SimpleNamespace(hexdigest=lambda: "the same")
    patch.setattr(checkpoint, "os", Careless(os, fsync=sync_directories_only))
    patch.setattr(checkpoint, "hashlib", Careless(hashlib, file_digest=lambda file, name: same))


@pytest.mark.parametrize(
    "mutate",
    [
        rows_not_synced_before_a_checkpoint,
        files_not_synced_before_their_rename,
        checkpoints_not_synced_nor_verified,
    ],
)
def test_power_losses_catch_writers_that_do_not_sync(
    mutate: Callable[[Patch], None], scratch: Path, monkeypatch: Patch
) -> None:
    mutate(monkeypatch)
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
