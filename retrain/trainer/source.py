"""Where a step's rollouts come from: sampled synchronously, when training asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from retrain.backends import BackendInfo
from retrain.config.flow import flow_settings
from retrain.config.schema import Config
from retrain.records.step_row import PipelineStats
from retrain.rollouts import Group, Prompt
from retrain.tasks import Task
from retrain.trainer.prompts import PromptStream

Sample = Callable[[Sequence[Prompt]], list[Group]]


class Source:
    """Samples when asked: the synchronous loop. `AsyncSource` samples while the trainer trains."""

    def __init__(self, prompts: PromptStream[Prompt], sample: Sample) -> None:
        self._prompts = prompts
        self._sample = sample
        self._before = prompts.state_dict()

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return `count` groups for the policy after `version` steps, sampled `at_a_time` prompts at once."""
        del version
        self._before = self._prompts.state_dict()
        prompts = self._prompts.take(count)
        chunks = [prompts[start : start + at_a_time] for start in range(0, count, at_a_time)]
        return [group for chunk in chunks for group in self._sample(chunk)]

    def updating(self, version: int) -> AbstractContextManager[object]:
        """Return a context in which the policy is updated to this version."""
        del version
        return nullcontext()

    def exclusive(self) -> AbstractContextManager[object]:
        """Return a context in which nothing is sampled, for evaluation and checkpoints."""
        return nullcontext()

    def stats(self) -> PipelineStats | None:
        """Return the source's part of a step's row; None if sampling is synchronous."""
        return None

    def put_back(self) -> None:
        """Sample the last step's prompts again: the step did not fit in memory."""
        self._prompts.load_state_dict(self._before)

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor, JSON-able."""
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        """Stop sampling."""


def open_source(config: Config, info: BackendInfo, task: Task, sample: Sample) -> Source:
    """Return the source that a configuration asks for."""
    prompts = PromptStream(task.train, config.training.seed)
    settings = flow_settings(config)
    if settings is None:
        return Source(prompts, sample)
    from retrain.trainer.async_source import AsyncSource

    return AsyncSource(
        prompts,
        sample,
        settings,
        workers=config.rate_limiter.workers,
        seed=config.training.seed,
        overlaps=info.remote or info.overlaps,
    )
