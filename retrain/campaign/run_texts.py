"""The run.toml of each run: its resolved configuration, from which alone it can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import tomli_w

from retrain.config.digest import is_as_written
from retrain.config.keys import Tables
from retrain.config.resolve import as_tables
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.files import make_directory, read_small, remove_leftovers, write_atomic
from retrain.records.layout import CampaignFiles, RunFiles, recorded_tables
from retrain.records.provenance import Provenance

WRITERS = 16  # syncs overlap: 2,000 runs in a second instead of half a minute


def write_runs(
    plan: Plan, campaign: CampaignFiles, origin: Provenance, notice: Callable[[str], None]
) -> None:
    """Write every run.toml that differs from its plan, so that no worker uses it."""

    def write(files: RunFiles, text: str) -> None:
        if files.directory != campaign.directory:
            make_directory(files.directory)
        remove_leftovers(files.directory, files.run_toml.name)  # of an orchestrator that was killed
        write_atomic(files.run_toml, text)

    texts = RunTexts(campaign.directory.name, origin)
    with ThreadPoolExecutor(WRITERS) as writers:
        writing = []
        for run in plan.runs:
            files, text = campaign.run(run.run_id), texts.of(run)
            before = read_small(files.run_toml) or b""
            if before == text.encode():
                continue
            if before and not is_as_written(recorded_tables(files)):  # before it is written
                notice(f"{files.run_toml}: was changed or damaged; rewritten from campaign.toml")
            writing.append(writers.submit(write, files, text))
        for future in writing:
            future.result()


class RunTexts:
    """Renders the run.toml of each run; of those that differ in their seed only, one as a whole."""

    def __init__(self, campaign: str, origin: Provenance) -> None:
        # copied and shared, so without the launcher's options
        shared = {key: value for key, value in vars(origin).items() if value is not None and key != "options"}
        self._run = {"campaign": campaign, "origin": shared}
        self._rendered: dict[str, tuple[Tables, tuple[str, ...]]] = {}  # by condition: around three values

    def of(self, run: RunPlan) -> str:
        """Return a run's resolved configuration, from which alone it can be repeated."""
        shared, (first, around) = _but_for_seed(run), self._rendered.get(run.condition, ({}, ()))
        if shared != first:
            around = self._around(run)
            self._rendered[run.condition] = shared, around
        seed, run_id, config_hash = _lines(run)
        return f"{around[0]}{seed}{around[1]}{run_id}{around[2]}{config_hash}{around[3]}"

    def _around(self, run: RunPlan) -> tuple[str, ...]:
        """Return the text before, between and after the lines in which runs of a condition differ."""
        tables = as_tables(run.config)
        tables["run"] = {**tables["run"], **self._run}
        rest, around = tomli_w.dumps(tables), list[str]()
        for table, line in zip(("[training]\n", "[run]\n", ""), _lines(run), strict=True):
            before, _, rest = rest.partition(f"\n{table}{line}")
            around.append(f"{before}\n{table}")
        return (*around, rest)


def _lines(run: RunPlan) -> tuple[str, str, str]:
    """Return the lines of a run.toml in which runs of a condition differ."""
    return f"seed = {run.seed}\n", f'run_id = "{run.run_id}"\n', f'config_hash = "{run.config_hash}"\n'


def _but_for_seed(run: RunPlan) -> Tables:
    """Return what a run's configuration has in common with those of other seeds."""
    training = vars(run.config.training) | {"seed": None}
    identity = run.config.run and vars(run.config.run) | {"run_id": "", "config_hash": ""}
    return vars(run.config) | {"training": training, "run": identity}
