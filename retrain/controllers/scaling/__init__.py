"""Learning rate and batch size: scaling rules, the gradient noise scale, and goodput."""

from retrain.controllers.scaling.goodput import BatchSuggestion, Goodput, StepTimes, efficiency, phi_from
from retrain.controllers.scaling.noise_scale import GradientNoiseScale
from retrain.controllers.scaling.rules import (
    RULES,
    AdamScaleRule,
    AdaScaleRule,
    LearningRateScaling,
    LEGWRule,
    LinearRule,
    ScalingDecision,
    ScalingRule,
    SqrtRule,
    schedule_factor,
)

__all__ = [
    "RULES",
    "AdaScaleRule",
    "AdamScaleRule",
    "BatchSuggestion",
    "Goodput",
    "GradientNoiseScale",
    "LEGWRule",
    "LearningRateScaling",
    "LinearRule",
    "ScalingDecision",
    "ScalingRule",
    "SqrtRule",
    "StepTimes",
    "efficiency",
    "phi_from",
    "schedule_factor",
]
