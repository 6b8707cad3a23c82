"""Batched sampling of completions from the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np

from retrain.backends import Sampling
from retrain.backends.numpy.gru import advance, input_table, log_probabilities
from retrain.backends.numpy.weights import Array, Ints, Weights
from retrain.rollouts import Floats


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """Flat arrays over tokens, sequence after sequence; `lengths` has shape (sequences,)."""

    tokens: Ints
    logprobs: Floats
    entropies: Floats  # nats, of the distribution that each token was sampled from
    lengths: Ints


def complete(weights: Weights, states: Array, sampling: Sampling, random: np.random.Generator) -> Completions:
    """Continue each state (sequences, hidden) until the end token or `max_tokens`.

    Finished rows leave the batch at once, and no allocation depends on `max_tokens`. Temperature 0
    takes the most likely token, with its log-probability at temperature 1.
    """
    end = weights.shapes["output"][1] - 1
    table = input_table(weights)
    rows = np.arange(len(states))
    columns: list[tuple[Ints, Ints, Array, Array]] = []
    while True:
        logp = log_probabilities(weights, states, sampling.temperature)
        probabilities = np.exp(logp)
        tokens = logp.argmax(axis=1) if sampling.temperature == 0 else _draw(probabilities, random)
        entropies = -(probabilities * logp).sum(axis=1)
        columns.append((rows, tokens, logp[np.arange(len(rows)), tokens], entropies))
        alive = tokens != end
        if len(columns) >= sampling.max_tokens or not alive.any():
            return _by_sequence(columns)
        rows, tokens, states = rows[alive], tokens[alive], states[alive]
        states = advance(weights, table[tokens], states).state


def _draw(probabilities: Array, random: np.random.Generator) -> Ints:
    cumulative = probabilities.cumsum(axis=1)
    # scaled by the last column, so that rounding cannot select an index past the last token
    thresholds = random.random((len(cumulative), 1)) * cumulative[:, -1:]
    return cast(Ints, (cumulative[:, :-1] <= thresholds).sum(axis=1))


def _by_sequence(columns: list[tuple[Ints, Ints, Array, Array]]) -> Completions:
    rows, tokens, logprobs, entropies = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    order = np.argsort(rows, kind="stable")
    return Completions(
        tokens=tokens[order],
        logprobs=logprobs[order].astype(np.float64),
        entropies=entropies[order].astype(np.float64),
        lengths=np.bincount(rows),
    )
