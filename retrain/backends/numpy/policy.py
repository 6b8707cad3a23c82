"""The embedded backend's policy: a small recurrent network, trained on one core with numpy.

It is a real autoregressive policy with exact gradients, small enough that a campaign finishes in
seconds. It loads no pretrained model and ignores `model`, `base_url` and `lora_rank`. With
`api_latency_s` above 0 it simulates a permit-limited API: each `sample` and `update` is a call that
holds a permit and takes that much longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from retrain.backends import (
    BackendInfo,
    BackendSpec,
    GradientMoments,
    Optimization,
    Sampling,
    SamplingWork,
    UpdateStats,
    Work,
)
from retrain.backends.numpy import NumpyOptions
from retrain.backends.numpy.characters import Characters
from retrain.backends.numpy.files import load_policy, save_policy
from retrain.backends.numpy.gradient import loss_gradient
from retrain.backends.numpy.gru import initial_weights, unroll_prompts
from retrain.backends.numpy.optimizers import Adam, Sgd, clip_by_norm
from retrain.backends.numpy.sampling import Completions, complete
from retrain.backends.numpy.weights import Array, Weights
from retrain.backends.objective import Totals, group_counts, scale_to_step, split_by_group
from retrain.backends.work import ModelCosts, WorkMeter
from retrain.demonstrations import Demonstration
from retrain.errors import BackendMemoryError, NonFiniteError
from retrain.rollouts import Group, Loss, Prompt, Rollout, TrainingSample


class NumpyBackend:
    """A policy and its optimizer; weights, samples and updates depend only on the seed."""

    def __init__(self, spec: BackendSpec, options: NumpyOptions) -> None:
        self._permit = spec.permit
        self._latency_s = float(options.api_latency_s)
        self._computing = threading.Lock()
        self._characters = Characters(spec.alphabet)
        # a negative seed means a random one
        self._random = np.random.default_rng(spec.seed if spec.seed >= 0 else None)
        self._weights = initial_weights(
            self._characters.end, options.embedding, options.hidden, options.dtype, self._random
        )
        self._reference = self._weights.copy()  # the same after a resume, because the seed determines it
        self._new_optimizer = Sgd if options.optimizer == "sgd" else partial(Adam, self._weights.flat)
        self._optimizer = self._new_optimizer()
        self._identity = {"alphabet": self._characters.alphabet, "optimizer": options.optimizer}
        self._previous: Array | None = None  # gradient of a single-part step, to compare with the next step's
        count = self._weights.flat.size
        self.info = BackendInfo(
            parameters=count,
            remote=self._latency_s > 0,
            deterministic=True,
        )
        self._costs = _costs(self._weights)
        self._work = WorkMeter()

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample each prompt's group, with one prefill per prompt.

        Raises:
            NonFiniteError: the policy's log-probabilities are not finite.
            BackendMemoryError: out of memory.
        """
        encoded = [self._characters.encode(p.text) for p in prompts]
        random = self._random if sampling.seed is None else np.random.default_rng(sampling.seed)
        with self._call(), np.errstate(all="ignore"):
            began_s = time.perf_counter()
            with _fitting(f"{len(prompts)} prompts", "lower group_size or max_tokens"):
                trace = unroll_prompts(self._weights, encoded)
                states = trace.states[trace.packed.last()].repeat(sampling.group_size, axis=0)
                prefilled_s = time.perf_counter()
                completions = complete(self._weights, states, sampling, random)
            ended_s = time.perf_counter()
        if not self.info.remote:
            lengths = [len(ids) for ids in encoded]
            self._work.add(
                self._costs.prefill(lengths, max(lengths, default=0), prefilled_s - began_s),
                self._costs.decode(0, completions.lengths, ended_s - prefilled_s),
            )
        if not np.isfinite(completions.logprobs).all():
            raise NonFiniteError(
                "the policy's log-probabilities are not finite: its weights grew without bound; lower lr"
            )
        rollouts = self._rollouts(prompts, completions, sampling)
        return [Group(prompt, tuple(islice(rollouts, sampling.group_size))) for prompt in prompts]

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one optimizer step on the summed loss of `samples`.

        Raises:
            ValueError: there are no samples.
            NonFiniteError: the loss or a gradient is not finite; nothing changed.
            BackendMemoryError: out of memory; nothing changed.
        """
        if not samples:
            raise ValueError("samples: got none; a step without signal needs no update")
        with self._call(), np.errstate(all="ignore"):
            began_s = time.perf_counter()
            with _fitting(f"{len(samples)} rollouts", "raise micro_batches or lower max_tokens"):
                totals, gradient, squares, work = self._accumulate(samples, loss, optimization)
            _check_finite(totals, gradient)
            moments = self._compare(gradient.flat, squares) if squares else None
            norm = clip_by_norm(gradient.flat, optimization.max_grad_norm)
            self._optimizer.step(self._weights.flat, gradient.flat, optimization.lr)
            time_s = time.perf_counter() - began_s
        stats = totals.stats(norm, moments, optimization)
        return stats if self.info.remote else replace(stats, work=replace(work, time_s=time_s))

    def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        """Return written completions as rollouts.

        Raises:
            ConfigError: a text contains a character outside the task's alphabet, or is a conversation.
        """
        return [self._characters.written(one) for one in demonstrations]

    def reset_optimizer(self) -> None:
        """Clear moments and step count."""
        self._optimizer = self._new_optimizer()
        self._previous = None

    def take_sampling_work(self) -> SamplingWork:
        """Return the cost of sampling since the last call."""
        return self._work.take()

    def save(self, directory: Path) -> None:
        """Write weights, optimizer and random state as npz and JSON."""
        save_policy(directory, self._identity, self._weights, self._optimizer, self._random, self._previous)

    def load(self, directory: Path) -> None:
        """Continue bit for bit where `save` was called.

        Raises:
            RecordsError: unreadable, or saved by a policy of another size or alphabet.
        """
        self._previous = load_policy(directory, self._identity, self._weights, self._optimizer, self._random)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Simulate one API call if `api_latency_s` is set: calls wait concurrently and compute in turn."""
        if self._latency_s == 0:
            yield
            return
        with self._permit():
            time.sleep(self._latency_s)
            with self._computing:
                yield

    def _rollouts(
        self, prompts: Sequence[Prompt], completions: Completions, sampling: Sampling
    ) -> Iterator[Rollout]:
        ends = completions.lengths.cumsum()
        means = np.add.reduceat(completions.entropies, ends - completions.lengths) / completions.lengths
        tokens = completions.tokens.tolist()
        for number, (end, length, entropy) in enumerate(
            zip(ends.tolist(), completions.lengths.tolist(), means.tolist(), strict=True)
        ):
            own = tuple(tokens[end - length : end])
            pieces = tuple([self._characters.pieces[token] for token in own])
            yield Rollout(
                prompt=prompts[number // sampling.group_size],
                text="".join(pieces),
                tokens=own,
                logprobs=completions.logprobs[end - length : end],
                pieces=pieces,
                truncated=own[-1] != self._characters.end,
                policy_version=self._optimizer.steps,
                mean_entropy=entropy,
            )

    def _accumulate(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> tuple[Totals, Weights, list[float], Work]:
        """Return the sums over micro-batches of loss, gradient and work, and squared norms if requested."""
        parts = split_by_group(samples, optimization.micro_batches)
        texts = {sample.rollout.prompt.text for sample in samples}
        encoded = {text: self._characters.encode(text) for text in texts}
        gradient = self._weights.zeros_like()
        totals, squares, work = [], [], self._costs.optimize()
        for part in parts:
            prompts = [encoded[sample.rollout.prompt.text] for sample in part]
            total, own = loss_gradient(self._weights, self._reference, prompts, part, loss, optimization)
            gradient.flat += own.flat
            totals.append(total)
            work += self._part_work(set(prompts), part, reference=optimization.kl_coef > 0)
            if optimization.wants_moments:
                squares.append(self._optimizer.sqr_norm(own.flat))
        if squares:
            squares = scale_to_step(squares, group_counts(parts))
        return Totals.sum(totals), gradient, squares, work

    def _part_work(
        self, prompts: Collection[Sequence[int]], part: Sequence[TrainingSample], *, reference: bool
    ) -> Work:
        """Return the work of a micro-batch; each distinct prompt counts once."""
        before = [len(prompt) for prompt in prompts]
        lengths = [len(sample.rollout.tokens) for sample in part]
        drawn = sum(lengths)
        run = sum(before) + drawn - len(lengths)  # last tokens are not fed back
        return self._costs.train(run, drawn, passes=max(before) + max(lengths) - 1, reference=reference)

    def _compare(self, gradient: Array, squares: Sequence[float]) -> GradientMoments | None:
        """Return the moments of the step's parts; for a single part, of it and the previous update."""
        sqr_norm = self._optimizer.sqr_norm
        before, self._previous = self._previous, None
        consecutive = len(squares) == 1
        mean = gradient
        if consecutive:
            self._previous = gradient.copy()
            if before is None:
                return None
            squares, mean = [sqr_norm(before), sqr_norm(gradient)], (before + gradient) / 2
        if not self._optimizer.is_settled:
            return None
        return GradientMoments(np.array(squares)[:, None], np.array([sqr_norm(mean)]), consecutive)


@contextmanager
def _fitting(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise BackendMemoryError(f"{what} did not fit in memory ({error}); {advice}") from error


def _costs(weights: Weights) -> ModelCosts:
    """Return the policy's size; the input table is computed once per call, and biases are not counted."""
    return ModelCosts(
        body=weights["recurrent"].size,
        head=weights["output"].size,
        weight_bytes=weights.flat.itemsize,
        trained_bytes=weights.flat.nbytes,
    )


def _check_finite(totals: Totals, gradient: Weights) -> None:
    causes = [] if np.isfinite(totals.loss) else [f"the loss is {totals.loss}"]
    causes += [f"the gradient of {name!r} is not finite" for name in gradient.non_finite()]
    if causes:
        raise NonFiniteError(
            f"{'; '.join(causes)}; the optimizer step was not taken, lower lr or check the rewards"
        )
