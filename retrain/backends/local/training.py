"""Optimizer steps in micro-batches that fit in memory, with the loss's gradient by autograd, and AdamW.

Losses are numpy functions that return value and slope per token; `sum(weight * slope * logprob)` with
constant slopes has exactly the loss's gradient, so every loss runs on every device. Gradients of a step's
parts are summed in float32 regardless of the parameters' dtype, so that parts can be compared.
Source: AdamW, arXiv:1711.05101; clipping, arXiv:1211.5063.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from retrain.backends import GradientMoments, Optimization, UpdateStats
from retrain.backends.engines import Ids
from retrain.backends.local.loading import DeviceMemory, Policy, finished_s, is_out_of_memory
from retrain.backends.local.micro_batches import MicroBatch, lay_out, states_of
from retrain.backends.local.ranks import Ranks, shares
from retrain.backends.metering import ModelCosts
from retrain.backends.objective import Totals, moments_of, split_by_group
from retrain.backends.progress import TrainingProgress
from retrain.base.errors import BackendMemoryError, NonFiniteError
from retrain.base.rollouts import Floats, Loss, Prompt, TrainingSample
from retrain.control.rules.scaling import FIRST_SETTLED_STEP

BETAS, EPSILON = (0.9, 0.999), 1e-8  # Adam's, arXiv:1412.6980
MOMENTS = ("exp_avg", "exp_avg_sq")
PREVIOUS = "previous_gradient."  # prefix of the parameter's name
MASTER = "master."  # prefix of a float32 copy's, or of a float32 weight's
LEAST_LEFT = 1e-6  # probability of all tokens but a teacher's likeliest, which rounding may make negative


@dataclass(slots=True, eq=False)
class Learner:
    """Takes optimizer steps, and remembers the micro-batch size in tokens that fits."""

    policy: Policy
    optimizer: Optimizer
    dropout: Dropout
    memory: DeviceMemory
    costs: ModelCosts
    tokens_at_a_time: int
    checkpointing: bool  # recompute activations
    most_shared: int = 0  # longest sequence of which the prompt can be shared
    ranks: Ranks = field(default_factory=Ranks)
    observe: Callable[[TrainingProgress], None] = lambda _: None

    def update(
        self,
        samples: Sequence[TrainingSample],
        prompts: Mapping[Prompt, Ids],
        loss: Loss,
        optimization: Optimization,
    ) -> UpdateStats:
        """Take one step; if it does not fit in memory, retry with half as many tokens per micro-batch."""
        cut = self._shares(samples, prompts, optimization)
        own, *others = cut
        try:
            while True:
                began_s = time.perf_counter()
                how = loss, optimization, self.tokens_at_a_time, self.optimizer.steps
                commands = [("train", *_sent(share, prompts), *how) for share in others]
                first, theirs = self.ranks.together(commands, partial(self.gradient, own, prompts, *how))
                parts = [first, *theirs]
                reason = next((part.reason for part in parts if part.reason), "")
                try:
                    if not reason:
                        stepped = self._step(parts, [*chain(*cut)], optimization)
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    reason = str(error)
                if not reason:
                    time_s = finished_s(self.policy.device) - began_s
                    return self._stats(samples, parts, optimization, *stepped, time_s)
                self._make_room(parts, reason)  # after `except`, which frees the failed attempt's tensors
        finally:
            self.optimizer.begin()

    def _step(
        self, parts: Sequence[Share], cut: Sequence[Sequence[TrainingSample]], optimization: Optimization
    ) -> tuple[float, GradientMoments | None]:
        """Take the step, whose gradient all ranks have; return its norm before clipping, and the moments."""
        squares = parts[0].squares[: len(cut)]
        of_pieces = [part.measured for part in parts if part.measured]
        whole = Measured.sum(of_pieces or [self.optimizer.measure(squares, cut)])
        if not np.isfinite(whole.square):
            raise NonFiniteError(
                f"the gradient of {', '.join(whole.not_finite[:3])} is not finite; the optimizer step was "
                "not taken, lower lr or check the rewards"
            )
        norm = float(np.sqrt(whole.square))
        scale = optimization.max_grad_norm / norm if norm > optimization.max_grad_norm else 1.0
        self.optimizer.step(optimization.lr, scale)
        return norm, whole.moments

    def gradient(
        self,
        cut: Sequence[Sequence[TrainingSample]],
        prompts: Mapping[Prompt, Ids],
        loss: Loss,
        optimization: Optimization,
        tokens_at_a_time: int,
        step: int,
    ) -> Share:
        """Compute the gradient of a rank's share of a step, and add up those of all ranks at rank 0.

        Nothing is added up unless all of them fit in memory.
        """
        # recomputed layers know no layout, and dropout is drawn for each completion's own prompt
        shared = 0 if self.checkpointing or self.dropout.is_on else self.most_shared
        parts = [lay_out(part, prompts, tokens_at_a_time, self.policy, shared) for part in cut]
        batches = [*chain.from_iterable(parts)]
        totals: list[Totals] = []
        squares: list[float] = []
        measured: Measured | None = None
        self.memory.limit(optimization.gpu_fraction)
        self.optimizer.begin()
        self._set_checkpointing(on=self.checkpointing)

        def run(part: Sequence[MicroBatch]) -> None:
            for batch in part:
                with self.dropout.masks(step, len(totals) * self.ranks.size + self.ranks.rank):
                    totals.append(back_propagate(self.policy, batch, loss, optimization))
                self.optimizer.collect()
                self.observe(TrainingProgress(len(batches), len(totals)))

        reason, has_parts = "", optimization.wants_moments and self.ranks.size == 1
        try:
            with self.policy.together():
                for part in parts:
                    reason = reason or reason_not_to_fit(partial(run, part))
                    if has_parts and not reason:
                        squares.append(self.optimizer.part_norm())
                    self.optimizer.end_part()
            reason = reason or reason_not_to_fit(self.optimizer.complete)
            if is_whole := self.ranks.are_ready(fits=not reason):
                squares += self.optimizer.gather(self.ranks, is_measured=optimization.wants_moments)
                measured = self.optimizer.measured(squares)
        finally:
            self._set_checkpointing(on=False)
        if not is_whole:
            self.optimizer.begin()
            self.memory.free()
        several = [batch.input_ids.numel() for batch in batches if len(batch.samples) > 1]
        return Share(
            totals,
            squares,
            tokens=sum(batch.tokens for batch in batches),
            longest=max((batch.input_ids.numel() for batch in batches), default=0),
            longest_of_several=max(several, default=0),
            memory_fraction=self.memory.peak_fraction(),
            reason=reason,
            measured=measured,
        )

    def _shares(
        self,
        samples: Sequence[TrainingSample],
        prompts: Mapping[Prompt, Ids],
        optimization: Optimization,
    ) -> list[list[list[TrainingSample]]]:
        """Return the parts of each rank: whole groups, of several ranks at most one part each.

        They have about as many tokens. If ranks are the replicas whose gradients are compared, they have as
        many groups: by tokens, the parts would not be drawn alike.
        """
        size = self.ranks.size
        if size == 1:
            return [split_by_group(samples, optimization.micro_batches)]
        if optimization.wants_moments and not self.optimizer.is_cut:
            parts = split_by_group(samples, size)
        else:
            groups = split_by_group(samples, len(samples))
            tokens = [
                sum(len(prompts[s.rollout.prompt]) + s.rollout.length for s in group) for group in groups
            ]
            cut = shares(tokens, [0.0] * size)
            parts = [[*chain.from_iterable(groups[number] for number in numbers)] for numbers in cut]
        of_ranks = [[part] if part else [] for part in parts]
        return [*of_ranks, *([] for _ in range(size - len(of_ranks)))]

    def _stats(
        self,
        samples: Sequence[TrainingSample],
        parts: Sequence[Share],
        optimization: Optimization,
        norm: float,
        moments: GradientMoments | None,
        time_s: float,
    ) -> UpdateStats:
        totals = Totals.sum([*chain.from_iterable(part.totals for part in parts)])
        passes, drawn = sum(len(part.totals) for part in parts), totals.tokens
        tokens, reference = sum(part.tokens for part in parts), optimization.kl_coef > 0
        work = self.costs.train(tokens, drawn, passes, parts=passes, reference=reference)
        fractions = [self.memory.peak_fraction(), *(part.memory_fraction for part in parts[1:])]
        return replace(
            totals.stats(norm, moments, optimization),
            memory_fraction=self.memory.of_ranks(fractions),
            work=replace(work + self.costs.optimize(), time_s=time_s * self.ranks.size),
        )

    def _set_checkpointing(self, *, on: bool) -> None:
        # activations are recomputed in training mode only, in which other layers may add noise
        for layer in self.policy.causal.modules() if self.checkpointing else ():
            if hasattr(layer, "gradient_checkpointing"):
                layer.training = on

    def _make_room(self, parts: Sequence[Share], reason: str) -> None:
        """Halve the micro-batch after a step that did not fit; a single sequence cannot be halved."""
        self.optimizer.begin()
        self.memory.free()
        longest_of_several = max(part.longest_of_several for part in parts)
        if not longest_of_several:
            longest = max(part.longest for part in parts)
            raise BackendMemoryError(
                f"one sequence of {longest} tokens did not fit in memory "
                f"({reason}); lower max_tokens, or set [backend.options].gradient_checkpointing = true"
            )
        self.tokens_at_a_time = longest_of_several // 2


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's share of a step."""

    totals: Sequence[Totals]  # of each micro-batch
    squares: Sequence[float]  # at rank 0, of each part of the step, if moments are wanted
    tokens: int  # that are read, without padding
    longest: int  # tokens of the largest micro-batch
    longest_of_several: int  # of the largest with more than one sequence; 0 if there is none
    memory_fraction: float
    reason: str  # why it did not fit in memory; "" if it did
    measured: Measured | None  # of the rank's pieces of the step's gradient, if it is in pieces


