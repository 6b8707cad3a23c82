"""Where a step's rollouts come from: sampled in turn with training, or beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from retrain.backends import BackendInfo
from retrain.config.flow import flow_settings
from retrain.config.schema import Config
from retrain.records.step_row import PipelineStats
from retrain.rollouts import Group, Prompt
from retrain.tasks import Task
from retrain.trainer.prompts import PromptStream

Sample = Callable[[Sequence[Prompt]], list[Group]]


class Source(Protocol):
    """Gives groups to train on."""

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Return `count` groups for the policy of this version (complete steps)."""
        ...

    def updating(self, version: int) -> AbstractContextManager[object]:
        """Hold while the policy is updated to this version (a context manager)."""
        ...

    def exclusive(self) -> AbstractContextManager[object]:
        """Hold while something else needs the backend to itself (a context manager)."""
        ...

    def stats(self) -> PipelineStats | None:
        """Return the source's part of a step's row; None if nothing overlaps."""
        ...

    def put_back(self) -> None:
        """A step failed for memory: its prompts are to be sampled again."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        ...

    def close(self) -> None:
        """Stop sampling."""
        ...


def open_source(config: Config, info: BackendInfo, task: Task, sample: Sample) -> Source:
    """Return the source that a configuration asks for."""
    prompts = PromptStream(task.train, config.training.seed)
    settings = flow_settings(config)
    if settings is None:
        return InTurnSource(prompts, sample)
    from retrain.trainer.async_source import AsyncSource

    return AsyncSource(
        prompts,
        sample,
        settings,
        workers=config.rate_limiter.workers,
        seed=config.training.seed,
        overlaps=info.remote or info.overlaps,
    )


class InTurnSource:
    """Samples when asked: the plain loop."""

    def __init__(self, prompts: PromptStream[Prompt], sample: Sample) -> None:
        self._prompts = prompts
        self._sample = sample
        self._before = prompts.state_dict()

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Sample now."""
        del version
        self._before = self._prompts.state_dict()
        prompts = self._prompts.take(count)
        chunks = [prompts[start : start + at_a_time] for start in range(0, count, at_a_time)]
        return [group for chunk in chunks for group in self._sample(chunk)]

    def updating(self, version: int) -> AbstractContextManager[object]:
        """Nothing runs beside an update."""
        del version
        return nullcontext()

    def exclusive(self) -> AbstractContextManager[object]:
        """The backend is never shared."""
        return nullcontext()

    def stats(self) -> None:
        """Nothing overlaps."""

    def put_back(self) -> None:
        """Take the last prompts again."""
        self._prompts.load_state_dict(self._before)

    def state_dict(self) -> dict[str, Any]:
        """Return the data cursor."""
        return {"prompts": self._prompts.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the data cursor."""
        self._prompts.load_state_dict(state["prompts"])

    def close(self) -> None:
        """Nothing to stop."""
