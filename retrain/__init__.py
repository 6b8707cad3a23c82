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
    from retrain.controllers.backpressure import StepObservation as StepObservation
    from retrain.controllers.scaling.noise_scale import GradientNoiseScale as GradientNoiseScale
    from retrain.controllers.sequential import SequentialComparison as SequentialComparison
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
    from retrain.torch_scaling.data_parallel import AdaptiveDataParallel as AdaptiveDataParallel

_HOME = {
    name: f"retrain.{module}"
    for module, names in {
        "campaign.run": "run_campaign",
        "config.load": "load_config",
        "controllers.backpressure": "BackPressure StepObservation",
        "controllers.scaling.noise_scale": "GradientNoiseScale",
        "controllers.sequential": "SequentialComparison",
        "controllers.usl": "UslFit fit_usl",
        "pipeline": "RateLimiter",
        "plan.estimate": "estimate_makespan",
        "records.metrics": "read_metrics",
        "semaphore": "FileSemaphore",
        "system.throttle": "ThrottleLevel ThrottleState TrainingThrottle",
        "torch_scaling": "AdaScale AdamScale LEGWScale LinearScale ScalingRuleBase SqrtScale",
        "torch_scaling.data_parallel": "AdaptiveDataParallel",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOME.keys() - {"AdaptiveDataParallel"})  # it needs PyTorch


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
