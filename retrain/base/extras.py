"""What a plugin needs beyond the core: packages of an extra, keys in the environment, programs.

A plugin declares it in constants of its file, at whose top nothing of it is imported: `EXTRA = "math"` (the
extra in pyproject.toml), `PACKAGES = ("math_verify",)` (modules that must be importable), `KEYS =
("OPENAI_API_KEY",)` (environment variables, or files as `~/...`; one must be set) and `COMMANDS =
("sbatch",)` (programs that must be on PATH; the first must support `--version`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.base import registry
from retrain.base.distribution import install_command
from retrain.base.errors import ConfigError


class MissingPackageError(ConfigError):
    """A package is not installed; the message names it, its extra and the command."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a plugin needs beyond the core; usually nothing."""

    extra: str = ""
    packages: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Return the command that installs the extra, or ""."""
        return install_command(self.extra) if self.extra else ""

    def missing(self) -> list[str]:
        """Return the packages that Python does not find, without importing any."""
        return [package for package in self.packages if not _is_there(package)]

    def missing_commands(self) -> list[str]:
        return [name for name in self.commands if shutil.which(name) is None]

    def problem(self, who: str) -> str | None:
        """Return what must be installed before it can be used; None if nothing."""
        missing = self.missing()
        return _problem(who, missing, self.extra) if missing else None

    def has_key(self) -> bool:
        """Whether a key is set in the environment or a file, or none is needed."""
        for key in self.keys:
            if Path(key).expanduser().is_file() if key.startswith("~/") else os.environ.get(key, "").strip():
                return True
        return not self.keys


def needs(kind: str, name: str) -> Needs:
    """Return what a plugin needs; nothing if the plugin cannot be loaded."""
    try:
        plugin = registry.plugin(kind, name)
    except ConfigError:
        return Needs()
    extra = plugin.constant("EXTRA", "") if registry.is_built_in(kind, name) else ""  # extras are retrain's
    return Needs(extra, *(tuple(plugin.constant(key, ())) for key in ("PACKAGES", "KEYS", "COMMANDS")))


def summary(kind: str, name: str) -> str:
    """Return the first line of a plugin's description, or why it cannot be loaded."""
    try:
        return registry.plugin(kind, name).summary()
    except ConfigError as error:
        return str(error)


def missing_problem(kind: str, name: str) -> str | None:
    """Return what must be installed before a plugin can be used; None if nothing."""
    return needs(kind, name).problem(name)


def load(module: str, extra: str, who: str) -> Any:
    """Import a module of an extra on behalf of a plugin.

    Raises:
        MissingPackageError: it is not installed, or not with all that it imports.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackageError(_problem(who, [error.name or module], extra)) from error


def _is_there(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except ImportError:  # of a submodule: the package that should hold it is missing
        return False
    return spec is not None and spec.origin is not None  # a plain folder of that name has no origin


def _problem(who: str, packages: list[str], extra: str) -> str:
    missing = f"{', '.join(packages)} not found"
    if not extra:
        return f"{who!r} needs packages: {missing}; install them in retrain's environment"
    return f"{who!r} needs the extra {extra!r} ({missing}): {install_command(extra)}"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress progress bars and warnings of transformers, which must be installed."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
