"""The run.toml of each run: how it is written, and how the campaign's file differs from it on a resume.

A run.toml is the run's resolved configuration, from which alone it can be repeated. A campaign continues as
it began. The user must accept whatever would change results; how runs are launched (workers, retries,
timeouts) may change freely. A run.toml whose digest does not fit its configuration was changed by hand and is
not trusted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tomli_w

from retrain.base.errors import ConfigError
from retrain.base.locks import is_held
from retrain.config.digest import decides, digest, is_as_written, laid_over
from retrain.config.files import KEY as ADAPTER
from retrain.config.files import changed_files, contents_of
from retrain.config.keys import Tables, as_meant, table_at
from retrain.config.load import load_config
from retrain.config.resolve import as_tables, flatten
from retrain.config.schema import RunSection, SourceSection, TeacherSection
from retrain.plan.build import plan_runs
from retrain.plan.matrix import Origin, Plan, RunPlan
from retrain.records.decision import ADDED, known_looks
from retrain.records.files import make_directory, read_small, remove_leftovers, write_atomic
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs, recorded_hash, recorded_tables
from retrain.records.manifest import Manifest
from retrain.records.provenance import Provenance, working_directories
from retrain.records.provenance import digest as digest_of_file
from retrain.records.rungs import all_of, read_proposals
from retrain.records.text import as_typed, first_of, plain

SHOWN_RUNS = 3  # named in a line of a diff

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

    # copied and shared, so without the launcher's options
    shared = {key: value for key, value in vars(origin).items() if value is not None and key != "options"}
    with ThreadPoolExecutor(WRITERS) as writers:
        writing = []
        for run in plan.runs:
            files, text = campaign.run(run.run_id), _text_of(run, campaign.directory.name, shared)
            before = read_small(files.run_toml) or b""
            if before == text.encode():
                continue
            if before and not is_as_written(recorded_tables(files)):  # before it is written
                notice(f"{files.run_toml}: was changed or damaged; rewritten from campaign.toml")
            writing.append(writers.submit(write, files, text))
        for future in writing:
            future.result()


def _text_of(run: RunPlan, campaign: str, origin: Tables) -> str:
    """Return a run's resolved configuration, from which alone it can be repeated."""
    tables = as_tables(run.config)
    tables["run"] |= {"campaign": campaign, "origin": origin}
    return tomli_w.dumps(tables)


@dataclass(frozen=True)
class Reconciled:
    """A plan as its campaign continues."""

    plan: Plan
    changes: tuple[str, ...]  # what would make results differ, one line each
    renamed: Mapping[str, str]  # run id -> its former hash, of runs that are the same under another