@dataclass(frozen=True, slots=True)
class Measured:
    """What is known of a gradient, or of a rank's pieces of it."""

    square: float  # its squared norm
    not_finite: Sequence[str]  # names of parameters
    moments: GradientMoments | None

    @classmethod
    def sum(cls, parts: Sequence[Measured]) -> Measured:
        """Return what is known of all pieces together: squared norms add up."""
        moments = [part.moments for part in parts if part.moments]
        return cls(
            sum(part.square for part in parts),
            sorted({name for part in parts for name in part.not_finite}),
            GradientMoments(
                np.sum([each.local_sqr_norms for each in moments], axis=0),
                np.sum([each.mean_sqr_norm for each in moments], axis=0),
                moments[0].consecutive,
            )
            if moments
            else None,
        )


def reason_not_to_fit(run: Callable[[], None]) -> str:
    """Return why something did not fit in memory, "" if it did; what was computed is freed by then."""
    try:
        run()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return str(error) or type(error).__name__
    return ""


def _sent(
    share: Sequence[Sequence[TrainingSample]], prompts: Mapping[Prompt, Ids]
) -> tuple[list[list[TrainingSample]], dict[Prompt, Ids]]:
    """Return samples without what training does not read, and the token ids of their prompts."""
    asked = {sample.rollout.prompt for part in share for sample in part}
    bare = {prompt: replace(prompt, row={}) for prompt in asked}

    def needed(sample: TrainingSample) -> TrainingSample:
        rollout = replace(
            sample.rollout, prompt=bare[sample.rollout.prompt], text="", pieces=(), episode=None
        )
        return replace(sample, rollout=rollout)

    return [[needed(sample) for sample in part] for part in share], {p: prompts[p] for p in bare.values()}


