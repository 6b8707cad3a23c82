"""Backends: where a policy lives, samples and learns.

A plugin is one file or folder with `connect(spec) -> Backend`; keyword-only parameters are the keys of
`[backend.options]`, which `spec.options` holds as well. Every method may be a plain function or a
coroutine function; the trainer awaits what needs it, so a local numpy policy and a remote asynchronous API
look the same. A backend that calls an API holds `spec.permit()` (with `with` or `async with`) around
every call in flight, and reports each call to `spec.observe_call`, if set.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

from retrain.controllers.permits import CallFacts
from retrain.registry import Hook, PluginSpec
from retrain.rollouts import Floats, Group, Loss, Prompt, TrainingSample

SPEC = PluginSpec(
    "backend",
    "connect",
    ("spec",),
    members=("info", "sample", "update", "save", "load", "close"),
    hooks=(
        Hook("check_options", ("options",), "problems of [backend.options], as `key: what is wrong`"),
        Hook(
            "takes_permits", ("options",), "whether calls hold permits; without this hook they are taken to"
        ),
        Hook("wants_gpu", ("options",), "whether a run takes any GPU that it is given"),
        Hook("check_run", ("config",), "problems of a run's configuration, as `[section].key: what`"),
        Hook("check_prompts", ("config", "prompts"), "problems of a task's prompts"),
        Hook("check_alphabet", ("config", "prompts", "alphabet"), "problems of a task's characters"),
        Hook("advise_run", ("config",), "what to consider before a run"),
        Hook("servers", ("config",), "address -> key, of each server that must answer before a run"),
    ),
    judge="check_options",
)


T = TypeVar("T")
MaybeAwaitable: TypeAlias = T | Awaitable[T]


class Permit(AbstractContextManager[object], AbstractAsyncContextManager[object], Protocol):
    """The right to one API call: waited for on entry, given back on exit."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend needs to know of its run."""

    seed: int
    model: str = ""
    base_url: str = ""
    lora_rank: int = 32
    alphabet: str = ""  # characters of the task's prompts and answers
    options: Mapping[str, Any] = field(default_factory=dict)  # [backend.options], checked by the backend
    permit: Callable[[], Permit] = nullcontext  # the right to one API call in flight
    # called after each API call if the number of permits adapts, else None
    observe_call: Callable[[CallFacts], None] | None = None
    run_name: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: temperature 0 means greedy.

    A `seed` asks for random numbers of its own, so that this call changes no later one; None: those of
    the run, whose state is in the checkpoint.
    """

    group_size: int
    max_tokens: int
    temperature: float
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Optimization:
    """How to take one optimizer step."""

    lr: float
    max_grad_norm: float = 1.0
    entropy_bonus: float = 0.0
    kl_coef: float = 0.0  # weight of the KL divergence to the policy before training
    micro_batches: int = 1  # the step's samples in this many parts, gradients accumulated
    temperature: float = 1.0  # the sampler's: log-probabilities are compared at the same temperature
    gpu_fraction: float = 1.0  # share of a GPU's memory that this step may use
    wants_moments: bool = False  # measure what the gradient noise scale needs, if the backend can


@dataclass(frozen=True, slots=True, eq=False)
class GradientMoments:
    """What the gradient noise scale is estimated from, per parameter group.

    Gradients of n parts (micro-batches or replicas) of the step, each the mean over its part:
    `local_sqr_norms` (n, groups) their squared norms, `mean_sqr_norm` (groups,) of their mean. A
    part of unequal size counts by its size. Divided by the optimizer's preconditioner, if it has one.
    """

    local_sqr_norms: Floats
    mean_sqr_norm: Floats
    consecutive: bool = False  # the parts are this step and the update before, as each had a single one


@dataclass(frozen=True, slots=True)
class Work:
    """What one phase of a step cost: what the model's mathematics asks for, and the time it took.

    Attributes:
        tokens: that the model ran over, padding left out.
        flops: 2 per weight and token forward, 6 in training; attention's quadratic part left out.
        bytes_moved: the weights once per pass, and every cached token each time it is read.
        time_s: seconds.
    """

    tokens: int = 0
    flops: float = 0.0
    bytes_moved: float = 0.0
    time_s: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.flops + other.flops,
            self.bytes_moved + other.bytes_moved,
            self.time_s + other.time_s,
        )


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """What sampling cost: running prompts (each distinct one once), then drawing tokens."""

    prefill: Work
    decode: Work


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What one optimizer step did."""

    loss: float
    grad_norm: float  # before clipping
    entropy: float  # mean nats per token under the policy that was updated
    clip_fraction: float  # share of tokens whose gradient was cut by clipping
    moments: GradientMoments | None = None  # None: not asked for, or not known yet
    reference_kl: float | None = None  # nats per token from the policy before training; None: not asked for
    memory_fraction: float | None = None  # peak share of the device's memory; None if unknown
    work: Work | None = None  # None if unknown (remote)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the planner and the controllers need to know of a backend."""

    parameters: int
    remote: bool = False  # calls an API and takes permits
    overlaps: bool = False  # `sample` may be called, also several times, while `update` is under way
    deterministic: bool = False  # same seed and steps -> same bits, also after a resume


class Backend(Protocol):
    """A policy that samples and learns. One object per run, used by one thread at a time.

    It may also have `check_prompts(prompts)`, which refuses before the first step those that leave no
    room for a completion, and `take_sampling_work() -> SamplingWork`, what sampling cost since the last
    call (from any thread), for roofline hints. `[warmup]` needs two more methods:
    `written(demonstrations) -> list[Rollout]` returns written completions as rollouts, with the end token and
    log-probabilities 0, and `reset_optimizer()` clears its moments and step count.
    """

    info: BackendInfo

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> MaybeAwaitable[list[Group]]:
        """Sample `sampling.group_size` rollouts for each prompt, in the prompts' order."""
        ...

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> MaybeAwaitable[UpdateStats]:
        """Take one optimizer step on `samples`.

        Raises:
            NonFiniteError: the loss or gradient is not finite; weights are unchanged.
            BackendMemoryError: did not fit in memory; weights are unchanged.
        """
        ...

    def save(self, directory: Path) -> MaybeAwaitable[None]:
        """Write weights, optimizer and every RNG into an existing, empty directory."""
        ...

    def load(self, directory: Path) -> MaybeAwaitable[None]:
        """Restore what `save` wrote: later steps are those of an undisturbed run."""
        ...

    def close(self) -> MaybeAwaitable[None]:
        """Release devices and connections; safe to call twice."""
        ...
