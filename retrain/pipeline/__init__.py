"""Asynchronous sampling: buffers, the production/consumption limiter, and the threads between them."""

from retrain.config.flow import FlowSettings, samples_per_batch
from retrain.pipeline.limiter import ClosedError, RateLimiter
from retrain.pipeline.rollout_pipeline import RolloutPipeline

__all__ = [
    "ClosedError",
    "FlowSettings",
    "RateLimiter",
    "RolloutPipeline",
    "samples_per_batch",
]