def back_propagate(policy: Policy, batch: MicroBatch, loss: Loss, optimization: Optimization) -> Totals:
    """Add the gradient of a micro-batch's weighted loss to that of the parameters, if the loss is finite."""
    reference = None
    if optimization.kl_coef:
        with policy.as_reference():
            before = predicting_states(policy, batch)
            reference = to_numpy(evaluate(policy, before, batch.targets, optimization.temperature)[0])
    bonus, states = optimization.entropy_bonus, predicting_states(policy, batch)
    logprobs, entropies, *likeliest = evaluate(
        policy,
        states,
        batch.targets,
        optimization.temperature,
        entropy_gradient=bonus > 0,
        with_likeliest=any(sample.teacher for sample in batch.samples),
    )
    ids = likeliest[0].cpu().numpy() if likeliest else None
    terms, totals = batch.data.evaluate(
        loss, to_numpy(logprobs), to_numpy(entropies), reference, optimization, ids
    )
    distances = [*_distances(policy, states, batch.samples, optimization.temperature)]
    totals = replace(totals, loss=totals.loss + sum(float(distance.detach()) for distance in distances))
    if not np.isfinite(totals.loss):
        raise NonFiniteError(
            f"the loss is {totals.loss}; the optimizer step was not taken, lower lr or check the rewards"
        )
    surrogate = torch.dot(_like(batch.data.weights * terms.slope, logprobs), logprobs)
    if bonus:
        surrogate = surrogate - bonus * torch.dot(_like(batch.data.bonus_weights, entropies), entropies)
    with policy.backward():
        torch.autograd.backward([sum(distances, surrogate)])
    return totals


