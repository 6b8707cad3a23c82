"""Asynchronous sampling: buffers, the production/consumption limiter, and the threads between them."""

from retrain.config.flow import FlowSettings, samples_per_batch
from retrain.pipeline.limiter import ClosedError, RateLimiter, RateStats
from retrain.pipeline.rollout_pipeline import Batch, RolloutPipeline
from retrain.records.step_row import PipelineStats

__all__ = [
    "Batch",
    "ClosedError",
    "FlowSettings",
    "PipelineStats",
    "RateLimiter",
    "RateStats",
    "RolloutPipeline",
    "samples_per_batch",
]
