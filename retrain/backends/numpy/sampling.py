"""Batched sampling of completions from the network."""

from __future__ import annotations

from typing import cast

import numpy as np

from retrain.backends import Sampling
from retrain.backends.numpy.gru import Array, Ints, Weights, advance, input_table, log_probabilities
from retrain.backends.text import by_completion
from retrain.engines import Drawn


def complete(weights: Weights, states: Array, sampling: Sampling, random: np.random.Generator) -> list[Drawn]:
    """Continue each state (sequences, hidden) until the end token or `max_tokens`.

    Finished rows leave the batch at once, and no allocation depends on `max_tokens`. Temperature 0
    takes the most likely token, with its log-probability at temperature 1.
    """
    end = weights.shapes["output"][1] - 1
    table = input_table(weights)
    rows = np.arange(len(states))
    ended = np.zeros(len(states), dtype=np.bool_)
    columns: list[tuple[Ints, Ints, Array, Array]] = []
    while True:
        logp = log_probabilities(weights, states, sampling.temperature)
        probabilities = np.exp(logp)
        tokens = logp.argmax(axis=1) if sampling.temperature == 0 else _draw(probabilities, random)
        entropies = -(probabilities * logp).sum(axis=1)
        columns.append((rows, tokens, logp[np.arange(len(rows)), tokens], entropies))
        alive = tokens != end
        ended[rows[~alive]] = True
        if len(columns) >= sampling.max_tokens or not alive.any():
            return by_completion(map(np.concatenate, zip(*columns, strict=True)), ended.tolist())
        rows, tokens, states = rows[alive], tokens[alive], states[alive]
        states = advance(weights, table[tokens], states).state


def _draw(probabilities: Array, random: np.random.Generator) -> Ints:
    cumulative = probabilities.cumsum(axis=1)
    # scaled by the last column, so that rounding cannot select an index past the last token
    thresholds = random.random((len(cumulative), 1)) * cumulative[:, -1:]
    return cast(Ints, (cumulative[:, :-1] <= thresholds).sum(axis=1))
