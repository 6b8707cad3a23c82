"""A teacher of the local backend: a model, a finished run, or the policy itself, on the policy's device.

Where teacher and policy are adapters of one base, its frozen weights are there once. Others can be offloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate import cpu_offload
from peft import PeftModel

from retrain.backends import BackendSpec, Teacher, TeacherSpec, other_token
from retrain.backends.engines import Ids
from retrain.backends.local import LocalOptions
from retrain.backends.local.loading import Policy, Tensors, is_out_of_memory, load, shorten_forwards
from retrain.backends.local.micro_batches import MicroBatch, lay_out
from retrain.backends.local.model_files import teacher_files
from retrain.backends.local.training import Whole, evaluate, predicting_states, to_numpy
from retrain.base.errors import (
    BackendMemoryError,
    ConfigError,
    InfrastructureError,
    NonFiniteError,
    first_line,
)
from retrain.base.extras import quiet_transformers
from retrain.base.rollouts import Floats, Ints, Prompt, Rollout, TeacherScores, TrainingSample


def load_teacher(
    name: str, spec: BackendSpec, options: LocalOptions, policy: Policy, tokenizer: Any
) -> Policy:
    """Return the frozen model of a teacher; a ConfigError if there is none, or its tokens are others."""
    files, is_offloaded = teacher_files(name), False
    has_base = policy.adapters is not None and not options.shard and files.is_on(spec.model, options.revision)
    if has_base:
        copied = policy.with_own_adapters().adapters
        assert copied is not None
        causal, context = copied.unload(), policy.context
    else:
        frozen = replace(
            options, lora=False, shard=False, revision=files.revision, gradient_checkpointing=False
        )
        place, is_offloaded = policy.device, options.teacher_offload
        if is_offloaded:
            dtype = str(policy.causal.dtype).removeprefix("torch.")
            place, frozen = torch.device("cpu"), replace(frozen, dtype=dtype)
        try:
            loaded, tokens = load(replace(spec, model=files.model), frozen, place, 0, files.tokenizer)
        except (ConfigError, InfrastructureError, BackendMemoryError) as error:
            words = str(error).replace("[model].model", "[teacher].teacher")
            if isinstance(error, BackendMemoryError) and not is_offloaded:
                words += "; set [backend.options].teacher_offload = true, or name a smaller teacher"
            raise type(error)(words) from error
        if difference := other_token(tokenizer.get_vocab(), tokens.get_vocab()):
            raise ConfigError(f"[teacher].teacher: {difference}")
        causal, context = loaded.causal, loaded.context
    if files.adapter:
        try:
            with quiet_transformers():
                adapted = PeftModel.from_pretrained(causal, str(files.adapter))
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            why = f"{files.adapter} cannot be loaded ({first_line(error)}); name another"
            raise ConfigError(f"[teacher].teacher: {why}") from error
        causal = adapted.get_base_model()
        if not is_offloaded:  # shortened ones would read weights where they no longer are
            shorten_forwards(adapted)
            causal.to(policy.device)
    causal.eval().requires_grad_(False)
    if is_offloaded:
        _offload(causal, policy.device)
    return Policy(causal, None, causal.base_model, context)


def _offload(causal: Any, device: torch.device) -> None:
    """Leave a model's layers in the machine's memory: each is on a device while it computes; all else stays.

    The head is called for a few tokens at a time, and some models read embeddings without calling them.
    """
    classes, inside = [*(causal._no_split_modules or ())], set[torch.nn.Module]()
    for layer in causal.base_model.modules():
        if type(layer).__name__ in classes and layer not in inside:
            inside.update(layer.modules())
            cpu_offload(layer, device, state_dict=layer.state_dict(), preload_module_classes=classes)
    if not inside:
        what = f"transformers does not say which are the layers of {type(causal).__name__}; set it to false"
        raise ConfigError(f"[backend.options].teacher_offload: {what}")
    for tensor in chain(causal.parameters(), causal.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


Scored = tuple[TrainingSample, Floats, Ints, torch.Tensor]


class Itself:
    """The policy as it was, whose frozen weights it shares; without any, a copy that can be offloaded."""

    def __init__(self, origin: Policy, *, offloads: bool) -> None:
        self._origin = origin
        if origin.adapters is not None:
            self.policy = origin.with_own_adapters()
        else:
            moved = {}
            if offloads:  # not copied on the device first
                moved = {
                    id(p): torch.nn.Parameter(p.detach().to("cpu", copy=True))
                    for p in origin.causal.parameters()
                }
            causal = copy.deepcopy(origin.causal, moved)
            self.policy = Policy(causal, None, causal.base_model, origin.context)
        self.weights = self.policy.trainable()  # those that are its own, wherever they are
        self.policy.causal.eval().requires_grad_(False)
        if origin.adapters is None and offloads:
            _offload(self.policy.causal, origin.device)
        self.is_start = True  # as the seed or the model's files determine it

    def follow(self) -> None:
        """Become the policy as it is now."""
        self.become({name: p.detach() for name, p in self._origin.trainable().items()})

    def become(self, weights: Tensors) -> None:
        """Take these weights."""
        self.is_start = False
        with torch.no_grad():
            for name, own in self.weights.items():
                own.copy_(weights[name])


class LocalTeacher(Teacher):
    """A model that scores in micro-batches; with `itself`, the policy as it was."""

    def __init__(
        self,
        spec: TeacherSpec,
        policy: Policy,
        encode: Callable[[Prompt], Ids],
        tokens_at_a_time: int,
        most_shared: int,
        making_room: Callable[[], AbstractContextManager[None]],
        itself: Itself | None = None,
    ) -> None:
        self._spec, self._policy, self._encode = spec, policy, encode
        self._tokens_at_a_time, self._most_shared = tokens_at_a_time, most_shared
        self._making_room, self._itself = making_room, itself

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        prompts = {rollout.prompt: self._encode(rollout.prompt) for rollout in rollouts}
        read = [len(prompts[rollout.prompt]) + rollout.length for rollout in rollouts]
        if max(read) > self._policy.context:
            raise ConfigError(
                f"[teacher].teacher: a prompt with its completion has {max(read)} tokens, and the teacher's "
                f"context is {self._policy.context}; lower max_tokens, or name another"
            )
        # a micro-batch has its own order, by which `group` finds back
        samples = [TrainingSample(one, np.zeros(len(one.tokens)), 0.0, n) for n, one in enumerate(rollouts)]
        scores = {}
        with self._making_room(), torch.no_grad():
            for sample, logprobs, likeliest, states in self._fitting(samples, prompts):
                if not np.isfinite(logprobs).all():
                    raise NonFiniteError(
                        f"[teacher].teacher: {self._spec.name} gives no finite log-probabilities"
                    )
                whole = Whole(self._policy, states.cpu()) if self._spec.is_whole else None
                scores[sample.group] = TeacherScores(logprobs, read[sample.group], likeliest, whole)
        return [scores[number] for number in range(len(rollouts))]

    def refresh(self) -> None:
        if self._itself is None:
            super().refresh()
        else:
            self._itself.follow()

    def _fitting(self, samples: Sequence[TrainingSample], prompts: Mapping[Prompt, Ids]) -> list[Scored]:
        """Return what each sample's tokens get, in micro-batches that are halved until they fit."""
        while True:
            batches = lay_out(samples, prompts, self._tokens_at_a_time, self._policy, self._most_shared)
            try:
                return [*chain.from_iterable(map(self._scored, batches))]
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error)
            longest = max(batch.input_ids.numel() for batch in batches)
            if all(len(batch.samples) == 1 for batch in batches):
                raise BackendMemoryError(
                    f"[teacher].teacher: one sequence of {longest} tokens did not fit in memory beside the "
                    f"policy ({reason}); lower max_tokens, or name a smaller teacher"
                )
            self._tokens_at_a_time = longest // 2

    def _scored(self, batch: MicroBatch) -> list[Scored]:
        states = predicting_states(self._policy, batch)
        logprobs, _, likeliest = evaluate(
            self._policy, states, batch.targets, self._spec.temperature, with_likeliest=True
        )
        ends = np.cumsum([len(sample.rollout.tokens) for sample in batch.samples])[:-1]
        values = (np.split(to_numpy(logprobs), ends), np.split(likeliest.cpu().numpy(), ends))
        return [*zip(batch.samples, *values, states.tensor_split(ends.tolist()), strict=True)]