def predicting_states(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """Return the last hidden states that predict a micro-batch's completion tokens, (tokens, hidden).

    Padding is on the right and attention is causal, so no mask is needed.
    """
    if batch.layout is None:
        states = policy.body(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    else:
        states = states_of(policy, batch.input_ids, batch.layout)
    predicting: torch.Tensor = states.flatten(0, 1)[batch.sources]
    return predicting


def evaluate(
    policy: Policy,
    states: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    with_likeliest: bool = False,
) -> list[torch.Tensor]:
    """Return log-probability and entropy (nats) of tokens, (tokens,) in float32, and perhaps the likeliest.

    Logits, (tokens, vocabulary), are computed in chunks of tokens; with gradients, those of several chunks
    are recomputed in the backward pass.

    Args:
        states: last hidden states that predict the tokens.
        entropy_gradient: also propagate gradients through the entropies.
        with_likeliest: also return the id of the likeliest token in each one's place.
    """

    def score(hidden: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        logp = policy.log_distribution(hidden, temperature)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropies = -(logp.exp() * logp).sum(-1)
        values = [logp.gather(1, targets[:, None])[:, 0], entropies]
        return [*values, logp.argmax(-1)] if with_likeliest else values

    size = policy.rows_at_a_time
    if len(targets) <= size:
        return score(states, targets)
    pairs = zip(states.split(size), targets.split(size), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(score, *pair, use_reentrant=False) for pair in pairs]  # a head may have dropout
    else:
        parts = [score(*pair) for pair in pairs]
    return [torch.cat(column) for column in zip(*parts, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A teacher's distributions at the tokens of a rollout, as what its head makes of these states."""

    policy: Policy
    states: torch.Tensor  # (tokens, hidden), in the machine's memory

    def split(self, size: int) -> Iterator[Whole]:
        return (Whole(self.policy, states) for states in self.states.split(size))

    def distance(self, policy: Policy, states: torch.Tensor, temperature: float, beta: float) -> torch.Tensor:
        """Return the divergence of the policy's distributions, which its head makes of `states`, in nats."""
        # a model's files may round up its vocabulary: only tokens that both have are compared
        tokens = min(len(each.causal.get_output_embeddings().weight) for each in (policy, self.policy))
        with torch.no_grad():
            theirs = self.policy.log_distribution(self.states.to(states.device), temperature, tokens=tokens)
        return jensen_shannon(policy.log_distribution(states, temperature, tokens=tokens), theirs, beta).sum()


@dataclass(frozen=True, slots=True, eq=False)
class Top:
    """The likeliest tokens of a teacher's distributions at the tokens of a rollout; all others are one.

    No divergence grows if outcomes are taken together, so the one of these is at most that of whole ones.
    """

    ids: torch.Tensor  # (tokens, k)
    logprobs: torch.Tensor  # (tokens, k), nats

    def split(self, size: int) -> Iterator[Top]:
        return (Top(*parts) for parts in zip(self.ids.split(size), self.logprobs.split(size), strict=True))

    def distance(self, policy: Policy, states: torch.Tensor, temperature: float, beta: float) -> torch.Tensor:
        """Return the divergence of the policy's distributions, which its head makes of `states`, in nats."""
        logp = policy.log_distribution(states, temperature)
        ids, theirs = self.ids.to(logp.device), self.logprobs.to(logp)
        own = logp.gather(1, ids)
        if ids.shape[1] == logp.shape[1]:  # of a small vocabulary, all
            return jensen_shannon(own, theirs.log_softmax(1), beta).sum()
        others = logp.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True)
        left = (1 - theirs.exp().sum(1, keepdim=True)).clamp(min=LEAST_LEFT).log()
        return jensen_shannon(torch.cat([own, others], 1), torch.cat([theirs, left], 1), beta).sum()


def _distances(
    policy: Policy, states: torch.Tensor, samples: Sequence[TrainingSample], temperature: float
) -> Iterator[torch.Tensor]:
    """Iterate over weighted divergences from teachers; their logits are recomputed in the backward pass."""
    start, size = 0, policy.rows_at_a_time
    for sample in samples:
        own = states[start : start + len(sample.rollout.tokens)]
        start += len(own)
        if (teacher := sample.teacher) is None or not teacher.weight:
            continue
        whole: Whole | Top = teacher.whole
        parts: Iterator[Whole | Top] = whole.split(size)
        for hidden, theirs in zip(own.split(size), parts, strict=True):
            how = policy, hidden, temperature, teacher.beta
            nats = checkpoint(theirs.distance, *how, use_reentrant=False)
            yield sample.token_weight * teacher.weight * nats


def jensen_shannon(policy: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Return what `objective.jensen_shannon` does, for autograd: (tokens, vocabulary) -> (tokens,)."""

    def divergence(logp: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return (logp.exp() * (logp - of)).sum(-1)

    if beta in (0.0, 1.0):
        return divergence(policy, teacher) if beta else divergence(teacher, policy)
    mixture = torch.logaddexp(policy + math.log1p(-beta), teacher + math.log(beta))
    return beta * divergence(teacher, mixture) + (1 - beta) * divergence(policy, mixture)


def to_numpy(tensor: torch.Tensor) -> Floats:
    """Return values in double precision."""
    array: Floats = tensor.detach().double().cpu().numpy()
    return array


def _like(values: Floats, tensor: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(values, dtype=tensor.dtype, device=tensor.device)


class Dropout:
    """The dropout layers of a policy's adapters, which are off outside of `masks`."""

    def __init__(self, policy: Policy, seed: int) -> None:
        modules = policy.adapters.modules() if policy.adapters is not None else ()
        self._layers = [layer for layer in modules if isinstance(layer, torch.nn.Dropout) and layer.p > 0]
        self.is_on, self._seed = bool(self._layers), seed  # on, if adapters have dropout at all
        device = policy.device
        self._devices = [device] if device.type == "cuda" else []

    @contextmanager
    def masks(self, step: int, micro_batch: int) -> Iterator[None]:
        """Switch dropout on for a micro-batch; its masks depend on the seed and these two numbers alone."""
        if not self._layers:
            yield
            return
        words = np.random.SeedSequence([self._seed, step, micro_batch]).generate_state(1, np.uint64)
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(int(words[0]))
            self._switch(on=True)
            try:
                yield
            finally:
                self._switch(on=False)

    def _switch(self, *, on: bool) -> None:
        for layer in self._layers:
            layer.train(on)


class Optimizer:
    """Parameters, their float32 master copies, and the running moments of their gradients."""

    is_cut = False  # each rank has a piece of everything

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], weight_decay: float) -> None:
        self._names = list(parameters)
        self._parameters = self._sources = list(parameters.values())  # autograd's gradients are at the latter
        # a float32 parameter is its own master copy
        self._masters = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        self._part: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []
        self._previous: list[torch.Tensor] = []  # gradient of a single-part step, for the next step's moments
        self._kept: list[torch.Tensor] = []  # what it becomes by this step
        self._adam = torch.optim.AdamW(
            self._masters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=weight_decay, fused=True
        )
        self.steps = 0
        self.parts: Mapping[str, Callable[..., object]] = {}  # of calls of rank 0, by its commands

    def reset(self) -> None:
        """Clear moments and step count; keep parameters."""
        self.begin()
        self._adam.state.clear()
        self._previous = []
        self.steps = 0

    def begin(self) -> None:
        self._part, self._sums, self._kept = [], [], []
        for parameter in (*self._sources, *self._masters):
            parameter.grad = None

    def collect(self) -> None:
        """Move the gradients of one micro-batch from the parameters into the part's."""
        self._part = _add(self._part, [_gradient(p) for p in self._sources])
        for parameter in self._sources:
            parameter.grad = None

    def end_part(self) -> None:
        part, self._part = self._part, []
        self._sums = _add(self._sums, part)

    def part_norm(self) -> float:
        """Return the squared norm of the part's gradient, after Adam's preconditioning."""
        return self._norm_seen(self._part)

    def gather(self, ranks: Ranks, *, is_measured: bool) -> list[float]:
        """Add up the ranks' gradients at rank 0; return there the squared norm of each, if it is measured."""
        # of a share without samples it is zero
        self._sums = self._sums or [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        if ranks.size == 1:
            return []
        if not is_measured:
            ranks.reduce(self._sums)
            return []
        squares = [0.0] * ranks.size
        for first, gradients in ranks.gather(self._sums):
            for rank, theirs in enumerate(gradients):
                squares[rank] += self._norm_seen(theirs, first)
                if rank > 0:
                    torch._foreach_add_(self._sums[first : first + len(theirs)], theirs)
        return squares

    def complete(self) -> None:
        """Do what may not fit in memory after all passes of a step; with weights in pieces, there is more."""

    def measured(self, squares: Sequence[float]) -> Measured | None:
        """Return what is known of the gradient if it is in pieces, else None."""
        return None

    def measure(self, squares: Sequence[float], parts: Sequence[Sequence[TrainingSample]]) -> Measured:
        """Return what is known of the step's gradient, which is kept for the next step's moments.

        `squares` are each part's squared norm; empty if moments are not wanted.
        """
        whole, names, moments, self._kept = _squared_norm(self._sums), [], None, self._previous
        if not np.isfinite(whole):
            pairs = zip(self._names, self._sums, strict=True)
            names = [name for name, gradient in pairs if not torch.isfinite(gradient).all()]
        elif squares and self.steps >= FIRST_SETTLED_STEP:
            moments = moments_of(squares, parts, self._sums, self._previous, self._norm_seen)
        if squares:
            self._kept = [gradient.clone() for gradient in self._sums] if len(squares) == 1 else []
        return Measured(whole, names, moments)

    def step(self, lr: float, scale: float) -> None:
        """Update the parameters by the gradient, which was measured, times a scale."""
        if scale != 1:
            torch._foreach_mul_(self._sums, scale)
        self.begin_moments()
        for master, gradient in zip(self._masters, self._sums, strict=True):
            master.grad = gradient
        self._adam.param_groups[0]["lr"] = lr
        self._adam.step()
        for master in self._masters:
            master.grad = None
        self._write_back()
        self._previous, self._sums = self._kept, []
        self.steps += 1

    def begin_moments(self) -> None:
        for master in self._masters:  # all or none: torch leaves a partial allocation when memory runs out
            if not self._adam.state[master]:
                self._adam.state[master] = {
                    "step": torch.zeros((), device=master.device),
                    **{moment: torch.zeros_like(master) for moment in MOMENTS},
                }

    def state(self) -> dict[str, torch.Tensor]:
        """Return by name the moments, and the master copies that are not the parameters themselves."""
        return {name: tensor.cpu().contiguous() for name, tensor in self._tensors().items()}

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {}
        for name, parameter, master in self._named():
            for moment in MOMENTS:
                kept = self._adam.state[master].get(moment)
                tensors[f"{moment}.{name}"] = torch.zeros_like(master.data) if kept is None else kept
            if master is not parameter:
                tensors[MASTER + name] = master.data
        if self._previous:
            tensors |= {PREVIOUS + n: g for n, g in zip(self._names, self._previous, strict=True)}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def load(self, tensors: Mapping[str, torch.Tensor], steps: int) -> None:
        """Restore what `state` returned after `steps` steps; the parameters must be loaded already."""
        self.steps = steps
        with torch.no_grad():
            for name, parameter, master in self._named():
                moments = {moment: tensors[f"{moment}.{name}"].to(master.device) for moment in MOMENTS}
                if any(kept.shape != master.shape for kept in moments.values()):
                    raise ValueError(f"the moments of {name} do not have its shape")
                self._adam.state[master] = {
                    "step": torch.tensor(float(steps), device=master.device),
                    **moments,
                }
                if master is not parameter:
                    master.copy_(tensors[MASTER + name])
        self._previous = []
        if any(name.startswith(PREVIOUS) for name in tensors):
            pairs = zip(self._names, self._masters, strict=True)
            self._previous = [tensors[PREVIOUS + name].to(master.device) for name, master in pairs]
        self._write_back()

    def _norm_seen(self, gradients: Sequence[torch.Tensor], first: int = 0) -> float:
        """Return the squared norm of parameters' gradients, from the first, preconditioned as by Adam."""
        if self.steps < FIRST_SETTLED_STEP:
            return _squared_norm(list(gradients))
        correction = 1 - BETAS[1] ** self.steps
        total = 0.0
        masters = self._masters[first : first + len(gradients)]
        for master, gradient in zip(masters, gradients, strict=True):
            root = (self._adam.state[master]["exp_avg_sq"] / correction).sqrt_().add_(EPSILON)
            total += float((gradient / root).double().square().sum())
        return total

    def _named(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]:
        return zip(self._names, self._parameters, self._masters, strict=True)

    def _write_back(self) -> None:
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)


def _add(sums: list[torch.Tensor], more: list[torch.Tensor]) -> list[torch.Tensor]:
    if sums and more:  # a share may have no samples
        torch._foreach_add_(sums, more)
    return sums or more


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a float32 gradient, of a piece if it is one; zero if no token used the parameter."""
    gradient = parameter.grad
    gradient = torch.zeros_like(parameter, dtype=torch.float32) if gradient is None else gradient.float()
    piece: torch.Tensor = getattr(gradient, "to_local", lambda: gradient)()
    return piece


def _squared_norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.stack(torch._foreach_norm(tensors)).double().square().sum())
