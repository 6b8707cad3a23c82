"""Sampling beside training: producer threads fill a buffer that the trainer takes its steps from."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from retrain.controllers.rate import FlowSettings
from retrain.pipeline import RolloutPipeline
from retrain.rollouts import Group
from retrain.trainer.prompts import PromptStream
from retrain.trainer.source import Sample


class Beside:
    """Samples in threads of its own while the trainer trains.

    Rollouts under way when a run ends are sampled again after a resume: the cursor is set back by
    their number. With one worker each prompt is then trained on once; several may swap a few.
    """

    def __init__(
        self,
        prompts: PromptStream,
        sample: Sample,
        settings: FlowSettings,
        *,
        workers: int,
        seed: int,
        overlaps: bool,
    ) -> None:
        self._prompts = prompts
        self._sample = sample
        self._settings = settings
        self._workers = workers if overlaps else 1
        self._seed = seed
        self._policy = nullcontext() if overlaps else threading.Lock()
        self._order = threading.Lock()
        self._pipeline = self._open()
        self._is_started = False
        self._taken: list[Group] = []  # the last batch

    def next_groups(self, count: int, at_a_time: int, version: int) -> list[Group]:
        """Take what was sampled, waiting for it if need be."""
        del at_a_time  # production units have their own size
        if not self._is_started:
            self._pipeline.publish(version)
            self._pipeline.start()
            self._is_started = True
        self._taken = list(self._pipeline.next_batch(count, version).items)
        return self._taken

    @contextmanager
    def updating(self, version: int) -> Iterator[None]:
        """Keep sampling from seeing half-updated weights, then tell it of the new ones."""
        with self._policy:
            yield
            self._pipeline.publish(version)

    def exclusive(self) -> Any:
        """Keep sampling out, unless the backend takes calls beside each other."""
        return self._policy

    def row(self) -> dict[str, Any]:
        """Give ratio, waits, ages and drops."""
        return self._pipeline.stats().row()

    def put_back(self) -> None:
        """Begin anew: a failed producer has ended its pipeline, and the last batch is sampled again."""
        state = self.state_dict()
        state["prompts"]["taken"] = max(0, state["prompts"]["taken"] - len(self._taken))
        self._taken = []
        self.close()
        self._pipeline, self._is_started = self._open(), False
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Give counts, and the data cursor before what is under way."""
        with self._order:
            taken = self._prompts.state_dict()["taken"]
            outstanding = self._pipeline.stats().outstanding
            return {
                "prompts": {"taken": max(0, taken - outstanding)},
                "pipeline": self._pipeline.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from counts and cursor."""
        self._prompts.load_state_dict(state["prompts"])
        if "pipeline" in state:
            self._pipeline.load_state_dict(state["pipeline"])

    def close(self) -> None:
        """End the producers."""
        self._pipeline.close()

    def _open(self) -> RolloutPipeline[Group]:
        return RolloutPipeline(
            self._produce, self._settings, workers=self._workers, seed=self._seed, gate=lambda: self._policy
        )

    def _produce(self, version: int) -> list[Group]:
        del version
        with self._order:
            prompts = self._prompts.take(self._settings.unit_size)
        return self._sample(prompts)
