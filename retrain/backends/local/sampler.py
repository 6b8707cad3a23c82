"""Sampling with the trained model, in batches that fit in memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from retrain.backends import Sampling
from retrain.backends.local.devices import DeviceMemory, is_out_of_memory
from retrain.backends.local.loading import Policy
from retrain.backends.local.sampling import Completed, complete
from retrain.backends.local.text import Text
from retrain.backends.work import ModelCosts, WorkMeter
from retrain.engines import Drawn, Ids
from retrain.errors import BackendMemoryError


class TorchSampler:
    """Samples with PyTorch, and remembers the batch size in tokens that fits."""

    def __init__(
        self, policy: Policy, text: Text, memory: DeviceMemory, costs: ModelCosts, tokens_at_a_time: int
    ) -> None:
        self._policy = policy
        self._text = text
        self._memory = memory
        self._costs = costs
        self.work = WorkMeter()
        # batch size in tokens, halved when it does not fit; batching affects the random draws, so evaluation
        # has a budget of its own
        self.budgets = {"sample": tokens_at_a_time, "evaluate": tokens_at_a_time}

    def complete(
        self, prompts: Sequence[Ids], sampling: Sampling, version: int, generator: torch.Generator
    ) -> list[Drawn]:
        """Return each prompt's group, prompt after prompt.

        Raises:
            BackendMemoryError: a single sequence does not fit.
        """
        del version
        rows = [ids for ids in prompts for _ in range(sampling.group_size)]
        budget = "sample" if sampling.seed is None else "evaluate"
        length = min(max(map(len, rows)) + sampling.max_tokens, self._policy.context)
        drawn: list[Drawn] = []
        while len(drawn) < len(rows):
            count = max(1, self.budgets[budget] // length)
            if sampling.group_size < count < len(rows):
                count -= count % sampling.group_size  # whole groups, for one prefill per prompt
            state = generator.get_state()
            part = rows[len(drawn) : len(drawn) + count]
            try:
                completed = complete(
                    self._policy,
                    self._text,
                    part,
                    max_tokens=sampling.max_tokens,
                    temperature=sampling.temperature,
                    generator=generator,
                )
                drawn += completed.drawn
                self._count(part, completed)
                continue
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            generator.set_state(state)
            self._memory.free()
            if len(part) == 1:
                raise BackendMemoryError(f"one completion did not fit in memory ({reason}); lower max_tokens")
            self.budgets[budget] = len(part) // 2 * length
        return drawn

    def restart(self) -> None:
        """Do nothing: this samples with the loaded weights directly."""

    def close(self) -> None:
        """Do nothing: there is no server."""

    def _count(self, prompts: Sequence[Ids], completed: Completed) -> None:
        lengths = np.array([len(one.tokens) for one in completed.drawn])
        self.work.add(
            self._costs.prefill([len(ids) for ids in set(prompts)], 1, completed.prefill_s),
            self._costs.decode(np.array([len(ids) for ids in prompts]), lengths, completed.decode_s),
        )
