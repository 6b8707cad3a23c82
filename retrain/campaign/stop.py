"""Stops a campaign from anywhere: through its orchestrator, or without one.

A request is a file that the orchestrator looks for every second, so it arrives from another machine
that shares the directory too. If the orchestrator is dead, its lock is ours to take, and its workers
are ours to stop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from retrain import registry
from retrain.campaign.endings import conclude, ended_attempts
from retrain.campaign.origin import read_origin
from retrain.errors import RecordsError
from retrain.launchers import Launcher
from retrain.records.atomic import read_json, write_json
from retrain.records.layout import CampaignFiles, RunFiles, is_single_run
from retrain.records.locks import hold, holder, is_held
from retrain.records.manifest import read_manifest, refresh, write_manifest
from retrain.records.run_state import RunState

PAUSE_S = 0.1


@dataclass(frozen=True)
class Stopped:
    """What a stop found."""

    was_supervised: bool
    workers: tuple[str, ...]  # run ids of workers that were alive


def asked_to_stop(files: CampaignFiles) -> int:
    """Give what was asked of this campaign's orchestrator: 0 nothing, 1 save and leave, 2 leave now."""
    if not files.stop_request.exists():
        return 0
    try:
        request = read_json(files.stop_request) or {}
    except RecordsError:
        request = {}
    return 2 if request.get("now") is True else 1


def withdraw_request(files: CampaignFiles) -> None:
    """Forget an earlier request; only for the holder of the campaign's lock."""
    files.stop_request.unlink(missing_ok=True)


def stop_campaign(
    directory: Path, *, now: bool = False, on_wait: Callable[[str], None] = lambda _: None
) -> Stopped:
    """Have every worker save a checkpoint and leave (`now`: kill them), and wait until they have.

    Args:
        directory: the campaign's.
        now: kill the workers; what they did since their last checkpoint will be done again.
        on_wait: is told whom we wait for.

    Raises:
        RecordsError: the directory holds no campaign, or cannot be written.
    """
    files = CampaignFiles(directory)
    if not files.campaign_toml.is_file():
        raise RecordsError(f"{directory}: holds no campaign; `retrain status` lists those below logs/")
    asked = None
    while (lock := hold(files.lock)) is None:
        found = holder(files.lock)
        if asked is None:
            asked = found
            write_json(files.stop_request, {"now": now})
            on_wait(f"asked {found} to stop; it waits for its workers")
        elif found != asked:
            return Stopped(was_supervised=True, workers=())  # somebody has resumed it meanwhile
        elif not files.stop_request.exists():  # it was only starting, and swept away what it found
            write_json(files.stop_request, {"now": now})
        time.sleep(PAUSE_S)
    with lock:
        withdraw_request(files)
        return Stopped(asked is not None, _stop_workers(files, now=now, on_wait=on_wait))


def _stop_workers(files: CampaignFiles, *, now: bool, on_wait: Callable[[str], None]) -> tuple[str, ...]:
    manifest = read_manifest(files.manifest)
    hashes = {run.run_id: run.config_hash for run in manifest.runs} if manifest else {}
    alone = is_single_run(files.directory)
    runs = {run_id: RunFiles(files.directory) if alone else files.run(run_id) for run_id in hashes}
    alive = {run_id: found for run_id, found in runs.items() if is_held(found.lock)}
    launcher: Launcher = registry.find("launchers", read_origin(files).launcher)()
    before = {run_id: ended_attempts(found) for run_id, found in alive.items()}
    for run_id, found in alive.items():
        on_wait(f"no orchestrator lives; stopping {run_id}, {holder(found.lock)}")
        launcher.adopt(run_id, found.directory)
        launcher.cancel(run_id, now=now)
    left = set(alive)
    while left:
        left -= {ended.run_id for ended in launcher.poll(PAUSE_S)}
    for run_id, found in alive.items():
        conclude(found, hashes[run_id], None, RunState.INTERRUPTED, before[run_id])
    if manifest is not None and alive:
        write_manifest(files.manifest, refresh(manifest, files, ended=True))
    return tuple(alive)
