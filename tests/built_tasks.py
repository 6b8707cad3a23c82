"""Tasks as a run builds them."""

from __future__ import annotations

import pytest

from retrain.errors import ConfigError
from retrain.registry import find
from retrain.tasks import Task


def build(name: str, **options: object) -> Task:
    return find("tasks", name)(**{"seed": 0, **options})


def problem_of(name: str, **options: object) -> str:
    with pytest.raises(ConfigError) as raised:
        build(name, **options)
    return str(raised.value)
