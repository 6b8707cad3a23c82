"""A campaign's runs without its manifest: those of its file, in that order.

The first condition is what comparisons refer to, so that their order must not hang on the names of
directories. Reads files only, and runs nobody's code.
"""

from __future__ import annotations

from retrain.errors import ConfigError, RecordsError
from retrain.plan.matrix import planned_runs
from retrain.plan.provenance import known_origin
from retrain.records.layout import CampaignFiles, RunFiles, is_single_run
from retrain.records.manifest import RunEntry, entry_from_name
from retrain.records.run_toml import files_of_runs, recorded_tables


def entries_without_manifest(files: CampaignFiles) -> tuple[RunEntry, ...]:
    """List a campaign's runs as its file plans them; then those that only have a directory.

    Raises:
        RecordsError: their directories cannot be listed.
    """
    if is_single_run(files.directory):
        return (_alone(files),)
    there = files_of_runs(files)
    planned = {entry.run_id: entry for entry in _planned(files)}
    return (*planned.values(), *(entry_from_name(name) for name in there if name not in planned))


def _planned(files: CampaignFiles) -> tuple[RunEntry, ...]:
    from retrain.config.load import load_types  # imports pydantic, and a manifest is seldom lost

    origin, _ = known_origin(files)
    try:
        config = load_types(files.campaign_toml, origin.overrides)
    except (ConfigError, RecordsError):
        return ()
    runs = planned_runs(config, origin.seed)
    return tuple(RunEntry(run.run_id, run.condition, run.seed, run.max_steps) for run in runs)


def _alone(files: CampaignFiles) -> RunEntry:
    """Describe a single run by its run.toml, or by the name of its directory if that cannot be read."""
    tables = recorded_tables(RunFiles(files.directory))
    run, training = tables.get("run"), tables.get("training")
    if not isinstance(run, dict) or not isinstance(training, dict):
        return entry_from_name(files.directory.resolve().name)
    seed, steps = training.get("seed"), training.get("max_steps")
    return RunEntry(
        run_id=str(run.get("run_id", files.directory.resolve().name)),
        condition=str(run.get("condition", "")),
        seed=seed if isinstance(seed, int) else -1,
        max_steps=steps if isinstance(steps, int) else 0,
    )
