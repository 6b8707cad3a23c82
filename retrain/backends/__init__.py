"""Backends: where a policy lives, samples and learns.

A plugin is one file or folder with `connect(spec) -> Backend`; keyword-only parameters are the keys of
`[backend.options]`, which `spec.options` holds as well. `connect` raises a ConfigError for a wrong option, a
missing package or an unusable model, and an InfrastructureError for a server that cannot be reached. One that
calls an API holds `spec.permit()` (with `with` or `async with`) around every call in flight, and reports
each to `spec.observe_call`, if set.

Shared parts: `options`, `text`, `rows`, `objective`, `metering`, `progress`, `saved`,
`engines` (servers that sample) and `squeeze` (reduces the rank of an adapter).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from retrain.base import registry
from retrain.base.errors import ConfigError, Problem
from retrain.base.registry import PluginSpec
from retrain.base.rollouts import (
    CallForm,
    Floats,
    Group,
    Loss,
    NextTurn,
    Prompt,
    Rollout,
    TeacherScores,
    TrainingSample,
)
from retrain.records.text import gib

if TYPE_CHECKING:
    from retrain.backends.metering import Meter, SamplingWork, Work
    from retrain.backends.progress import BackendProgress
    from retrain.backends.rows import TurnFeed
    from retrain.backends.text import Schemas
    from retrain.base.json_lines import Demonstration
    from retrain.config.prices import Price
    from retrain.config.schema import Config
    from retrain.control.rules.concurrency_limit import CallFacts
    from retrain.plugins.tasks import Task
    from retrain.records.row_parts import EngineUse
    from retrain.records.step_row import Mismatch

Table: TypeAlias = Mapping[str, Any]
RankCall: TypeAlias = Callable[[Callable[[int], object]], Any]  # gets what tells rank 0 a number


class Permit(AbstractContextManager[object], AbstractAsyncContextManager[object], Protocol):
    """The right to make one API call: acquired on entry, released on exit."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that a run takes on its device; sampling and training take turns."""

    device: str  # cpu (the process's memory) or cuda (one GPU's)
    held: Mapping[str, int]  # all the time, by what takes it
    sampling: int  # key-value cache and logits
    training: int  # activations and logits
    least: int  # the larger of the two with the smallest batches
    movable: int = 0  # of a teacher's weights on a GPU, what the machine's memory could hold
    is_moved: bool = False  # it does, and `held` is without it

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + max(self.sampling, self.training)

    @property
    def smallest(self) -> int:
        """What it takes if batches are cut as far as they can be."""
        return sum(self.held.values()) + self.least

    def parts(self) -> str:
        """Return what takes the memory, as words."""
        each = {**self.held, "KV cache": self.sampling, "activations": self.training}
        words = ", ".join(f"{name} {gib(size)}" for name, size in each.items() if size)
        offloaded = f", and {gib(self.movable)} of the teacher in this machine's memory"
        return words + (offloaded if self.is_moved else "")

    def remedy(self) -> str:
        """Return what a run would need less memory with, as words."""
        model = "model or teacher" if self.held.get("teacher") else "model"
        words = f"use a smaller {model}, lower max_tokens, or set "
        words += "[backend.options].gradient_checkpointing = true"
        if self.movable and not self.is_moved:
            words += f", or teacher_offload = true, which leaves {gib(self.movable)} in this machine's memory"
        return words


@dataclass(frozen=True, slots=True)
class Devices:
    """What a run on several devices asks a cluster for."""

    cores: int = 0  # of each node; 0, as of GPUs: only what the campaign's table asks for
    gpus: int = 0  # of each node
    nodes: int = 1

    @classmethod
    def most(cls, of_runs: Iterable[Devices]) -> Devices:
        """Return what suffices for every run."""
        cores, gpus, nodes = zip(*((run.cores, run.gpus, run.nodes) for run in of_runs), strict=True)
        return cls(max(cores), max(gpus), max(nodes))


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """How many devices of this machine a run uses, of those that it could."""

    count: int
    there: int
    kind: str  # GPU or core


@dataclass(frozen=True, slots=True)
class ServerFinding:
    """What is known of one property of a run's server, in words."""

    what: str
    is_right: bool | None  # None: not known
    found: str
    then: str = ""  # what follows of it, or what to do


