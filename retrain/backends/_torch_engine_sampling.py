"""Keeps a generation engine's adapters those of the policy, and its log-probabilities honest."""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from retrain.backends import BackendSpec, Sampling
from retrain.backends._torch_batches import lay_out
from retrain.backends._torch_engine import Engine, Request
from retrain.backends._torch_files import ADAPTER, save_weights
from retrain.backends._torch_loading import Policy
from retrain.backends._torch_options import LocalOptions
from retrain.backends._torch_sampling import Drawn
from retrain.backends._torch_training import evaluate
from retrain.errors import RunFailedError
from retrain.rollouts import Prompt, Rollout, TrainingSample

TOLERANCE_NATS = 0.2  # mean over tokens; kernels and bfloat16 stay an order of magnitude below
CHECKED_TOKENS = 256

Ids = tuple[int, ...]


class EngineSampler:
    """Samples by a server, which samples with the policy's latest adapters."""

    def __init__(self, spec: BackendSpec, options: LocalOptions, policy: Policy) -> None:
        self._engine = Engine(options, spec.model, spec.permit, spec.observe_call)
        self._policy = policy
        self._stop = options.stop
        parent = options.engine_adapters or None
        if parent:
            Path(parent).mkdir(parents=True, exist_ok=True)
        self._directory = Path(tempfile.mkdtemp(prefix="retrain-adapters-", dir=parent))
        # a server refuses a name that it knows, and an earlier attempt may have used ours
        self._name = f"{re.sub(r'[^A-Za-z0-9._-]', '-', spec.run_name) or 'run'}-{secrets.token_hex(4)}"
        self._loaded, self._loads, self._version = "", 0, -1
        self._checked = False

    def complete(
        self,
        prompts: Sequence[Ids],
        end_ids: Ids,
        sampling: Sampling,
        version: int,
        generator: torch.Generator,
    ) -> list[Drawn]:
        """Sample each prompt's group, prompt after prompt."""
        self._bring_up_to(version)
        room = self._policy.context - max(map(len, prompts))
        seed = int(torch.randint(2**31, (1,), generator=generator, device=generator.device))
        request = Request(
            prompts=prompts,
            count=sampling.group_size,
            max_tokens=min(sampling.max_tokens, room),
            temperature=sampling.temperature,
            end_ids=end_ids,
            stop=self._stop,
            seed=seed,
        )
        drawn = self._engine.complete(request)
        self._check_known(drawn)
        if not self._checked and sampling.temperature > 0:
            rows = [prompt for prompt in prompts for _ in range(sampling.group_size)]
            self._check(rows, drawn, sampling.temperature, generator.device)
            self._checked = True
        return drawn

    def forget(self) -> None:
        """Have the adapters loaded again before the next call: they were replaced."""
        self._version = -1

    def close(self) -> None:
        """Give the server its memory back, and drop the adapters' files."""
        with contextlib.suppress(OSError):
            self._engine.release()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _bring_up_to(self, version: int) -> None:
        if version == self._version:
            return
        self._loads += 1
        name = f"{self._name}-{self._loads}"
        directory = self._directory / name
        directory.mkdir()
        save_weights(directory, self._policy)
        self._engine.use_adapter(name, str((directory / ADAPTER).absolute()))
        if self._loaded:
            shutil.rmtree(self._directory / self._loaded, ignore_errors=True)
        self._loaded, self._version = name, version

    def _check_known(self, drawn: Sequence[Drawn]) -> None:
        """Refuse tokens that the model has no embedding for: a GPU would take the process along."""
        known = len(self._policy.causal.get_input_embeddings().weight)
        if unknown := [token for one in drawn for token in one.tokens if not 0 <= token < known]:
            raise RunFailedError(
                f"the generation engine sampled token {unknown[0]}, and this model knows {known}; "
                "check that it serves the same model"
            )

    def _check(
        self, prompts: Sequence[Ids], drawn: Sequence[Drawn], temperature: float, device: torch.device
    ) -> None:
        """Compare the server's log-probabilities with our own, once."""
        first = _first_tokens(prompts, drawn)
        theirs = np.concatenate([sample.rollout.logprobs for _, sample in first])
        texts = {sample.rollout.prompt.text: ids for ids, sample in first}
        batches = [lay_out([sample], texts, 1, device)[0] for _, sample in first]
        apart = {}
        for at in (temperature, 1.0):
            with torch.no_grad():
                ours = torch.cat([evaluate(self._policy, batch, at).logprobs for batch in batches])
            apart[at] = float(np.abs(ours.double().cpu().numpy() - theirs).mean())
        if apart[1.0] < apart[temperature] / 2:
            raise RunFailedError(
                "the generation engine reports log-probabilities before the temperature is applied; start it "
                "with processed ones (vLLM: --logprobs-mode processed_logprobs)"
            )
        if apart[temperature] <= TOLERANCE_NATS:
            return
        raise RunFailedError(
            f"the generation engine's log-probabilities are {apart[temperature]:.2f} nats per token from "
            "this model's; check that it serves the same weights and applies the adapters"
        )


def _first_tokens(prompts: Sequence[Ids], drawn: Sequence[Drawn]) -> list[tuple[Ids, TrainingSample]]:
    chosen: list[tuple[Ids, TrainingSample]] = []
    tokens = 0
    for number, (ids, one) in enumerate(zip(prompts, drawn, strict=True)):
        rollout = Rollout(Prompt(number, str(number), ""), "", one.tokens, one.logprobs, (), not one.ended)
        chosen.append((ids, TrainingSample(rollout, np.zeros(len(one.tokens)), 1.0)))
        tokens += len(one.tokens)
        if tokens >= CHECKED_TOKENS:
            break
    return chosen
