"""How a configuration's rollouts flow from sampling to training."""

from __future__ import annotations

from retrain.config.schema import Config
from retrain.controllers.rate import FlowSettings, samples_per_batch


def flow_settings(config: Config) -> FlowSettings | None:
    """Give the flow of prompts; None if sampling and training take turns (max_staleness = 0).

    An item is one prompt's group; the nominal batch is the largest that back pressure may ask for, at
    the pace of `training.batch_size`.
    """
    table, pressure = config.rate_limiter, config.backpressure
    if table.max_staleness == 0:
        return None
    batch = config.training.batch_size
    largest = max(batch, pressure.max_batch_size) if pressure.enabled else batch
    unit = table.nb_time_steps or batch
    pace = samples_per_batch(unit, table.rate_limit_speed_batch_per_sim)
    return FlowSettings(
        batch_size=largest,
        capacity=table.capacity or 2 * max(table.watermark, largest + table.threshold, unit),
        buffer=table.buffer,
        threshold=table.threshold,
        samples_per_batch=pace * largest / batch if pace is not None else None,
        watermark=table.watermark,
        max_staleness=table.max_staleness,
        unit_size=unit,
    )
