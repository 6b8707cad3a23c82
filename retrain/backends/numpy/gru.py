"""A gated recurrent network over characters, with its gradient written out by hand.

    r, z = sigmoid(x W + b + h U)   n = tanh(x W_n + b_n + r (h U_n + c))   h' = (1 - z) n + z h

r is the reset gate, z the update gate, n the candidate state; logits are h V + d.
Source: GRU, arXiv:1406.1078, with the reset gate applied after the recurrent product.

Sequences are sorted by length, longest first, and stored time-major: at each time the active rows come
first, so a step is a plain slice. There is no padding and no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Optimization
from retrain.backends.objective import TokenData, Totals, jensen_shannon
from retrain.base.rollouts import Floats, Loss, Rollout, TrainingSample
from retrain.control.rules.scaling import FIRST_SETTLED_STEP, adam_preconditioner

Array: TypeAlias = NDArray[Any]  # float32 or float64, as [backend.options].dtype says
Ints: TypeAlias = NDArray[np.int64]

OUTPUT_SCALE = 0.01  # the initial policy is nearly uniform, for exploration


class Weights:
    """All weights, or all gradients, in one vector, with a named view for each matrix."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
        self.shapes = dict(shapes)
        self.flat: Array = np.zeros(sum(prod(shape) for shape in shapes.values()), dtype)
        self._views: dict[str, Array] = {}
        start = 0
        for name, shape in shapes.items():
            self._views[name] = self.flat[start : start + prod(shape)].reshape(shape)
            start += prod(shape)

    def __getitem__(self, name: str) -> Array:
        return self._views[name]

    def zeros_like(self) -> Weights:
        return Weights(self.shapes, self.flat.dtype.name)

    def copy(self) -> Weights:
        same = self.zeros_like()
        same.flat[:] = self.flat
        return same

    def non_finite(self) -> list[str]:
        """Return the names of views that contain a NaN or an infinity."""
        return [name for name, view in self._views.items() if not np.isfinite(view).all()]


def initial_weights(
    characters: int, embedding: int, hidden: int, dtype: str, random: np.random.Generator
) -> Weights:
    """Return random initial weights; outputs are the characters and, last, the end token."""
    weights = Weights(
        {
            "embedding": (characters, embedding),
            "input": (embedding, 3 * hidden),  # columns: reset, update, candidate
            "gate_bias": (3 * hidden,),
            "recurrent": (hidden, 3 * hidden),
            "candidate_bias": (hidden,),
            "output": (hidden, characters + 1),
            "output_bias": (characters + 1,),
        },
        dtype,
    )
    deviations = {
        "embedding": 1.0,
        "input": embedding**-0.5,
        "recurrent": hidden**-0.5,
        "output": OUTPUT_SCALE * hidden**-0.5,
    }
    for name, deviation in deviations.items():
        weights[name][:] = deviation * random.standard_normal(weights.shapes[name])
    return weights


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Position of each element of each sequence in the time-major layout.

    Sequence i of length L_i has L_i states. Element t follows state t: element t - 1 is the input of
    state t, and the last element is never an input.
    """

    elements: Ints  # (total,) sequence after sequence, as given
    position: Ints  # (total,) element -> row in the time-major layout
    sequence: Ints  # (total,) element -> its sequence
    order: Ints  # (sequences,) row at time 0 -> sequence
    offsets: tuple[int, ...]  # (longest + 1,) first row of each time, then the total
    inputs: Ints  # (total,) time-major: input element of each state; rows of time 0 unused

    def steps(self) -> Iterator[tuple[slice, slice]]:
        """Yield (rows before, rows after) of each transition, in time order."""
        for before, after, end in zip(self.offsets, self.offsets[1:], self.offsets[2:], strict=False):
            yield slice(before, before + end - after), slice(after, end)

    def last(self) -> Ints:
        """Return the row of each sequence's last state, in input order."""
        ends = np.flatnonzero(np.diff(self.sequence, append=-1))
        return self.position[ends]


