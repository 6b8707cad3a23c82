"""The checks of `retrain doctor`: Python, extras, keys, GPUs, disk and locks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.config.resolve import PLUGINS
from retrain.config.schema import Config, Logging
from retrain.distribution import requirements
from retrain.errors import ConfigError, InfrastructureError
from retrain.extras import Needs, needs
from retrain.plan.preflight import sandboxes_of, servers_of
from retrain.records.text import plain
from retrain.semaphore import lock_sharing_problem
from retrain.system.nvidia import gpus

ENOUGH_DISK_BYTES = 5 << 30  # a checkpoint of a small model with its optimizer, twice
LITTLE_DISK_BYTES = 100 << 20  # records of a campaign without a model's checkpoints
GIB = 1 << 30
OF_COMMANDS = (  # extras that no plugin needs
    Needs("report", ("scipy", "vl_convert")),  # compare, report
    Needs("gpu", ("pynvml",)),  # the load of GPUs
)


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
    verdict: Health
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Used:
    """A plugin that a file names, with its parameters."""

    kind: str
    name: str
    params: Mapping[str, Any]
    needs: Needs

    @property
    def keys(self) -> tuple[str, ...]:
        """The variables that hold its key, as named by its table if it names one."""
        if self.needs.keys and "key_env" in self.params:
            return (self.params["key_env"],) if self.params["key_env"] else ()
        return self.needs.keys


def core_checks() -> Iterator[Check]:
    """Check Python and the packages that retrain depends on."""
    yield Check("python", Health.OK, f"{sys.version.split()[0]} at {sys.executable}")
    for requirement in requirements():
        name = requirement.split(";")[0].rstrip("0123456789.,<>=!~ ")
        try:
            yield Check(name, Health.OK, metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Check(name, Health.MISSING, "not installed", f"pip install {name!r}")


def used_plugins(configs: Sequence[Config]) -> list[Used]:
    """List the plugins that runs name, each once; the parts of a weighted reward too."""
    used: dict[str, Used] = {}
    for config in configs:
        named = [
            ("loggers", name, config.logging.logger_params.get(name, {})) for name in config.logging.loggers
        ]
        named += [("launchers", config.campaign.launcher, {})] if config.campaign is not None else []
        for section, key in PLUGINS:
            table = getattr(config, section)
            named.append((key.plugin, getattr(table, key.name), getattr(table, key.params)))
        for kind, name, params in named:
            one = Used(kind, name, params, needs(kind, name))
            used.update({repr(u): u for u in (one, *_parts(one))})
    return list(used.values())


def plugin_checks(used: Sequence[Used]) -> Iterator[Check]:
    """Check for extras, keys and programs of all plugins; those of plugins in use are required."""
    of_plugins = {(kind, name): needs(kind, name) for kind in registry.KINDS for name in registry.names(kind)}
    known = [*OF_COMMANDS, *of_plugins.values()]
    for extra in dict.fromkeys(wanted.extra for wanted in known if wanted.extra):
        users = dict.fromkeys(one.name for one in used if one.needs.extra == extra)
        yield _extra_check(extra, [wanted for wanted in known if wanted.extra == extra], list(users))
    users_of_keys = dict.fromkeys((wanted.keys for wanted in known), "")
    users_of_keys |= {one.keys: one.name for one in used}
    yield from (_key_check(keys, user) for keys, user in users_of_keys.items() if keys)
    in_use = {(one.kind, one.name) for one in used}
    for plugin, wanted in of_plugins.items():
        if wanted.commands:
            yield _command_check(plugin[1], wanted, is_used=plugin in in_use)


def machine_checks(configs: Sequence[Config]) -> Iterator[Check]:
    """Check GPUs, sandboxes, the disk and the locks."""
    yield _gpu_check()
    yield _sandbox_check(configs)
    for directory in dict.fromkeys(c.logging.log_dir for c in configs) or [Logging.log_dir]:
        yield _disk_check(Path(directory))
    shared = (c.backend.throttle_dir for c in configs if c.backend.throttle_dir)
    logs = (c.logging.log_dir for c in configs)
    yield from map(_lock_check, dict.fromkeys([*logs, *shared]) or [Logging.log_dir])


def server_checks(configs: Sequence[Config]) -> Iterator[Check]:
    """Check that the servers named by runs answer."""
    for server in servers_of(configs):
        fix = f"start it or correct {server.key}; other machines may still reach it"
        lacks = (Health.MISSING, server.silence, fix) if server.silence else (Health.OK, "answers")
        yield Check(f"server {server.address}", *lacks)


def _parts(one: Used) -> Iterator[Used]:
    made_of = registry.hook("rewards", one.name, "made_of") if one.kind == "rewards" else None
    for name, params in made_of(one.params) if made_of else ():
        yield (part := Used("rewards", name, params, needs("rewards", name)))
        yield from _parts(part)


def _extra_check(extra: str, wanted: Sequence[Needs], users: Sequence[str]) -> Check:
    missing = list(dict.fromkeys(package for one in wanted for package in one.missing()))
    what = f"extra {extra}" + (f" for {', '.join(users)}" if users else "")
    if not missing:
        return Check(what, Health.OK, ", ".join(dict.fromkeys(p for one in wanted for p in one.packages)))
    verdict = Health.MISSING if users else Health.ABSENT
    return Check(what, verdict, f"{', '.join(missing)} not found", wanted[0].command)


def _key_check(names: tuple[str, ...], user: str) -> Check:
    what = f"key {' or '.join(names)}" + (f" for {user}" if user else "")
    if Needs(keys=names).has_key():
        return Check(what, Health.OK, "set")
    return Check(what, Health.MISSING if user else Health.ABSENT, "not set", f"export {names[0]}=...")


def _command_check(name: str, wanted: Needs, *, is_used: bool) -> Check:
    what, missing = f"commands of {name}", wanted.missing_commands()
    if missing:
        verdict = Health.MISSING if is_used else Health.ABSENT
        fix = f"use a machine that has them, or load the environment module with {missing[0]}"
        return Check(what, verdict, f"{', '.join(missing)} not found", fix)
    try:
        asked = subprocess.run(
            [wanted.commands[0], "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check(what, Health.WARNING, plain(str(error), 200), f"try {wanted.commands[0]} --version")
    said = plain((asked.stdout.strip() or asked.stderr.strip() or "no version").splitlines()[-1], 200)
    if asked.returncode:
        return Check(what, Health.WARNING, said, "installed, but without a cluster: set SLURM_CONF")
    return Check(what, Health.OK, f"{said}: {', '.join(wanted.commands)}")


def _gpu_check() -> Check:
    try:
        found = gpus()
    except InfrastructureError as error:
        return Check("gpu", Health.WARNING, "found, but cannot be read", str(error))
    if not found:
        return Check("gpu", Health.ABSENT, "none")
    return Check("gpu", Health.OK, ", ".join(f"{g.name} {g.memory_total_bytes / GIB:.0f} GiB" for g in found))


def _sandbox_check(configs: Sequence[Config]) -> Check:
    """Check where programs run; without a file that needs it, where they would."""
    try:
        used = sandboxes_of(configs)
        known = used or {(best := registry.find("sandbox", "auto")()).name: best.weakness}
    except ConfigError as error:
        return Check("sandbox", Health.MISSING, "cannot be used here", str(error))
    if not any(known.values()):
        return Check("sandbox", Health.OK, ", ".join(known))
    fix = "install bubblewrap, where the kernel lets you create user namespaces"
    return Check("sandbox", Health.WARNING if used else Health.OK, ", ".join(known), fix)


def _disk_check(directory: Path) -> Check:
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    what, found = f"disk for {directory}", f"{free / GIB:.1f} GiB free"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        why = "cannot be written by this user" if place.is_dir() else "is not a directory"
        return Check(what, Health.MISSING, f"{place} {why}", "set logging.log_dir to another directory")
    if free < LITTLE_DISK_BYTES:
        return Check(what, Health.MISSING, found, "free some space, or set logging.log_dir to another disk")
    if free < ENOUGH_DISK_BYTES:
        return Check(what, Health.WARNING, found, "checkpoints of a model may not fit")
    return Check(what, Health.OK, found)


def _lock_check(directory: str) -> Check:
    problem = lock_sharing_problem(directory)
    if problem is None:
        return Check(f"locks in {directory}", Health.OK, "shared by all processes of this machine")
    fix = "use a local directory for one machine; see backend.throttle_dir and logging.log_dir"
    return Check(f"locks in {directory}", Health.WARNING, problem, fix)
