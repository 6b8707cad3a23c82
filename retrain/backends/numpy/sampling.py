"""Sampling with the embedded policy: its characters, completions that begin together, and turns that come."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import cast

import numpy as np

from retrain.backends.engines import Drawn, Ids
from retrain.backends.metering import ModelCosts, Work
from retrain.backends.numpy import text_of
from retrain.backends.numpy.gru import (
    Array,
    Ints,
    Weights,
    advance,
    input_table,
    log_probabilities,
    unroll_prompts,
)
from retrain.backends.rows import Row, RowAdmission, RowSource, uniforms
from retrain.base.errors import ConfigError, PromptError
from retrain.base.rollouts import Prompt


class Characters:
    """The vocabulary: the task's alphabet, then one end token, which the policy predicts but never reads."""

    def __init__(self, alphabet: str) -> None:
        self.alphabet = "".join(sorted(set(alphabet)))
        if not self.alphabet:
            raise ConfigError("the numpy backend needs a task with an alphabet of at least one character")
        self.end = len(self.alphabet)
        self._ids = {character: token for token, character in enumerate(self.alphabet)}
        self._pieces = (*self.alphabet, "")

    def encode(self, text: str, where: str = "prompt ") -> Ids:
        """Return the token ids of a text; an unknown character is a PromptError that begins with `where`."""
        try:
            return tuple([self._ids[character] for character in text])
        except KeyError as error:
            raise PromptError(
                f"{where}{text[:40]!r} holds {error.args[0]!r}, which is not in the task's alphabet; "
                "add it to the Task's `alphabet`"
            ) from None

    def of(self, prompt: Prompt) -> Ids:
        """Return the token ids of a prompt, as `encode` and `read` do."""
        return self.read(prompt.ids) if prompt.ids else self.encode(text_of(prompt))

    def read(self, tokens: Ids) -> Ids:
        """Return those of a program's token ids that the policy reads; PromptError if one is unknown."""
        if max(tokens) > self.end or min(tokens) == self.end:
            raise PromptError(
                f"got token {max(tokens)}; needs some of 0 to {self.end - 1}, and {self.end} after each turn"
            )
        return tuple([token for token in tokens if token != self.end])

    def completions(self, rows: Sequence[Ids]) -> list[str]:
        return ["".join(self.pieces(row)) for row in rows]

    def pieces(self, tokens: Ids) -> tuple[str, ...]:
        return tuple([self._pieces[token] for token in tokens])


def complete(
    weights: Weights, states: Array, temperature: float, limits: Ints, random: np.random.Generator
) -> list[Drawn]:
    """Continue each state (sequences, hidden) until the end token or its limit, (sequences,) in tokens.

    Finished rows leave the batch at once, and no allocation depends on the limits. Temperature 0
    takes the most likely token, with its log-probability at temperature 1.
    """
    end = weights.shapes["output"][1] - 1
    table = input_table(weights)
    rows = np.arange(len(states))
    ended = np.zeros(len(states), dtype=np.bool_)
    columns: list[tuple[Ints, Ints, Array, Array]] = []
    while True:
        numbers = random.random(len(rows)) if temperature else np.zeros(len(rows))
        tokens, logprobs, entropies = _draw(weights, states, temperature, numbers)
        columns.append((rows, tokens, logprobs, entropies))
        alive = tokens != end
        ended[rows[~alive]] = True
        alive &= limits[rows] > len(columns)
        if not alive.any():
            break
        rows, tokens, states = rows[alive], tokens[alive], states[alive]
        states = advance(weights, table[tokens], states).state
    rows, tokens, logprobs, entropies = map(np.concatenate, zip(*columns, strict=True))
    order = np.argsort(rows, kind="stable")  # from the order of sampling to completion after completion
    lengths = np.bincount(rows)
    ends = np.cumsum(lengths)
    nats = np.add.reduceat(entropies[order].astype(np.float64), ends - lengths) / lengths
    ids, logprobs = tokens[order].tolist(), logprobs[order].astype(np.float64)
    facts = zip(lengths.tolist(), ends.tolist(), nats.tolist(), ended.tolist(), strict=True)
    return [
        Drawn(tuple(ids[end - length : end]), logprobs[end - length : end], mean, has_ended)
        for length, end, mean, has_ended in facts
    ]


