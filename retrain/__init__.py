"""Plan, run and compare reinforcement-learning campaigns for language models.

The names below are imported when first used: `import retrain` itself costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.campaign.run import run_campaign as run_campaign
    from retrain.config.load import load_config as load_config
    from retrain.controllers.backpressure import BackPressure as BackPressure
    from retrain.controllers.backpressure.step import StepObservation as StepObservation
    from retrain.controllers.scaling.noise_scale import GradientNoiseScale as GradientNoiseScale
    from retrain.controllers.usl import UslFit as UslFit
    from retrain.controllers.usl import fit_usl as fit_usl
    from retrain.pipeline import RateLimiter as RateLimiter
    from retrain.plan.estimate import estimate_makespan as estimate_makespan
    from retrain.records.metrics import read_metrics as read_metrics
    from retrain.semaphore import FileSemaphore as FileSemaphore
    from retrain.system.throttle import ThrottleLevel as ThrottleLevel
    from retrain.system.throttle import ThrottleState as ThrottleState
    from retrain.system.throttle import TrainingThrottle as TrainingThrottle
    from retrain.torch_scaling import AdamScale as AdamScale
    from retrain.torch_scaling import AdaScale as AdaScale
    from retrain.torch_scaling import LEGWScale as LEGWScale
    from retrain.torch_scaling import LinearScale as LinearScale
    from retrain.torch_scaling import ScalingRuleBase as ScalingRuleBase
    from retrain.torch_scaling import SqrtScale as SqrtScale

_HOME = {
    "FileSemaphore": "retrain.semaphore",
    "BackPressure": "retrain.controllers.backpressure",
    "StepObservation": "retrain.controllers.backpressure.step",
    "fit_usl": "retrain.controllers.usl",
    "UslFit": "retrain.controllers.usl",
    "TrainingThrottle": "retrain.system.throttle",
    "ThrottleLevel": "retrain.system.throttle",
    "ThrottleState": "retrain.system.throttle",
    "RateLimiter": "retrain.pipeline",
    "AdaScale": "retrain.torch_scaling",
    "AdamScale": "retrain.torch_scaling",
    "LEGWScale": "retrain.torch_scaling",
    "LinearScale": "retrain.torch_scaling",
    "ScalingRuleBase": "retrain.torch_scaling",
    "SqrtScale": "retrain.torch_scaling",
    "GradientNoiseScale": "retrain.controllers.scaling.noise_scale",
    "estimate_makespan": "retrain.plan.estimate",
    "load_config": "retrain.config.load",
    "run_campaign": "retrain.campaign.run",
    "read_metrics": "retrain.records.metrics",
}

__all__ = [
    "AdaScale",
    "AdamScale",
    "BackPressure",
    "FileSemaphore",
    "GradientNoiseScale",
    "LEGWScale",
    "LinearScale",
    "RateLimiter",
    "ScalingRuleBase",
    "SqrtScale",
    "StepObservation",
    "ThrottleLevel",
    "ThrottleState",
    "TrainingThrottle",
    "UslFit",
    "estimate_makespan",
    "fit_usl",
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
