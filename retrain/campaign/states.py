"""States that runs have saved at an API: which are needed, and their removal.

A backend that saves states elsewhere lists them in the run's states.jsonl as it saves them. A state is needed
while a run that is not done may continue from it, that is while a checkpoint of a run or of a warm-up that
runs share names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from retrain.backends import plugin_of
from retrain.base.errors import LaunchError
from retrain.base.locks import hold, is_held
from retrain.config.schema import Config
from retrain.records.files import read_small
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs, open_campaign, recorded_hash
from retrain.records.run_state import RunState, inspect_run
from retrain.records.spending import note_deleted, saved_states
from retrain.records.text import as_typed
from retrain.trainer.worker import read_run


@dataclass(frozen=True)
class RunStates:
    """The states of one run at its API."""

    run_id: str
    state: str  # of the run
    paths: tuple[str, ...]  # the oldest first
    needed: tuple[str, ...]  # of them, to continue the run


def states_of(directory: Path) -> tuple[RunStates, ...]:
    """Return the states of each run of a campaign."""
    campaign = open_campaign(directory)
    runs = files_of_runs(campaign)
    named = _named(campaign, runs.values())
    return tuple(_of_run(run_id, files, named) for run_id, files in runs.items())


def delete_states(directory: Path, *, all_of_them: bool = False) -> Mapping[str, str]:
    """Delete the states that no run needs, or all; return each one's problem, "" if it is deleted.

    Raises:
        LaunchError: the campaign runs.
        ConfigError: a run's backend cannot delete states.
    """
    campaign = open_campaign(directory)
    runs = files_of_runs(campaign)
    lock = None if any(is_held(run.lock) for run in runs.values()) else hold(campaign.lock)
    if lock is None:
        stop = f"`retrain stop {as_typed(directory)}`"
        raise LaunchError(f"{directory}: is running; wait for its end, or end it with {stop}")
    with lock:  # a resume would save states meanwhile, and need others
        problems: dict[str, str] = {}
        chosen, named = {}, _named(campaign, runs.values())
        for run_id, files in runs.items():
            states = _of_run(run_id, files, named)
            chosen[run_id] = [path for path in states.paths if all_of_them or path not in states.needed]
        servers: dict[tuple[str, str], tuple[Config, list[str]]] = {}  # asked together: one may not answer
        for run_id, paths in chosen.items():
            if paths:
                config = read_run(runs[run_id])
                server = config.backend.backend, config.model.base_url
                servers.setdefault(server, (config, []))[1].extend(paths)
        for config, paths in servers.values():
            problems |= plugin_of(config.backend.backend).delete_states(config, paths)
        for run_id, paths in chosen.items():
            note_deleted(runs[run_id], [path for path in paths if not problems[path]])
        return problems


def _named(campaign: CampaignFiles, runs: Iterable[RunFiles]) -> bytes:
    """Return what names the needed states: one that a run saved may be another run's start."""
    left = [files for files in runs if inspect_run(files, recorded_hash(files)).state != RunState.DONE]
    folders = [*(files.checkpoints for files in left), *([campaign.warm_ups] if left else ())]
    return b"\n".join(read_small(path) or b"" for folder in folders for path in folder.rglob("*.json"))


def _of_run(run_id: str, files: RunFiles, named: bytes) -> RunStates:
    paths, state = saved_states(files), inspect_run(files, recorded_hash(files)).state
    needed = tuple(path for path in paths if f'"{path}"'.encode() in named)
    return RunStates(run_id, str(state), paths, needed)