@dataclass(frozen=True, slots=True)
class Trainers:
    """Runs that train on this machine at a time."""

    each: MemoryEstimate
    count: int

    def to_come(self, count: int, *, in_turn: bool) -> int:
        """Return the bytes that `count` runs on one device take, beyond the model that this one has loaded.

        In turn with an engine, what they take only while they train does not count.
        """
        held = self.each.held
        loaded = sum(size for name, size in held.items() if name != "optimizer")
        return count * (sum(held.values()) if in_turn else self.each.peak) - loaded


def shows_no_functions(backend: str) -> Problem:
    """Return the problem with functions that a chat template would have to show."""
    return Problem(
        ("environment", "environment"),
        f"backend {backend!r} cannot show functions to its policy; set [environment.options].calls = "
        '"python", with which a turn such as add(2, 3) is a call',
    )


def functions_of(config: Config) -> Schemas:
    """Return the schemas of the functions that a run's environment has the policy call."""
    table, schemas = config.environment, None
    with suppress(ConfigError):  # a problem of the environment, which is told as such
        schemas = registry.ask("environments", table.environment, "tools", table.options)
    return schemas or ()


def _new_meter() -> Meter:
    from retrain.backends.metering import Meter  # not at the top: planning counts nothing

    return Meter()


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend needs to know about its run."""

    seed: int
    model: str = ""
    base_url: str = ""
    lora_rank: int = 32
    alphabet: str = ""  # characters of the task's prompts and answers
    options: Mapping[str, Any] = field(default_factory=dict)  # [backend.options], checked by the backend
    permit: Callable[[], Permit] = nullcontext  # the right to one API call in flight
    observe_call: Callable[[CallFacts], None] | None = None  # after each API call, if permits adapt
    observe: Callable[[BackendProgress], None] = lambda _: None  # at any time, from any thread
    is_leaving: Callable[[], bool] = lambda: False  # the run stops or ends: `sample` may be interrupted
    memory: Callable[[], Trainers | None] = lambda: None  # what the campaign's runs on this machine take
    run_name: str = ""
    notes: Path | None = None  # directory for files that the run's next attempt is to find
    campaign: Path | None = None  # directory of the run's campaign
    meter: Meter = field(default_factory=_new_meter)  # counts what calls are billed, with `BackendInfo.bills`


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample: temperature 0 means greedy.

    With a `seed`, the call has a random generator of its own; with None, the run's, kept in checkpoints.
    """

    group_size: int
    max_tokens: int
    temperature: float
    seed: int | None = None
    enough: int = 0  # groups that suffice, so that the slowest prompts may be left out; 0: all
    due: int = 0  # so many of the first prompts must be among them
    evaluates: bool = False  # nothing is trained on it, and it must not change how training samples


@dataclass(frozen=True, slots=True)
class Optimization:
    """How to take one optimizer step."""

    lr: float
    max_grad_norm: float = 1.0
    entropy_bonus: float = 0.0
    kl_coef: float = 0.0  # weight of the KL divergence to the policy before training
    micro_batches: int = 1  # parts that the step's samples are split into; gradients are accumulated
    temperature: float = 1.0  # of the sampler, so that log-probabilities are compared at the same temperature
    gpu_fraction: float = 1.0  # share of a GPU's memory that this step may use
    wants_moments: bool = False  # measure the inputs of the gradient noise scale, if the backend can
    is_last: bool = True  # of the steps on this batch; before it no sampler needs the updated policy


@dataclass(frozen=True, slots=True, eq=False)
class GradientMoments:
    """Inputs to the estimate of the gradient noise scale, per parameter group.

    Gradients of n parts (micro-batches or replicas) of the step, each the mean over its part:
    `local_sqr_norms` (n, groups) their squared norms, `mean_sqr_norm` (groups,) of their mean. A
    part is weighted by its size. Gradients are divided by the optimizer's preconditioner, if it has one.
    """

    local_sqr_norms: Floats
    mean_sqr_norm: Floats
    consecutive: bool = False  # the parts are this step and the previous one, each with a single part


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Result of one optimizer step."""

    loss: float
    grad_norm: float  # before clipping
    entropy: float  # mean nats per token under the policy before the update
    clip_fraction: float  # share of tokens whose gradient was cut by clipping
    moments: GradientMoments | None = None  # None: not requested, or not known yet
    reference_kl: float | None = None  # nats per token from the policy before training; None: not requested
    approx_kl: float | None = None  # nats per token from the sampler's policy to this one; None if unknown
    mismatch: Mismatch | None = None  # before the update; None if unknown
    teacher_agreement: float | None = None  # share of tokens with the teacher's likeliest one; None: unknown
    memory_fraction: float | None = None  # peak share of the device's memory; None if unknown
    work: Work | None = None  # None if unknown (remote)


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What the planner and the controllers need to know about a backend."""

    parameters: int
    remote: bool = False  # calls an API and takes permits
    bills: bool = False  # counts the tokens of its calls with `BackendSpec.meter`; else the trainer does
    spare_fraction: float = 0.0  # prompts beyond a batch that it is asked for, with `Sampling.enough`
    overlaps: bool = False  # `sample` may be called, even several times, while `update` is running
    extends: bool = False  # `extend` appends turns to a rollout
    answers_turns: bool = False  # `sample_turns` answers each turn when it ends
    deterministic: bool = False  # same seed and steps -> same bits, also after a resume
    # of each rank that `call_ranks` calls, the cores for programs; 0 where they are an earlier rank's
    rank_cores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TeacherSpec:
    """What a backend needs to know to open a teacher."""

    name: str  # `[teacher].teacher`: a directory, another name that the backend knows, or SELF
    temperature: float  # the sampler's, at which log-probabilities are compared
    is_whole: bool  # `update` compares whole distributions