def pack(sequences: Sequence[Sequence[int]]) -> Packed:
    """Return the layout of sequences, each of at least one element."""
    lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
    elements = np.fromiter(chain.from_iterable(sequences), np.int64, int(lengths.sum()))
    order = np.argsort(-lengths, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    starts = np.cumsum(lengths) - lengths
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    time = np.arange(len(elements)) - starts[sequence]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(time))])
    position = offsets[time] + rank[sequence]
    inputs = np.empty_like(elements)
    inputs[position] = np.roll(elements, 1)
    return Packed(elements, position, sequence, order, tuple(offsets.tolist()), inputs)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One transition: the new states and the values that their gradient needs."""

    state: Array  # (rows, hidden)
    reset: Array
    update: Array
    candidate: Array
    recurrent_candidate: Array  # h U_n + c


def input_table(weights: Weights) -> Array:
    """Return every character's contribution to the gates, shape (characters, 3 hidden)."""
    return weights["embedding"] @ weights["input"] + weights["gate_bias"]


def advance(weights: Weights, drive: Array, state: Array) -> Step:
    """Return the next states (rows, hidden); `drive` holds each row's entry of the input table."""
    hidden = state.shape[1]
    product = state @ weights["recurrent"]
    gates = drive[:, : 2 * hidden] + product[:, : 2 * hidden]
    gates *= 0.5  # the sigmoid as (1 + tanh(x / 2)) / 2, a form that cannot overflow
    np.tanh(gates, out=gates)
    gates += 1
    gates *= 0.5
    reset, update = gates[:, :hidden], gates[:, hidden:]
    recurrent_candidate = product[:, 2 * hidden :] + weights["candidate_bias"]
    candidate = np.tanh(drive[:, 2 * hidden :] + reset * recurrent_candidate)
    return Step(candidate + update * (state - candidate), reset, update, candidate, recurrent_candidate)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Every state of packed sequences, shape (total, hidden), and the steps between them."""

    packed: Packed
    states: Array
    steps: tuple[Step, ...]


def unroll(weights: Weights, packed: Packed, initial: Array) -> Trace:
    """Run sequences from initial states (sequences, hidden) in the same order."""
    table = input_table(weights)
    states = np.empty((len(packed.elements), initial.shape[1]), initial.dtype)
    states[: len(initial)] = initial[packed.order]
    steps = []
    for before, after in packed.steps():
        step = advance(weights, table[packed.inputs[after]], states[before])
        states[after] = step.state
        steps.append(step)
    return Trace(packed, states, tuple(steps))


def unroll_prompts(weights: Weights, prompts: Sequence[Sequence[int]]) -> Trace:
    """Run prompts, which may be empty, from the zero state."""
    # the last element of a packed sequence is never an input, so any id works
    packed = pack([(*prompt, 0) for prompt in prompts])
    return unroll(
        weights, packed, np.zeros((len(prompts), weights.shapes["recurrent"][0]), weights.flat.dtype)
    )


def log_probabilities(weights: Weights, states: Array, temperature: float) -> Array:
    """Return the next token's log-probabilities, shape (rows, tokens); temperature 0 means 1."""
    logits = states @ weights["output"] + weights["output_bias"]
    logits /= temperature or 1.0
    logits -= logits.max(axis=1, keepdims=True)
    return cast(Array, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def back_propagate(weights: Weights, trace: Trace, state_gradient: Array, gradient: Weights) -> Array:
    """Back-propagate through the steps, adding to `gradient`; return the gradient of the initial states.

    `state_gradient`, the gradient of the loss for each state, is overwritten.
    """
    packed, hidden = trace.packed, trace.states.shape[1]
    characters, dtype = weights.shapes["embedding"][0], weights.flat.dtype.name
    table_gradient = np.zeros((characters, weights.shapes["input"][1]), dtype)
    for (before, after), step in zip(reversed(list(packed.steps())), reversed(trace.steps), strict=True):
        previous, flow = trace.states[before], state_gradient[after]
        # of the gates' pre-activations, and of the recurrent product: (rows, 3 hidden)
        by_gates = np.empty((len(flow), 3 * hidden), flow.dtype)
        by_candidate = flow * (1 - step.update) * (1 - step.candidate * step.candidate)
        by_gates[:, :hidden] = by_candidate * step.recurrent_candidate * step.reset * (1 - step.reset)
        by_gates[:, hidden:-hidden] = flow * (previous - step.candidate) * step.update * (1 - step.update)
        by_gates[:, -hidden:] = by_candidate
        by_product = by_gates.copy()
        by_product[:, -hidden:] *= step.reset
        state_gradient[before] += flow * step.update + by_product @ weights["recurrent"].T
        gradient["recurrent"][:] += previous.T @ by_product
        gradient["candidate_bias"][:] += by_product[:, -hidden:].sum(axis=0)
        table_gradient += one_hot(packed.inputs[after], characters, dtype).T @ by_gates
    gradient["gate_bias"][:] += table_gradient.sum(axis=0)
    gradient["embedding"][:] += table_gradient @ weights["input"].T
    gradient["input"][:] += weights["embedding"].T @ table_gradient
    initial = np.empty_like(state_gradient[: len(packed.order)])
    initial[packed.order] = state_gradient[: len(packed.order)]
    return initial


def one_hot(numbers: Ints, count: int, dtype: str) -> Array:
    """Return a one-hot matrix (rows, count), whose transpose sums rows by number."""
    matrix = np.zeros((len(numbers), count), dtype)
    matrix[np.arange(len(numbers)), numbers] = 1
    return matrix


DECAY_MEAN, DECAY_SQUARE, EPSILON = 0.9, 0.999, 1e-8  # the paper's


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Prompts and the rollouts after them, as a policy runs them: equal prompts once."""

    prompts: Sequence[tuple[int, ...]]
    owner: Ints  # (rollouts,) number of each one's prompt
    packed: Packed
    rows: Ints  # of the states that predict sampled tokens, rollout after rollout
    targets: Ints  # these tokens

    @classmethod
    def of(cls, prompts: Sequence[tuple[int, ...]], rollouts: Sequence[Rollout], end: int) -> Batch:
        """Return the batch of rollouts, each with its prompt as token ids; `end` is the end token."""
        numbers = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompts))}
        placed = [rollout.placed(unread=end) for rollout in rollouts]
        packed = pack([read for read, _ in placed])
        starts = np.cumsum([0, *(len(read) for read, _ in placed)]).tolist()
        places = [start + place for start, (_, own) in zip(starts, placed, strict=False) for place in own]
        return cls(
            list(numbers),
            np.array([numbers[prompt] for prompt in prompts]),
            packed,
            packed.position[np.array(places, np.int64)],
            np.fromiter(chain.from_iterable(r.tokens for r in rollouts), np.int64, len(places)),
        )

    def run(self, policy: Weights, temperature: float) -> tuple[Trace, Trace, Array]:
        """Return the traces of prompts and rollouts, and the log-probabilities after each state."""
        prompts = unroll_prompts(policy, self.prompts)
        trace = unroll(policy, self.packed, prompts.states[prompts.packed.last()[self.owner]])
        return prompts, trace, log_probabilities(policy, trace.states, temperature)


def loss_gradient(
    weights: Weights,
    reference: Weights,
    prompts: Sequence[tuple[int, ...]],
    samples: Sequence[TrainingSample],
    loss: Loss,
    optimization: Optimization,
) -> tuple[Totals, Weights]:
    """Return the sum over tokens of weight x (loss + KL) - bonus weight x bonus x entropy, with its gradient.

    Equal prompts run once; the gradients of their rollouts are summed in the backward pass.

    Args:
        reference: reference policy of the KL term.
        prompts: each sample's prompt as token ids.
    """
    batch = Batch.of(prompts, [sample.rollout for sample in samples], weights.shapes["output"][1] - 1)
    prompt_trace, trace, logp = batch.run(weights, optimization.temperature)
    near = None
    if optimization.kl_coef:
        near = _chosen(batch.run(reference, optimization.temperature)[2], batch.rows, batch.targets)
    rows, targets = batch.rows, batch.targets
    probabilities = np.exp(logp)
    entropy = -(probabilities * logp).sum(axis=1)
    data = TokenData.of(samples)
    likeliest = logp[rows].argmax(axis=1) if (data.teachers >= 0).any() else None
    terms, totals = data.evaluate(
        loss, _chosen(logp, rows, targets), entropy[rows], near, optimization, likeliest
    )
    slope = np.zeros(len(logp), logp.dtype)  # no loss where the next token was given
    slope[rows] = data.weights * terms.slope
    by_logits = -probabilities * slope[:, None]  # (states, vocabulary), time-major
    by_logits[rows, targets] += slope[rows]
    bonus = np.zeros_like(slope)
    bonus[rows] = optimization.entropy_bonus * data.bonus_weights
    by_logits += bonus[:, None] * probabilities * (logp + entropy[:, None])
    start = 0
    for sample in samples:
        own = rows[start : start + len(sample.advantages)]
        start += len(own)
        if (teacher := sample.teacher) and teacher.weight:
            weight = sample.token_weight * teacher.weight
            apart, slopes = jensen_shannon(logp[own].astype(np.float64), teacher.whole, teacher.beta)
            by_logits[own] += weight * slopes
            totals = replace(totals, loss=totals.loss + weight * float(apart.sum()))
    by_logits /= optimization.temperature or 1.0
    gradient = weights.zeros_like()
    gradient["output"][:] = trace.states.T @ by_logits
    gradient["output_bias"][:] = by_logits.sum(axis=0)
    by_start = back_propagate(weights, trace, by_logits @ weights["output"].T, gradient)
    by_prompt_state = np.zeros_like(prompt_trace.states)
    owners = one_hot(batch.owner, len(batch.prompts), weights.flat.dtype.name)
    by_prompt_state[prompt_trace.packed.last()] = owners.T @ by_start
    back_propagate(weights, prompt_trace, by_prompt_state, gradient)
    return totals, gradient


def _chosen(logp: Array, rows: Ints, targets: Ints) -> Floats:
    """Return the sampled tokens' log-probabilities, shape (tokens,), sequence after sequence."""
    chosen: Floats = logp[rows, targets].astype(np.float64)
    return chosen


class Sgd:
    """Plain stochastic gradient descent: each step is the gradient times the learning rate."""

    first_settled_step = 0  # from here on values of `sqr_norm` are comparable

    def __init__(self) -> None:
        self.steps = 0
        self.arrays: Mapping[str, Array] = {}  # in a checkpoint; loading overwrites them in place

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        """Take one step downhill, in place."""
        self.steps += 1
        weights -= lr * gradient

    def sqr_norm(self, gradient: Array) -> float:
        """Return the squared norm of a gradient, preconditioned as in the update."""
        return float(np.dot(gradient, gradient))


class Adam(Sgd):
    """Running moments of the gradient of one flat vector."""

    first_settled_step = FIRST_SETTLED_STEP

    def __init__(self, like: Array) -> None:
        super().__init__()
        self.mean, self.square = np.zeros_like(like), np.zeros_like(like)
        self.arrays = {"adam_mean": self.mean, "adam_square": self.square}

    def step(self, weights: Array, gradient: Array, lr: float) -> None:
        self.steps += 1
        self.mean += (1 - DECAY_MEAN) * (gradient - self.mean)
        self.square += (1 - DECAY_SQUARE) * (gradient * gradient - self.square)
        mean = self.mean / (1 - DECAY_MEAN**self.steps)
        square = self.square / (1 - DECAY_SQUARE**self.steps)
        weights -= lr * mean / (np.sqrt(square) + EPSILON)

    def sqr_norm(self, gradient: Array) -> float:
        return super().sqr_norm(
            gradient / adam_preconditioner(self.square, self.steps, DECAY_SQUARE, EPSILON)
        )


def clip_by_norm(gradient: Array, max_norm: float) -> float:
    """Clip `gradient` in place to norm `max_norm` and return its norm before clipping."""
    norm = float(np.sqrt(np.dot(gradient, gradient)))
    if norm > max_norm:
        gradient *= max_norm / norm
    return norm