def plan_anew(files: CampaignFiles, origin: Provenance) -> tuple[Plan, Path]:
    """Return the plan of a campaign's file, from the first directory where all its paths exist, and that."""
    problem: ConfigError | None = None
    proposed, file = all_of(read_proposals(files.proposals)), files.campaign_toml.absolute()
    for where in working_directories(files, origin):
        if str(where) not in sys.path:
            sys.path.append(str(where))  # a plugin's dotted path may name a file there
        with chdir(where):  # relative paths start there
            try:
                config = load_config(
                    file,
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


def reconcile(
    plan: Plan,
    files: CampaignFiles,
    origin: Provenance,
    manifest: Manifest | None,
    *,
    accept_changes: bool = False,
) -> Reconciled:
    """Compare what a campaign's file asks for now with how the campaign began.

    Args:
        plan: of the file as it is now.
        files: the campaign's.
        origin: as it began.
        manifest: None if it is lost.
        accept_changes: whether the user accepts that results would differ.

    Raises:
        ConfigError: results would differ, and the user does not accept that, or runs are alive.
    """
    is_same_file = digest_of_file(read_small(files.campaign_toml) or b"") == origin.digest
    looks = known_looks(files.looks, manifest.decision if manifest else None)
    recorded = _recorded(plan, files, manifest, is_same_file)
    redesigned = tuple(looks.differs(plan.design))
    if not redesigned and manifest and manifest.decision is None and manifest.searched is None:
        decides = plan.decision is not None and plan.campaign.search is None
        if decides and any(files.run(run.run_id).attempts.exists() for run in manifest.runs):
            redesigned = (ADDED,)  # `[decision]`, to a campaign of which runs had begun
    may_be_new = {run.run_id for run in plan.runs if redesigned or run.origin is not Origin.GIVEN}
    if manifest and manifest.decision and not looks.was_begun:  # `[decision]` may add other seeds than before
        first = plan.planned_seeds[: len(plan.search_seeds) + plan.first_seeds]
        begun = {run.condition for run in plan.runs if run.run_id in recorded}
        may_be_new |= {run.run_id for run in plan.runs if run.condition in begun and run.seed not in first}
    if plan.decision or plan.added_seeds:  # the manifest has only those that were needed so far
        others = {run.run_id: run.config_hash for run in plan.runs if run.run_id not in recorded}
        hashes = {run_id: recorded_hash(files.run(run_id)) for run_id in others}
        recorded |= {
            run_id: hashes[run_id] or planned
            for run_id, planned in others.items()
            if hashes[run_id] or run_id in may_be_new
        }
    reconciled = _compare(plan, recorded, files, is_same_file=is_same_file)
    reconciled = replace(reconciled, changes=(*redesigned, *reconciled.changes))
    if not reconciled.changes:
        return reconciled
    if alive := [run_id for run_id in recorded if is_held(files.run(run_id).lock)]:
        raise ConfigError(
            f"{files.campaign_toml}: changed while {first_of(alive)} still run as it was before; "
            f"undo the change, or end them first with `retrain stop {as_typed(files.directory)}`"
        )
    if not accept_changes:
        raise ConfigError(
            [
                f"{files.campaign_toml}: results would differ from how this campaign began:",
                *(f"  {change}" for change in reconciled.changes),
                "undo the change, start a new campaign with it, or resume with --accept-config-change",
            ]
        )
    return reconciled


def _recorded(
    plan: Plan, files: CampaignFiles, manifest: Manifest | None, is_same_file: bool
) -> dict[str, str]:
    """Return the hash that each run began with, by the manifest, or by the runs if that is gone."""
    if manifest is not None:
        return {run.run_id: run.config_hash for run in manifest.runs}
    planned = {run.run_id for run in plan.runs}
    hashes = {
        run_id: recorded_hash(run)
        for run_id, run in files_of_runs(files).items()
        if run_id in planned or plan.decision is None or run.attempts.exists()  # others were never needed
    }
    recorded = {run_id: config_hash for run_id, config_hash in hashes.items() if config_hash}
    if is_same_file:  # killed before all runs were made
        return {run.run_id: run.config_hash for run in plan.runs} | recorded
    return recorded


def _compare(
    plan: Plan, recorded: Mapping[str, str], campaign: CampaignFiles, *, is_same_file: bool
) -> Reconciled:
    """Compare a plan with the hash that each run began with, or with what it means in this version."""
    planned = {run.run_id for run in plan.runs}
    lines = [f"run {run.run_id}: is new" for run in plan.runs if run.run_id not in recorded]
    lines += [f"run {run_id}: is gone" for run_id in recorded if run_id not in planned]
    changes: dict[str, list[str]] = {}
    runs, renamed = [], {}
    for run in plan.runs:
        before = recorded.get(run.run_id, run.config_hash)
        if before == run.config_hash:
            runs.append(run)
            continue
        files = campaign.run(run.run_id)
        same = _as_begun(run, before, files, is_same_file)
        runs.append(same or run)
        if same is None:
            for change in _differences(recorded_tables(files), run):
                changes.setdefault(change, []).append(run.run_id)
        elif before != same.config_hash:
            renamed[run.run_id] = before
    lines += [f"{change} ({first_of(run_ids, SHOWN_RUNS)})" for change, run_ids in changes.items()]
    return Reconciled(replace(plan, runs=tuple(runs)), tuple(lines), renamed)


def _as_begun(run: RunPlan, before: str, files: RunFiles, is_same_file: bool) -> RunPlan | None:
    """Return the run as it continues with the same results; None if they would differ."""
    tables, now = recorded_tables(files), recorded_hash(files)
    if is_same_file:
        run = _with_teachers(run, tables)
    if run.config_hash == before:
        return run
    is_intact = is_as_written(tables)
    if is_intact and now == run.config_hash:  # killed between writing that and the manifest
        return run
    if is_intact and now == before:
        adapter, identity = tables["run"].get("files", {}).get(ADAPTER), run.config.run
        if adapter is not None and identity is not None and any(files.checkpoints.glob("step-*")):
            # it has a checkpoint, and needs no more what it started from
            identity = replace(identity, files={**identity.files, ADAPTER: adapter})
            run = replace(run, config=replace(run.config, run=identity))
    else:
        return run if is_same_file and not before else None  # nothing to compare with
    identity = run.config.run or RunSection()
    try:  # what its run.toml means in this version
        written, begun = (laid_over(read, run.config, identity.files) for read in (tables, as_meant(tables)))
    except TypeError:  # a key that this version has no more
        return None
    if digest(written, identity.files) != before:  # the content of its files has changed
        return None
    config_hash = digest(begun, identity.files)
    if config_hash == run.config_hash:
        return run
    named = replace(begun, run=replace(identity, config_hash=config_hash))
    return replace(run, config=named, config_hash=config_hash) if is_same_file else None


def _with_teachers(run: RunPlan, recorded: Tables) -> RunPlan:
    """Return a run with the teachers that it began with: a name may since mean a newer campaign."""
    config = run.config

    def begun(section: TeacherSection | SourceSection, table: Any) -> Any:
        name = table.get("teacher") if isinstance(table, dict) else None
        return replace(section, teacher=name) if isinstance(name, str) and Path(name).is_dir() else section

    sources = table_at(recorded, "data").get("source")
    if isinstance(sources, list) and len(sources) == len(config.data.source):
        pairs = zip(config.data.source, sources, strict=True)
        config = replace(config, data=replace(config.data, source=[begun(*pair) for pair in pairs]))
    config = replace(config, teacher=begun(config.teacher, table_at(recorded, "teacher")))
    if config.run is None or config == run.config:
        return run
    contents = contents_of(config)
    config_hash = digest(config, contents)
    identity = RunSection(**vars(config.run) | {"files": contents, "config_hash": config_hash})
    return replace(run, config=replace(config, run=identity), config_hash=config_hash)


def _differences(before: Tables, run: RunPlan) -> Iterator[str]:
    if not before or not is_as_written(before):
        yield "its first configuration is unknown, because its run.toml is damaged or gone"
        return
    old = _deciding(as_meant(before))
    new = _deciding(as_tables(run.config))
    contents, named = before["run"].get("files", {}), run.config.run
    is_moved = {
        key for key in contents if named and key in named.files and _name(old, key) == _name(new, key)
    }
    changed = [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in is_moved
    ]
    changed += (problem.in_table for problem in changed_files(run.config, contents))
    yield from changed or ["its configuration differs"]


def _deciding(tables: Tables) -> Tables:
    return {key: value for key, value in flatten(tables) if decides(*key.split(".")[:2])}


def _name(tables: Tables, key: str) -> str:
    return Path(str(tables.get(key))).name


def _shown(tables: Tables, key: str) -> str:
    return plain(repr(tables[key]), 80) if key in tables else "(absent)"
