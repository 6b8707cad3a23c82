"""`retrain doctor`: what is missing on this machine, or for a file: packages, keys, GPUs, disk and locks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import metadata
from itertools import chain
from pathlib import Path

import typer
from typer import Argument, Option

from retrain.backends import plugin_of
from retrain.base import registry
from retrain.base.distribution import requirements
from retrain.base.errors import EXIT_CONFIG, ConfigError, InfrastructureError, RetrainError, place
from retrain.base.extras import Needs, needs
from retrain.base.redaction import redacted
from retrain.campaign.admission import free_memory
from retrain.campaign.launcher_setup import checked_plan
from retrain.cli import AsJson
from retrain.config.keys import Tables
from retrain.config.load import load_config
from retrain.config.resolve import PLUGINS
from retrain.config.schema import Config, LoggingSection
from retrain.config.toml_files import naming_bases
from retrain.control.machine.nvidia import gpus
from retrain.control.semaphore import lock_sharing_problem
from retrain.plan.build import plan_runs
from retrain.plan.preflight import memory_of, sandboxes_of, servers_of
from retrain.plugins.tasks import Task
from retrain.records.mirror import Place, answering
from retrain.records.text import gib, plain

ENOUGH_DISK_BYTES = 5 << 30  # a checkpoint of a small model with its optimizer, twice
LITTLE_DISK_BYTES = 100 << 20  # records of a campaign without a model's checkpoints
OF_COMMANDS = (  # extras that no plugin needs
    Needs("report", ("jinja2", "vl_convert")),
    Needs("board", ("starlette", "uvicorn", "vl_convert")),
    Needs("hub", ("huggingface_hub",)),  # publish --push
    Needs("mirror", ("fsspec", "s3fs")),  # a copy in a bucket
    Needs("optuna", ("optuna", "cmaes")),  # searches with a sampler
    Needs("gpu", ("pynvml",)),  # the load of GPUs
)
STYLES = {"ok": "green", "absent": "dim", "warning": "yellow", "missing": "bold red"}


class Health(StrEnum):
    """What a check found."""

    OK = "ok"
    ABSENT = "absent"  # missing, and not needed by the file
    WARNING = "warning"  # works, with a risk
    MISSING = "missing"  # missing, and needed


@dataclass(frozen=True, slots=True)
class Check:
    """One check, what it found and how to fix it."""

    what: str
    state: Health
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """A plugin that a file names, with its parameters."""

    kind: str
    name: str
    params: Tables
    needs: Needs

    @property
    def keys(self) -> tuple[str, ...]:
        """The variables that hold its key, as named by its table if it names one."""
        if self.needs.keys and "key_env" in self.params:
            return (self.params["key_env"],) if self.params["key_env"] else ()
        return self.needs.keys


def command(
    file: Path | None = Argument(None, metavar="FILE.toml", help="Also check what this file needs."),
    probe: bool = Option(False, "--probe", help="Ask its Tinker server how it behaves, for some 400 tokens."),
    as_json: AsJson = False,
) -> None:
    """Check what is installed here and how to install what is missing; with a file, what that file needs.

    Exits with code 2 if something is missing. Keys are checked for, never shown.

    Example: retrain doctor campaign.toml
    """
    from rich.text import Text

    from retrain.cli.render.tables import print_result, print_wrapped

    configs: list[Config] = []
    if file is not None:  # missing plugins are what is checked here
        config = load_config(file, try_plugins=False)
        with naming_bases(file):
            of_conditions = {run.condition: run.config for run in plan_runs(config, file.name).runs}
        configs = [replace(each, campaign=config.campaign) for each in of_conditions.values()]
    every = (
        *_package_checks(configs),
        *_machine_checks(configs),
        *_backend_checks(configs, asks=probe),
        *_copy_checks(configs),
    )
    checks = list(dict.fromkeys(every))  # conditions that lack the same
    if file is not None and all(check.state is not Health.MISSING for check in checks):
        try:  # the checks of `explain`, which build the file's parts: nothing may be missing for them
            with naming_bases(file):
                checked_plan(load_config(file), file.name)
        except ConfigError as error:
            fix = f"correct it; see also: retrain explain {file}"
            checks += [Check(file.name, Health.MISSING, problem, fix) for problem in error.problems]
        else:
            usable = "its tasks, prompts, rewards and environments can be used"
            checks.append(Check(file.name, Health.OK, usable))
    if as_json:
        print_result(checks, "checks")
    else:
        cells = [(c.what, Text(c.state, STYLES[c.state]), c.found, c.fix) for c in checks]
        print_wrapped("", ("check", "state", "found", "fix"), cells)
    if any(check.state is Health.MISSING for check in checks):
        raise typer.Exit(EXIT_CONFIG)


def _present(what: str, value: str, lacking: str, fix: str, *, is_needed: bool) -> Check:
    """Return the check of a thing that is there unless something is `lacking`."""
    if not lacking:
        return Check(what, Health.OK, value)
    return Check(what, Health.MISSING if is_needed else Health.ABSENT, lacking, fix)


def _used_plugins(config: Config) -> Iterator[Used]:
    """Iterate over the plugins that a run names; the parts of a weighted reward too."""
    for name in config.logging.loggers:
        yield from _with_parts("loggers", name, config.logging.logger_params.get(name, {}))
    if config.campaign is not None:
        yield from _with_parts("launchers", config.campaign.launcher, {})
    for section, key in PLUGINS:
        table = getattr(config, section)
        yield from _with_parts(key.plugin, getattr(table, key.name), getattr(table, key.params))


def _with_parts(kind: str, name: str, params: Tables) -> Iterator[Used]:
    yield Used(kind, name, params, needs(kind, name))
    parts = registry.ask("rewards", name, "made_of", params) if kind == "rewards" else None
    for part in parts or ():
        yield from _with_parts("rewards", *part)


def _package_checks(configs: Sequence[Config]) -> Iterator[Check]:
    """Check Python, then for packages, keys and programs: those that a file needs, or without a file all."""
    yield Check("python", Health.OK, f"{sys.version.split()[0]} at {sys.executable}")
    for requirement in requirements():
        name, version = requirement.split(";")[0].rstrip("0123456789.,<>=!~ "), ""
        with suppress(metadata.PackageNotFoundError):
            version = metadata.version(name)
        lacking = "" if version else "not installed"
        yield _present(name, version, lacking, f"pip install {name!r}", is_needed=True)
    used = list({repr(plugin): plugin for config in configs for plugin in _used_plugins(config)}.values())
    of_plugins = {(each.kind, each.name): each.needs for each in used}
    if not used:
        every = ((kind, name) for kind in registry.KINDS for name in registry.names(kind))
        of_plugins = {plugin: needs(*plugin) for plugin in every}
    every_need = [*of_plugins.values()] if used else [*OF_COMMANDS, *of_plugins.values()]
    for extra in dict.fromkeys(each.extra for each in every_need if each.packages):
        of_extra = [each for each in every_need if each.extra == extra and each.packages]
        users = ", ".join(dict.fromkeys(each.name for each in used if each.needs in of_extra))
        packages = ", ".join(dict.fromkeys(chain.from_iterable(each.packages for each in of_extra)))
        missing = ", ".join(dict.fromkeys(chain.from_iterable(map(Needs.missing, of_extra))))
        what = f"extra {extra}" if extra else "packages"  # that a user's own plugin needs
        what += f" for {users}" if users else ""
        fix = of_extra[0].command or "install them in retrain's environment"
        lacking = f"{missing} not found" if missing else ""
        yield _present(what, packages, lacking, fix, is_needed=bool(users))
    users_of_keys = {each.keys: each.name for each in used} or {each.keys: "" for each in every_need}
    users_of_keys.pop((), None)  # no key is needed
    for names, user in users_of_keys.items():
        what = f"key {' or '.join(names)}" + (f" for {user}" if user else "")
        lacking = "" if Needs(keys=names).has_key() else "not set"
        yield _present(what, "set", lacking, f"export {names[0]}=...", is_needed=bool(user))
    for name, needed in {name: needed for (_, name), needed in of_plugins.items() if needed.commands}.items():
        what, command = f"commands of {name}", [needed.commands[0], "--version"]
        if missing_commands := needed.missing_commands():
            fix = f"use a machine that has them, or load the environment module with {missing_commands[0]}"
            lacking = f"{', '.join(missing_commands)} not found"
            yield _present(what, "", lacking, fix, is_needed=bool(used))
            continue
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            yield Check(what, Health.WARNING, plain(str(error), 200), f"try {' '.join(command)}")
            continue
        version = (answer.stdout.strip() or answer.stderr.strip() or "no version").splitlines()[-1]
        version = plain(version, 200)
        if answer.returncode:
            yield Check(what, Health.WARNING, version, "installed, but without a cluster: set SLURM_CONF")
        else:
            yield Check(what, Health.OK, f"{version}: {', '.join(needed.commands)}")


def _machine_checks(configs: Sequence[Config]) -> Iterator[Check]:
    """Check GPUs, sandboxes, the disk and the locks."""
    try:
        names = ", ".join(f"{gpu.name} {gib(gpu.memory_total_bytes)}" for gpu in gpus())
        yield _present("gpu", names, "" if names else "none", "", is_needed=False)
    except InfrastructureError as error:
        yield Check("gpu", Health.WARNING, "found, but cannot be read", str(error))
    try:  # where programs run; without a file that needs it, where they would
        used = sandboxes_of(configs)
        sandboxes = used or {(best := registry.find_plugin("sandbox", "auto")()).name: best.weakness}
        state, fix = Health.OK, ""
        if any(sandboxes.values()):
            state = Health.WARNING if used else Health.OK
            fix = "install bubblewrap, where the kernel lets you create user namespaces"
        yield Check("sandbox", state, ", ".join(sandboxes), fix)
    except ConfigError as error:
        yield Check("sandbox", Health.MISSING, "cannot be used here", str(error))
    logs = [config.logging.log_dir for config in configs] or [LoggingSection.log_dir]
    for log_dir in dict.fromkeys(map(Path, logs)):
        path = next(path for path in (log_dir.absolute(), *log_dir.absolute().parents) if path.exists())
        free = shutil.disk_usage(path).free
        state, room, fix = Health.OK, f"{gib(free)} free", ""
        if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
            why = "cannot be written by this user" if path.is_dir() else "is not a directory"
            state, room = Health.MISSING, f"{path} {why}"
            fix = "set logging.log_dir to another directory"
        elif free < LITTLE_DISK_BYTES:
            state, fix = Health.MISSING, "free some space, or set logging.log_dir to another disk"
        elif free < ENOUGH_DISK_BYTES:
            state, fix = Health.WARNING, "checkpoints of a model may not fit"
        yield Check(f"disk for {log_dir}", state, room, fix)
    shared = [config.backend.throttle_dir for config in configs if config.backend.throttle_dir]
    for directory in dict.fromkeys([*logs, *shared]):
        what, problem = f"locks in {directory}", lock_sharing_problem(directory)
        if problem:
            fix = "use a local directory for one machine; see backend.throttle_dir and logging.log_dir"
            yield Check(what, Health.WARNING, problem, fix)
        else:
            yield Check(what, Health.OK, "shared by all processes of this machine")


def _backend_checks(configs: Sequence[Config], *, asks: bool) -> Iterator[Check]:
    """Check that backends accept the runs, that memory is free, and how the servers named answer."""
    asked = {(one.backend.backend, one.model.base_url, one.model.model): one for one in configs}
    for config in asked.values():  # each server once
        try:
            for one in plugin_of(config.backend.backend).server_findings(config, asks=asks):
                yield Check(one.what, Health.OK if one.is_right else Health.WARNING, one.found, one.then)
        except (ConfigError, InfrastructureError) as error:
            yield Check("the server's probe", Health.MISSING, "failed", str(error))
    for config in configs:
        problems = registry.problems_of(
            "backends", config.backend.backend, "check", config, Task((), (), "", 0)
        )
        parts = needs("backends", config.backend.backend)
        lacks_parts = bool(parts.missing()) or not parts.has_key()  # which have checks of their own
        for problem in problems:
            if lacks_parts and problem.where == ("backend", "backend"):
                continue
            named = place(problem.where) if problem.where else f"backend {config.backend.backend}"
            yield Check(named, Health.MISSING, *problem.what.rsplit("; ", 1))
        if not problems and (memory := memory_of(config)) is not None:
            free, what = free_memory(memory.device), f"memory for {memory.device}"
            if free is None:
                needed = f"about {gib(memory.peak)} needed"
                yield Check(what, Health.WARNING, needed, "see the check of the GPU")
                continue
            needed = f"about {gib(memory.peak)} of {gib(free)} free: {memory.parts()}"
            if memory.peak <= free:
                yield Check(what, Health.OK, needed)
            else:
                state = Health.WARNING if memory.smallest <= free else Health.MISSING
                yield Check(what, state, needed, memory.remedy())
    for server in servers_of(configs):
        fix = f"start it or correct {server.key}; other machines may still reach it"
        yield _present(f"server {server.address}", "answers", server.silence, fix, is_needed=True)


def _copy_checks(configs: Sequence[Config]) -> Iterator[Check]:
    """Check that the places to which campaigns are copied answer, and hold no other campaign."""
    for url in dict.fromkeys(config.logging.mirror for config in configs if config.logging.mirror):
        what = f"copy {redacted(url)}"
        try:
            copy = Place(url)
            with answering(url):
                copy.check()
                index = copy.newest()
        except RetrainError as error:
            yield Check(what, Health.MISSING, "cannot be used", str(error))
            continue
        if index is None:
            yield Check(what, Health.OK, "answers, and is empty")
        else:
            fix = "resume that, or choose another prefix"
            yield Check(what, Health.WARNING, f"holds the campaign {index.campaign}", fix)
