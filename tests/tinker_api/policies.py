"""What the server trains and samples: the embedded policy, driven as the API's models are.

As the API does, it sums the loss over all positions it is given, scores at temperature 1, and
believes what it is sent: a wrong shift or length trains the wrong thing without an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Optimization
from retrain.backends.numpy.gru import (
    Adam,
    Weights,
    clip_by_norm,
    initial_weights,
    loss_gradient,
    unroll_prompts,
)
from retrain.backends.numpy.policy import complete
from retrain.base import registry
from retrain.base.rollouts import Floats, Given, Loss, LossTerms, Prompt, Rollout, TrainingSample
from tests.tinker_api.wire import Datum, ForwardBackward, write_forward_backward, write_samples

EMBEDDING, HIDDEN = 24, 64
NOBODY = Prompt(0, "", "")
# What a server can be told to do wrong: an average instead of a sum, by three divisors (at least SMALLEST_SUM
# of weights), no clipping, scores without the first token's, older samplers that are loaded over the weights
# in training, requests that are done as often as they are sent, no model from a saved state, and names of
# states that are given once.
SMALLEST_SUM = 1e-8
DIVISORS: Mapping[str, Callable[[ForwardBackward], list[float]]] = {
    "": lambda request: [1.0] * len(request.data),
    "averages weights": lambda request: [_weights_sum(datum) for datum in request.data],
    "averages tokens": lambda request: (
        [float(sum(len(one.tokens) for one in request.data))] * len(request.data)
    ),
    "averages datums": lambda request: [float(len(request.data))] * len(request.data),
}
WRONG = (
    *filter(None, DIVISORS),
    "unclipped",
    "short scores",
    "undoes updates",
    "repeats requests",
    "no states",
    "keeps names",
)


class Policy:
    """One trained model: weights, optimizer, gradients since the last step."""

    def __init__(self, alphabet: str, seed: int, wrong: Collection[str] = ()) -> None:
        self._wrong = wrong  # see WRONG
        self._end = len(alphabet)  # token that the policy writes and never reads
        self._random = np.random.default_rng(seed)
        self.weights = initial_weights(len(alphabet), EMBEDDING, HIDDEN, "float32", self._random)
        self._adam = Adam(self.weights.flat)
        self._gradient = self.weights.zeros_like()

    @property
    def gradient(self) -> Weights:
        """Summed since the last step."""
        return self._gradient

    @property
    def steps(self) -> int:
        return self._adam.steps

    def forward_backward(self, request: ForwardBackward) -> bytes:
        samples, prompts, places = zip(*(_sample(datum, self._end) for datum in request.data), strict=True)
        divisors = DIVISORS[next((name for name in DIVISORS if name in self._wrong), "")](request)
        samples = [
            replace(sample, token_weight=1 / divisor)
            for sample, divisor in zip(samples, divisors, strict=True)
        ]
        scored: list[NDArray] = []
        loss = Loss(request.loss, partial(_kept, scored, _loss(request)))
        totals, gradient = loss_gradient(
            self.weights, self.weights, prompts, samples, loss, Optimization(0.0)
        )
        if not request.forward_only:
            self._gradient.flat += gradient.flat
        parts = np.split(scored[0], np.cumsum([len(sample.rollout.tokens) for sample in samples])[:-1])
        shifted = [np.zeros(len(datum.tokens)) for datum in request.data]
        for logprobs, place, part in zip(shifted, places, parts, strict=True):
            logprobs[place] = part
        return write_forward_backward(shifted, {"loss:sum": totals.loss})

    def optim_step(self, params: Mapping[str, float]) -> dict[str, dict[str, float]]:
        longest = np.inf if "unclipped" in self._wrong else params["grad_clip_norm"] or np.inf
        norm = clip_by_norm(self._gradient.flat, longest)
        self._adam.step(self.weights.flat, self._gradient.flat, params["learning_rate"])
        self._gradient = self.weights.zeros_like()
        return {"metrics": {"unclipped_grad_l2:mean": norm} if np.isfinite(norm) else {}}  # JSON has no NaN

    def sampler(self) -> Sampler:
        random = np.random.default_rng(self._random.integers(2**32))
        return Sampler(self.weights.copy(), random, self._end, "short scores" in self._wrong)

    def save(self, directory: Path) -> None:
        facts = {"steps": self._adam.steps, "random": json.dumps(self._random.bit_generator.state)}
        np.savez(directory / "policy.npz", weights=self.weights.flat, **facts, **self._adam.arrays)

    def load(self, directory: Path, *, optimizer: bool = True) -> None:
        with np.load(directory / "policy.npz") as arrays:
            for name, array in {"weights": self.weights.flat, **self._adam.arrays}.items():
                array[:] = arrays[name]
            self._adam.steps = int(arrays["steps"])
            self._random.bit_generator.state = json.loads(str(arrays["random"]))
        if not optimizer:
            self._adam = Adam(self.weights.flat)


@dataclass(frozen=True)
class Sampler:
    """Weights at one moment."""

    weights: Weights
    random: np.random.Generator
    end: int
    scores_short: bool = False

    def sample(
        self, prompt: list[int], count: int, params: Mapping[str, float], *, score: bool = False
    ) -> tuple[bytes, int]:
        """Return a response, with the prompt's log-probabilities if `score`, and how many tokens it has."""
        # what is scored may end with the end token, which the policy does not read
        read = [token for token in prompt if token != self.end]
        trace = unroll_prompts(self.weights, [prompt[:1] if score else read])
        states = trace.states[trace.packed.last()].repeat(count, axis=0)
        limits = np.full(count, int(params["max_tokens"]))
        drawn = complete(self.weights, states, params["temperature"], limits, self.random)
        sequences = [(list(one.tokens), one.logprobs, one.ended) for one in drawn]
        response = write_samples(sequences, self._score(prompt) if score else ())
        return response, sum(len(one.tokens) for one in drawn)

    def _score(self, tokens: list[int]) -> list[float]:
        scored: list[NDArray] = []
        targets = np.array(tokens[1:])
        sample, start, _ = _sample(Datum(tokens[:-1], {"target_tokens": targets}), self.end)
        loss = Loss("", partial(_kept, scored, partial(cross_entropy)))
        loss_gradient(self.weights, self.weights, [start], [sample], loss, Optimization(0.0))
        return [*scored[0]] if self.scores_short else [float("nan"), *scored[0]]


