"""How a configuration's rollouts flow from sampling to training."""

from __future__ import annotations

from retrain.config.schema import Config
from retrain.controllers.rate import FlowSettings, samples_per_batch


def flow_settings(config: Config) -> FlowSettings | None:
    """Give the flow of prompts; None if sampling and training take turns (max_staleness = 0).

    An item is one prompt's group, a nominal batch is `training.batch_size` of them.
    """
    table, batch = config.rate_limiter, config.training.batch_size
    if table.max_staleness == 0:
        return None
    unit = table.nb_time_steps or batch
    return FlowSettings(
        batch_size=batch,
        capacity=table.capacity or 2 * max(table.watermark, batch + table.threshold, unit),
        buffer=table.buffer,
        threshold=table.threshold,
        samples_per_batch=samples_per_batch(unit, table.rate_limit_speed_batch_per_sim),
        watermark=table.watermark,
        max_staleness=table.max_staleness,
        unit_size=unit,
    )