class TurnRows:
    """Samples rows that begin when they come, and end one by one."""

    def __init__(self, weights: Weights, source: RowSource, temperature: float) -> None:
        self._weights, self._source, self._temperature = weights, source, temperature
        self._ends = {weights.shapes["output"][1] - 1}
        self._table = input_table(weights)
        self._waiting: list[Row] = []
        self._running: list[Row] = []
        self._states = np.empty((0, weights.shapes["recurrent"][0]), weights.flat.dtype)
        self._admission = RowAdmission()
        self._read: list[int] = []  # lengths of the sequences that were read
        self._drawn: list[int] = []  # and of the rows that ended
        self._reads = self._draws = 0  # passes
        self._read_s = self._draw_s = 0.0

    def run(self) -> None:
        """Sample until no row is left, and none comes."""
        while self._take():
            began_s = time.perf_counter()
            if self._waiting and self._admission.is_due(len(self._waiting), len(self._running)):
                self._admit()
            read_s = time.perf_counter()
            self._draw()
            self._read_s += read_s - began_s
            self._draw_s += time.perf_counter() - read_s

    def work(self, costs: ModelCosts) -> tuple[Work, Work]:
        """Return the cost of reading, and of drawing."""
        return (
            costs.prefill(self._read, self._reads, self._read_s),
            costs.decode(0, np.array(self._drawn, np.int64), self._draw_s, self._draws),
        )

    def _take(self) -> bool:
        self._waiting += self._source.take(len(self._running) + len(self._waiting))
        return bool(self._running or self._waiting)

    def _admit(self) -> None:
        sequences = [row.ids for row in self._waiting]
        trace = unroll_prompts(self._weights, sequences)
        self._states = np.concatenate([self._states, trace.states[trace.packed.last()]])
        self._read += map(len, sequences)
        self._reads += max(map(len, sequences))
        self._running += self._waiting
        self._waiting = []

    def _draw(self) -> None:
        rows = self._running
        tokens, *facts = _draw(self._weights, self._states, self._temperature, uniforms(rows, 1)[0])
        for row, *fact in zip(rows, tokens.tolist(), *(column.tolist() for column in facts), strict=True):
            row.append(*fact, self._ends)
        self._draws += 1
        alive = np.array([not row.is_done for row in rows])
        if not alive.all():
            ended = [row for row in rows if row.is_done]
            self._drawn += [len(row.tokens) for row in ended]
            self._source.end(ended)
            self._running = [row for row in rows if not row.is_done]
            tokens, self._states = tokens[alive], self._states[alive]
        if len(tokens):
            self._states = advance(self._weights, self._table[tokens], self._states).state


def _draw(weights: Weights, states: Array, temperature: float, numbers: Array) -> tuple[Ints, Array, Array]:
    """Return a token of each state, its log-probability, and the entropy of its distribution.

    `numbers`, (rows,) uniform in [0, 1), choose the token; temperature 0 takes the most likely one.
    """
    logp = log_probabilities(weights, states, temperature)
    probabilities = np.exp(logp)
    tokens = logp.argmax(axis=1) if temperature == 0 else _chosen(probabilities, numbers)
    return tokens, logp[np.arange(len(tokens)), tokens], -(probabilities * logp).sum(axis=1)


def _chosen(probabilities: Array, numbers: Array) -> Ints:
    cumulative = probabilities.cumsum(axis=1)
    # scaled by the last column, so that rounding cannot select an index past the last token
    thresholds = numbers[:, None] * cumulative[:, -1:]
    return cast(Ints, (cumulative[:, :-1] <= thresholds).sum(axis=1))
