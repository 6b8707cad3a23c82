"""Tasks as a run builds them."""

from __future__ import annotations

import pytest

from retrain.base.errors import ConfigError
from retrain.base.registry import find_plugin, problems_with_params
from retrain.plugins.tasks import Task


def build(name: str, seed: int = 0, **options: object) -> Task:
    """Build a task from a table as a file's is checked and built."""
    if wrong := problems_with_params("tasks", name, options):
        raise ConfigError([problem.in_table for problem in wrong])
    return find_plugin("tasks", name)(seed=seed, **options)


def problem_of(name: str, **options: object) -> str:
    with pytest.raises(ConfigError) as raised:
        build(name, **options)
    return str(raised.value)