SELF = "self"  # the name of a teacher that is the policy, as it was at its start or the last `refresh`
ENGINE = "engine"  # the name of a teacher that is a model at a server


class Teacher(ABC):
    """A model that scores tokens and is not trained. One thread calls it, between sampling and `update`."""

    @abstractmethod
    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        """Score the sampled tokens of each rollout; those that an environment gave are only read.

        A rollout's prompt may be another than its tokens were sampled after (`[teacher].prompt`): it is
        encoded like any prompt, and the rollout's tokens follow as they are, never tokenised again.

        Raises:
            BackendMemoryError: did not fit in memory, however small its parts.
            InfrastructureError: a server does not answer; another attempt might succeed.
            NonFiniteError: a log-probability is not finite.
        """

    def refresh(self) -> None:
        """Become the policy as it is now, of a teacher that is SELF; `Backend.save` keeps it."""
        raise ConfigError("[teacher].refresh: only a teacher that is the policy itself can follow it")

    def close(self) -> None:  # noqa: B027 - nothing to release
        """Release what it holds; safe to call twice."""


class Backend(ABC):
    """A policy that samples and trains. One object per run; its methods are plain functions.

    One thread calls it at a time, unless `info` says otherwise. What is not abstract here is optional: a run
    goes without what it is for, or ends with its ConfigError.
    """

    info: BackendInfo

    @abstractmethod
    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample `sampling.group_size` rollouts for each prompt, in the prompts' order.

        Raises:
            NonFiniteError: the policy's log-probabilities are not finite.
            BackendMemoryError: did not fit in memory.
            ConfigError: a prompt leaves no room for a completion.
            InterruptedRunError: the run stops; only sampling to train on ends early.
        """

    @abstractmethod
    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one optimizer step on `samples`, at least one.

        Raises:
            NonFiniteError: the loss or gradient is not finite; weights are unchanged.
            BackendMemoryError: did not fit in memory; weights are unchanged.
        """

    @abstractmethod
    def save(self, directory: Path) -> None:
        """Write weights, optimizer and every RNG into an existing, empty directory."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; later steps equal those of an uninterrupted run.

        Raises:
            RecordsError: unreadable, or saved by another policy.
        """

    def close(self) -> None:  # noqa: B027 - nothing to release
        """Release devices and connections; safe to call twice."""

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:  # noqa: B027 - all fit
        """Raise a ConfigError if a prompt leaves no room for a completion; before the first step."""

    def check_run(self, config: Config) -> None:  # noqa: B027 - it can be taken
        """Raise a ConfigError if what was found out when connecting stands against the run; before a step."""

    def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        """Sample another turn of each rollout, None where the context has no room; with `info.extends`.

        The rollout keeps its tokens and gets those of the turn's messages as `given`
        (`retrain.backends.text.extended`).
        """
        raise NotImplementedError

    def sample_turns(self, feed: TurnFeed, sampling: Sampling) -> None:
        """Sample turns as they are asked for and answer each when it ends; with `info.answers_turns`."""
        raise NotImplementedError

    def check_turns(self) -> None:  # noqa: B027 - they can
        """Raise a ConfigError if `extend` cannot append turns to those of the present policy."""

    def offer_tools(self, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
        """Show an environment's functions to the policy from now on; return how it writes calls.

        Raises:
            ConfigError: it cannot be shown any, or, if turns are extended, not their results.
        """
        raise ConfigError(str(shows_no_functions(type(self).__name__)))

    def call_form(self, schemas: Schemas) -> CallForm:
        """Return how the policy writes calls of functions that a prompt shows; errors as `offer_tools`."""
        raise ConfigError(str(shows_no_functions(type(self).__name__)))

    def read(self, rollout: Rollout) -> tuple[int, ...] | None:
        """Return the token ids of a rollout, its prompt's first; None: not told."""
        return None

    def shown(self, tokens: tuple[int, ...]) -> str | None:
        """Return the text of token ids; None: not told, so that no program can send any."""
        return None

    def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        """Return the rollouts of written completions, for `[warmup]`.

        They have the end token, and log-probabilities of 0.
        """
        raise ConfigError(
            f"[warmup].steps: {type(self).__name__} cannot train on given completions; use 0, or implement "
            "`written` and `reset_optimizer` of retrain.Backend"
        )

    def reset_optimizer(self) -> None:
        """Clear the optimizer's moments and step count, after `[warmup]`."""
        raise NotImplementedError

    def start_from(self, adapter: str, *, is_reference: bool) -> None:
        """Replace the weights by those of `[model].adapter`; also the KL term's, if `is_reference`."""
        raise ConfigError(f"[model].adapter: {type(self).__name__} cannot start from one; leave it out")

    def has_start(self) -> bool:
        """Whether `start_from`, or the checkpoint that was loaded, set the KL term's reference."""
        return False

    def open_teacher(self, teacher: TeacherSpec) -> Teacher:
        """Return a teacher with the policy's tokens, ready to score; called before the first step and `load`.

        Raises:
            ConfigError: there is none of this name, or its tokens are not the policy's.
        """
        raise ConfigError(f"[teacher].teacher: {type(self).__name__} cannot learn from one; leave it out")

    def call_ranks(self, calls: Sequence[RankCall], told: Callable[[int], object]) -> list[Any]:
        """Return what a call gives on each rank of `info.rank_cores`, the first one in this process.

        A call can be pickled; the others pass what it tells meanwhile to `told`, here. No other method is
        called at the same time.
        """
        raise NotImplementedError

    def take_sampling_work(self) -> SamplingWork | None:
        """Return the cost of sampling since the last call, from any thread; None: not known."""
        return None

    def take_engine_use(self) -> EngineUse | None:
        """Return the load of the server that samples, since the last call; None without one."""
        return None

    def out_s(self) -> float | None:
        """Return how long so far an API had paused the run's calls or was down; None: not known."""
        return None


def other_token(own: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """Return the first token in which a teacher's vocabulary differs; "" if none does."""
    if own == theirs:
        return ""
    ours, others = ({number: token for token, number in vocabulary.items()} for vocabulary in (own, theirs))
    number = min(n for n in {*ours, *others} if ours.get(n) != others.get(n))
    words = [repr(each[number]) if number in each else "missing" for each in (others, ours)]
    return (
        f"token {number} is {words[0]} in the teacher and {words[1]} in [model].model; name a teacher with "
        "the model's tokenizer"
    )


@dataclass(frozen=True, slots=True)
class Exported:
    """Adapters in peft's format, or a whole model in transformers'; names are hub ids or directories."""

    base: str  # the model without adapters
    tokenizer: str
    revision: str = ""  # of the base model at its hub; "" for the default branch
    dtype: str = ""  # of the base model's weights in the run, such as "float32"; "" if not known
    is_whole: bool = False  # every parameter was trained: there are no adapters
    unmergeable: str = ""  # why adapters and base model cannot become one model; "" if they can


class BackendPlugin:
    """What the file of a backend may define beside `connect`, each as here without it.

    They are asked before a run, so that they import neither torch nor an API's SDK. `options` is the table
    `[backend.options]`.
    """

    @staticmethod
    def check_options(options: Table) -> Iterable[Problem | str]:
        """Return the problems of the table, each as `key: what`, whenever a file is read."""
        return ()

    @staticmethod
    def check(config: Config, task: Task) -> Iterable[Problem | str]:
        """Return what would stop a run, each as `[section].key: what`, before a campaign begins.

        `task` has the prompts of training and evaluations; none if only the machine is checked.
        """
        return ()

    @staticmethod
    def advise(config: Config) -> Iterable[str]:
        """Return advice about a run."""
        return ()

    @staticmethod
    def takes_permits(options: Table) -> bool:
        """Whether calls hold permits."""
        return True

    @staticmethod
    def reports_calls(options: Table) -> bool:
        """Whether calls that hold permits report to `spec.observe_call`, so that their number can adapt."""
        return False

    @staticmethod
    def wants_gpu(options: Table) -> int:
        """Return how many GPUs a run uses of those that it is assigned; fewer if there are not so many."""
        return 0

    @staticmethod
    def devices(options: Table) -> Devices:
        """Return what a run needs of a cluster because it uses several devices."""
        return Devices()

    @staticmethod
    def device_use(options: Table) -> DeviceUse | None:
        """Return how many devices of this machine a run uses; None if runs cannot choose their number."""
        return None

    @staticmethod
    def computes_here(options: Table) -> bool:
        """Whether steps keep CPU cores busy."""
        return False

    @staticmethod
    def samples_as_it_trains(options: Table) -> bool:
        """Whether a token has the same probability in sampling and training, but for float32's rounding."""
        return False

    @staticmethod
    def spells(options: Table) -> bool:
        """Whether a token is a character of the task's alphabet, so that a completion is only the answer."""
        return False

    @staticmethod
    def takes_adapters(options: Table) -> bool:
        """Whether a run can start from `[model].adapter`; `check` then tells from which."""
        return False

    @staticmethod
    def teacher_modes(options: Table) -> Collection[str]:
        """Return the modes of `[teacher]` that it can learn by, none without teachers.

        `check` then finds what is wrong with the run's teacher: that it is missing, or the first token that
        differs. `memory` counts it.
        """
        return ()

    @staticmethod
    def memory(config: Config, prompts: Sequence[Prompt]) -> MemoryEstimate | None:
        """Return what memory a run takes; None if not known."""
        return None

    @staticmethod
    def servers(config: Config) -> Mapping[str, str]:
        """Return the address of each server that must answer before a run, with the key that names it."""
        return {}

    @staticmethod
    def server_findings(config: Config, *, asks: bool) -> Iterable[ServerFinding]:
        """Return how the run's server behaves where others of its kind differ, as far as is known.

        With `asks`, the server is asked, which it may bill.
        """
        return ()

    @staticmethod
    def bills(options: Table) -> bool:
        """Whether an API bills each token that calls read and sample, beside those that are trained on."""
        return False

    @staticmethod
    def price(config: Config) -> Price | None:
        """Return what the tokens of a run's model cost; None if not known."""
        return None

    @staticmethod
    def export(config: Config, checkpoint: Path, directory: Path) -> Exported:
        """Write a checkpoint's weights into a directory, as other tools read them."""
        built_in = registry.built_in_names("backends")
        able = ", ".join(name for name in built_in if plugin_of(name).export is not BackendPlugin.export)
        raise ConfigError(
            f"backend {config.backend.backend!r}: its policies have no format that others load; runs of "
            f"these can be published: {able}"
        )

    @staticmethod
    def delete_states(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
        """Delete saved states at the API; return each one's problem, "" if it was deleted."""
        name = config.backend.backend
        raise ConfigError(f"[backend].backend: {name!r} cannot delete states; remove them by hand")


SPEC = PluginSpec(
    "backend", "connect", ("spec",), members=("info",), functions=BackendPlugin, judge="check_options"
)


def always(options: Table) -> bool:
    """Return True: the answer of a backend of which a claim holds whatever its options are."""
    return True


def plugin_of(name: str) -> BackendPlugin:
    """Return what the file of a backend defines, with the defaults for the rest."""
    functions: BackendPlugin = registry.plugin("backends", name).functions
    return functions


def connected(name: str, spec: BackendSpec) -> Backend:
    """Return a backend that is connected as a run's; a ConfigError if what its plugin returns is none."""
    backend = registry.bound("backends", name, spec.options)(spec)
    methods = [each for each, value in vars(Backend).items() if callable(value)]
    coroutines = [each for each in methods if inspect.iscoroutinefunction(getattr(backend, each, None))]
    if inspect.isawaitable(backend) or coroutines:
        if inspect.iscoroutine(backend):
            backend.close()
        raise ConfigError(
            f"{name!r}: {', '.join(coroutines) or 'connect'} is a coroutine function; `connect` and a "
            "backend's methods are plain functions, which wait for coroutines in an event loop of their own"
        )
    if not isinstance(backend, Backend):
        what = f"{name!r} returned a {type(backend).__name__}, which is no retrain.Backend"
        raise ConfigError(f"{what}; derive its class from that one, see the page on extending for a backend")
    return registry.check_made("backends", name, backend)
