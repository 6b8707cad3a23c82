"""Plans a campaign anew from its own file, as it continues or grows, and writes the run.toml of each run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tomli_w

from retrain.campaign.assign import as_launched
from retrain.campaign.orchestrate import CampaignRun
from retrain.campaign.recorded import reconcile
from retrain.config.digest import is_as_written
from retrain.config.load import load_config
from retrain.config.resolve import as_tables
from retrain.errors import ConfigError
from retrain.plan.matrix import Plan, RunPlan, plan_runs
from retrain.plan.provenance import Provenance, known_origin, working_directories
from retrain.records.files import make_directory, read_small, write_atomic
from retrain.records.layout import CampaignFiles, RunFiles, recorded_tables
from retrain.records.rungs import all_of, append_proposals, read_proposals

WRITERS = 16  # syncs overlap: 2,000 runs in a second instead of half a minute


def planned_anew(files: CampaignFiles, origin: Provenance) -> tuple[Plan, Path]:
    """Return the plan of a campaign's file from the first directory where all its paths exist."""
    problem: ConfigError | None = None
    proposed = all_of(read_proposals(files.proposals))
    for where in working_directories(files, origin):
        if str(where) not in sys.path:
            sys.path.append(str(where))  # a plugin's dotted path may name a file there
        with contextlib.chdir(where):  # relative paths start there
            try:
                config = load_config(
                    files.campaign_toml,
                    origin.overrides,
                    version=origin.version,
                    beside=Path(origin.beside),
                    project=where,
                    proposed=proposed,
                )
                return plan_runs(config, origin.name, origin.seed, origin.added_seeds, len(proposed)), where
            except ConfigError as error:
                problem = problem or error
    raise problem or ConfigError(f"{files.directory}: the directory that its paths are relative to is gone")


def add_proposals(
    campaign: CampaignRun, told: Mapping[str, float | None], notice: Callable[[str], None]
) -> None:
    """Store what the sampler of a campaign's search proposes next, and enlarge the plan by its runs.

    `told` are the values of conditions from which it goes on.
    """
    from retrain.plan.proposals import propose  # not at the top: few campaigns have a sampler

    files, table = CampaignFiles(campaign.directory.absolute()), campaign.plan.campaign.search
    if table is None:
        return
    found = propose(campaign.plan, table, read_proposals(files.proposals), told, notice)
    append_proposals(files.proposals, found)
    if not found.proposals:
        notice(f"{table.sampler} proposes nothing else, so the search goes on with what it proposed so far")
        return
    origin, _ = known_origin(files)
    plan = as_launched(planned_anew(files, origin)[0], str(files.campaign_toml))
    campaign.plan = reconcile(plan, files, campaign.files_of, origin).plan
    write_what_differs(campaign, origin, notice)


def write_what_differs(campaign: CampaignRun, origin: Provenance, notice: Callable[[str], None]) -> None:
    """Write every run.toml that differs from its plan, so that no worker uses it."""

    def write(files: RunFiles, text: str) -> None:
        if files.directory != campaign.directory:
            make_directory(files.directory)
        write_atomic(files.run_toml, text)

    with ThreadPoolExecutor(WRITERS) as writers:
        writing = []
        for run in campaign.plan.runs:
            files, text = campaign.files_of(run.run_id), _text(run, campaign.directory.name, origin)
            old = read_small(files.run_toml) or b""
            if old == text.encode():
                continue
            writing.append(writers.submit(write, files, text))
            if old and not is_as_written(recorded_tables(files)):
                notice(f"{files.run_toml}: was changed or damaged; rewritten from campaign.toml")
        for one in writing:
            one.result()


def _text(run: RunPlan, campaign: str, origin: Provenance) -> str:
    """Return a run's resolved configuration, from which alone it can be repeated."""
    tables = as_tables(run.config)
    # copied and shared, so without the launcher's options
    known = {key: value for key, value in vars(origin).items() if value is not None and key != "options"}
    tables["run"] = {**tables["run"], "campaign": campaign, "origin": known}
    return tomli_w.dumps(tables)
