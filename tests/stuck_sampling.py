"""Backends whose sampling cannot be interrupted, in runs that stop or fail meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from retrain.backends import BackendSpec, Sampling
from retrain.backends.numpy import connect as connect_policy
from retrain.backends.numpy.policy import NumpyBackend
from retrain.base.errors import RunFailedError
from retrain.base.rollouts import Group, Prompt

AFTER_SAVING: list[str] = []  # threads that sampled once a checkpoint was written


def connect(spec: BackendSpec) -> NumpyBackend:
    """Note who samples after a checkpoint."""
    policy, is_saved = connect_policy(spec), threading.Event()
    sample, save = policy.sample, policy.save
    AFTER_SAVING.clear()

    def sample_noted(prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        AFTER_SAVING.extend([threading.current_thread().name] * is_saved.is_set())
        return sample(prompts, how)

    def save_noted(directory: Path) -> None:
        is_saved.set()
        save(directory)

    policy.sample, policy.save = sample_noted, save_noted  # type: ignore[method-assign]
    return policy


def connect_beside_torch(spec: BackendSpec) -> NumpyBackend:
    """Sample in PyTorch's own code for longer than is waited for, while the first update fails."""
    import torch

    policy, calls, is_stuck = connect_policy(spec), count(), threading.Event()
    policy.info = replace(policy.info, overlaps=True)
    sample, numbers = policy.sample, torch.ones(600, 600)

    def sample_slowly(prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        is_ahead = threading.current_thread() is not threading.main_thread()  # an evaluation is not
        if is_ahead and next(calls):  # what the first step takes is sampled at once
            is_stuck.set()
            until = time.monotonic() + 60
            while time.monotonic() < until:
                numbers @ numbers
        return sample(prompts, how)

    def update(*_: Any) -> NoReturn:
        is_stuck.wait(60)
        raise RunFailedError("the update failed")

    policy.sample, policy.update = sample_slowly, update  # type: ignore[method-assign]
    return policy
