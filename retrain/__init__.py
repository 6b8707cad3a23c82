"""Plan, run and compare reinforcement-learning campaigns for language models.

All that a script or a plugin needs is imported from here, each name when it is first used: `import retrain`
itself costs nothing. The modules below may move.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.backends import Backend as Backend
    from retrain.backends import BackendInfo as BackendInfo
    from retrain.backends import BackendPlugin as BackendPlugin
    from retrain.backends import BackendSpec as BackendSpec
    from retrain.backends import Exported as Exported
    from retrain.backends import GradientMoments as GradientMoments
    from retrain.backends import MemoryEstimate as MemoryEstimate
    from retrain.backends import Optimization as Optimization
    from retrain.backends import Permit as Permit
    from retrain.backends import Sampling as Sampling
    from retrain.backends import UpdateStats as UpdateStats
    from retrain.backends.metering import SamplingWork as SamplingWork
    from retrain.backends.metering import Work as Work
    from retrain.backends.progress import OutageProgress as OutageProgress
    from retrain.backends.progress import SamplingProgress as SamplingProgress
    from retrain.backends.progress import StartProgress as StartProgress
    from retrain.backends.progress import TrainingProgress as TrainingProgress
    from retrain.backends.rows import LiveTurn as LiveTurn
    from retrain.backends.rows import TurnFeed as TurnFeed
    from retrain.base.errors import BackendMemoryError as BackendMemoryError
    from retrain.base.errors import ClusterDownError as ClusterDownError
    from retrain.base.errors import ConfigError as ConfigError
    from retrain.base.errors import FullContextError as FullContextError
    from retrain.base.errors import InfrastructureError as InfrastructureError
    from retrain.base.errors import InterruptedRunError as InterruptedRunError
    from retrain.base.errors import LaunchError as LaunchError
    from retrain.base.errors import NonFiniteError as NonFiniteError
    from retrain.base.errors import Problem as Problem
    from retrain.base.errors import PromptError as PromptError
    from retrain.base.errors import RecordsError as RecordsError
    from retrain.base.errors import RetrainError as RetrainError
    from retrain.base.errors import RunFailedError as RunFailedError
    from retrain.base.json_lines import Demonstration as Demonstration
    from retrain.base.registry import Count as Count
    from retrain.base.registry import Fraction as Fraction
    from retrain.base.registry import Natural as Natural
    from retrain.base.registry import NotNegative as NotNegative
    from retrain.base.registry import Positive as Positive
    from retrain.base.registry import find_plugin as find_plugin
    from retrain.base.rollouts import CallForm as CallForm
    from retrain.base.rollouts import FirstTurn as FirstTurn
    from retrain.base.rollouts import Given as Given
    from retrain.base.rollouts import Group as Group
    from retrain.base.rollouts import Loss as Loss
    from retrain.base.rollouts import LossTerms as LossTerms
    from retrain.base.rollouts import NextTurn as NextTurn
    from retrain.base.rollouts import Prompt as Prompt
    from retrain.base.rollouts import Rollout as Rollout
    from retrain.base.rollouts import TrainingSample as TrainingSample
    from retrain.campaign.launchers import Assignment as Assignment
    from retrain.campaign.launchers import Begun as Begun
    from retrain.campaign.launchers import Ended as Ended
    from retrain.campaign.launchers import Launcher as Launcher
    from retrain.campaign.run import run_campaign as run_campaign
    from retrain.config.load import load_config as load_config
    from retrain.config.prices import Price as Price
    from retrain.config.schema import Config as Config
    from retrain.control.machine.throttle import TrainingThrottle as TrainingThrottle
    from retrain.control.rules.backpressure import BackPressure as BackPressure
    from retrain.control.rules.backpressure import StepObservation as StepObservation
    from retrain.control.rules.concurrency_limit import CallFacts as CallFacts
    from retrain.control.rules.scaling import BatchSuggestion as BatchSuggestion
    from retrain.control.rules.scaling import Goodput as Goodput
    from retrain.control.rules.scaling import GradientNoiseScale as GradientNoiseScale
    from retrain.control.rules.scaling import StepTimes as StepTimes
    from retrain.control.rules.sequential import SequentialComparison as SequentialComparison
    from retrain.control.rules.throttle import ThrottleLevel as ThrottleLevel
    from retrain.control.rules.throttle import ThrottleState as ThrottleState
    from retrain.control.rules.usl import UslFit as UslFit
    from retrain.control.rules.usl import fit_usl as fit_usl
    from retrain.control.semaphore import FileSemaphore as FileSemaphore
    from retrain.plan.estimate import Makespan as Makespan
    from retrain.plan.estimate import estimate_makespan as estimate_makespan
    from retrain.plan.estimate import estimate_workload as estimate_workload
    from retrain.plan.estimate.workload import Failures as Failures
    from retrain.plan.estimate.workload import Launching as Launching
    from retrain.plan.estimate.workload import Pilot as Pilot
    from retrain.plan.estimate.workload import RunWork as RunWork
    from retrain.plan.estimate.workload import StepCost as StepCost
    from retrain.plan.estimate.workload import Workload as Workload
    from retrain.plugins.advantages import over_batch as over_batch
    from retrain.plugins.curricula import Curriculum as Curriculum
    from retrain.plugins.loggers import LoggedRun as LoggedRun
    from retrain.plugins.loggers import Logger as Logger
    from retrain.plugins.rewards import Answer as Answer
    from retrain.plugins.rewards import BatchScorer as BatchScorer
    from retrain.plugins.rewards import Outcome as Outcome
    from retrain.plugins.rewards import Score as Score
    from retrain.plugins.rewards import TrainerState as TrainerState
    from retrain.plugins.rewards import UnscoredError as UnscoredError
    from retrain.plugins.rewards import score_with as score_with
    from retrain.plugins.sandbox import Sandbox as Sandbox
    from retrain.plugins.tasks import Task as Task
    from retrain.records.metrics import read_metrics as read_metrics
    from retrain.records.step_row import Mismatch as Mismatch
    from retrain.trainer.pipeline import RateLimiter as RateLimiter
    from retrain.trainer.torch_scaling import AdamScale as AdamScale
    from retrain.trainer.torch_scaling import AdaScale as AdaScale
    from retrain.trainer.torch_scaling import LEGWScale as LEGWScale
    from retrain.trainer.torch_scaling import LinearScale as LinearScale
    from retrain.trainer.torch_scaling import ScalingRuleBase as ScalingRuleBase
    from retrain.trainer.torch_scaling import SqrtScale as SqrtScale
    from retrain.trainer.torch_scaling.data_parallel import AdaptiveDataParallel as AdaptiveDataParallel

_HOME = {
    name: f"retrain.{module}"
    for module, names in {
        "plugins.advantages": "over_batch",
        "backends": (
            "Backend BackendInfo BackendPlugin BackendSpec Exported GradientMoments MemoryEstimate "
            "Optimization Permit Sampling UpdateStats"
        ),
        "backends.metering": "SamplingWork Work",
        "backends.progress": "OutageProgress SamplingProgress StartProgress TrainingProgress",
        "backends.rows": "LiveTurn TurnFeed",
        "campaign.run": "run_campaign",
        "config.load": "load_config",
        "config.prices": "Price",
        "config.schema": "Config",
        "control.rules.backpressure": "BackPressure StepObservation",
        "control.rules.concurrency_limit": "CallFacts",
        "control.rules.scaling": "BatchSuggestion Goodput GradientNoiseScale StepTimes",
        "control.rules.sequential": "SequentialComparison",
        "control.rules.throttle": "ThrottleLevel ThrottleState",
        "control.rules.usl": "UslFit fit_usl",
        "base.errors": (
            "BackendMemoryError ClusterDownError ConfigError FullContextError InfrastructureError "
            "InterruptedRunError LaunchError NonFiniteError Problem PromptError RecordsError RetrainError "
            "RunFailedError"
        ),
        "base.json_lines": "Demonstration",
        "campaign.launchers": "Assignment Begun Ended Launcher",
        "plugins.loggers": "LoggedRun Logger",
        "trainer.pipeline": "RateLimiter",
        "plan.estimate": "Makespan estimate_makespan estimate_workload",
        "plan.estimate.workload": "Failures Launching Pilot RunWork StepCost Workload",
        "records.metrics": "read_metrics",
        "records.step_row": "Mismatch",
        "base.registry": "Count Fraction Natural NotNegative Positive find_plugin",
        "plugins.rewards": "Answer BatchScorer Outcome Score TrainerState UnscoredError score_with",
        "base.rollouts": (
            "CallForm FirstTurn Given Group Loss LossTerms NextTurn Prompt Rollout TrainingSample"
        ),
        "plugins.sandbox": "Sandbox",
        "control.semaphore": "FileSemaphore",
        "control.machine.throttle": "TrainingThrottle",
        "plugins.curricula": "Curriculum",
        "plugins.tasks": "Task",
        "trainer.torch_scaling": "AdaScale AdamScale LEGWScale LinearScale ScalingRuleBase SqrtScale",
        "trainer.torch_scaling.data_parallel": "AdaptiveDataParallel",
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
