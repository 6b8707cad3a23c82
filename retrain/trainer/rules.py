"""The learning-rate rule that a configuration names."""

from __future__ import annotations

from retrain.config.schema import Config
from retrain.controllers.scaling.rules import RULES, LearningRateScaling, LEGWRule, ScalingRule


def scaling_of(config: Config, data_size: int) -> LearningRateScaling:
    """Return the run's learning-rate scaling; data_size is the number of training prompts."""
    table = config.scaling
    return LearningRateScaling(_rule(config, data_size), config.training.batch_size, table.smoothing)


def _rule(config: Config, data_size: int) -> ScalingRule:
    table = config.scaling
    if table.rule == "legw":
        return LEGWRule(table.base_warmup_epochs, data_size)
    return RULES[table.rule]()