def _weights_sum(datum: Datum) -> float:
    """Return the sum of a datum's weights; without them, a loss has one for each token."""
    weights = datum.inputs.get("weights")
    return float(len(datum.tokens)) if weights is None else max(float(weights.sum()), SMALLEST_SUM)


def _loss(request: ForwardBackward) -> partial[LossTerms]:
    if request.loss == "cross_entropy":
        return partial(cross_entropy)
    names = {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"}
    signs = {"clip_low": -1.0, "clip_high": 1.0}
    bounds = {names[key]: signs[names[key]] * (value - 1.0) for key, value in request.config.items()}
    return partial(registry.find_plugin("losses", request.loss), **bounds)


def cross_entropy(logprobs: Floats, _: Floats, weights: Floats, __: NDArray) -> LossTerms:
    """Minus the weighted log-probability of the targets."""
    return LossTerms(-weights * logprobs, -weights, np.zeros(len(weights), dtype=bool))


def _kept(
    scored: list[NDArray], evaluate: partial[LossTerms], logprobs: Floats, *others: NDArray
) -> LossTerms:
    scored.append(logprobs)
    return evaluate(logprobs, *others)


def _sample(datum: Datum, end: int) -> tuple[TrainingSample, tuple[int, ...], NDArray]:
    """Take everything after the first token as the completion, or what a ratio mask says.

    Of several turns, the sampled tokens are those with a log-probability.
    """
    targets, mask = datum.inputs["target_tokens"], datum.inputs.get("sequence_ratio_mask")
    weights = datum.inputs.get("weights", datum.inputs.get("advantages", np.zeros(len(targets))))
    logprobs = datum.inputs.get("logprobs", np.zeros(len(targets)))
    places = np.arange(0 if mask is None else int(np.flatnonzero(mask)[0]), len(targets))
    if end in targets[:-1]:
        places = np.flatnonzero(logprobs)
    prompt = tuple(datum.tokens[: places[0] + 1])
    gaps = [(n, slice(a + 1, b)) for n, (a, b) in enumerate(pairwise(places), 1) if b > a + 1]
    rollout = Rollout(
        prompt=replace(NOBODY, text=str(prompt)),
        text="",
        tokens=tuple(int(token) for token in targets[places]),
        logprobs=logprobs[places].astype(float),
        pieces=(),
        truncated=False,
        given=tuple(Given(n, tuple(map(int, targets[gap])), "") for n, gap in gaps),
    )
    return TrainingSample(rollout, weights[places].astype(float), 1.0), prompt, places
