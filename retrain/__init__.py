"""Plan, run and compare reinforcement-learning campaigns for language models.

The names below are imported when first used: `import retrain` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.campaign.run import run_campaign as run_campaign
    from retrain.config.load import load_config as load_config
    from retrain.plan.estimate import estimate_makespan as estimate_makespan
    from retrain.records.metrics import read_metrics as read_metrics
    from retrain.semaphore import FileSemaphore as FileSemaphore

_HOME = {
    "FileSemaphore": "retrain.semaphore",
    "estimate_makespan": "retrain.plan.estimate",
    "load_config": "retrain.config.load",
    "read_metrics": "retrain.records.metrics",
    "run_campaign": "retrain.campaign.run",
}

__all__ = [
    "FileSemaphore",
    "estimate_makespan",
    "load_config",
    "read_metrics",
    "run_campaign",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
