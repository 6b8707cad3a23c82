"""A backend that users could have: the embedded policy on a device that holds few prompts at a time."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.backends import BackendSpec, Sampling
from retrain.backends.numpy import connect as connect_policy
from retrain.backends.numpy.policy import NumpyBackend
from retrain.base.errors import BackendMemoryError
from retrain.base.rollouts import Group, Prompt

ROOM = 5  # prompts


def connect(spec: BackendSpec) -> NumpyBackend:
    policy = connect_policy(spec)
    sample = policy.sample

    def sample_within(prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if len(prompts) > ROOM:
            raise BackendMemoryError(f"{len(prompts)} prompts did not fit")
        return sample(prompts, sampling)

    policy.sample = sample_within  # type: ignore[method-assign]
    return policy
