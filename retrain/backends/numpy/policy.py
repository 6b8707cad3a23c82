"""The embedded backend's policy: a small recurrent network, trained on one core with numpy.

It is a real autoregressive policy with exact gradients, small enough that a campaign finishes in
seconds. It loads no pretrained model and ignores `model`, `base_url` and `lora_rank`. With
`api_latency_s` above 0 it simulates a permit-limited API: each `sample` and `update` is a call that
holds a permit and takes that much longer.
"""

from __future__ import annotations

import threading
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from retrain.backends import (
    SELF,
    Backend,
    BackendInfo,
    BackendSpec,
    GradientMoments,
    Optimization,
    Sampling,
    Teacher,
    TeacherSpec,
    UpdateStats,
)
from retrain.backends.engines import Drawn, Ids
from retrain.backends.metering import ModelCosts, SamplingWork, Work, WorkMeter
from retrain.backends.numpy import CONTEXT, NumpyOptions, length_problem
from retrain.backends.numpy.gru import (
    Adam,
    Array,
    Batch,
    Ints,
    Sgd,
    Weights,
    clip_by_norm,
    initial_weights,
    loss_gradient,
    unroll_prompts,
)
from retrain.backends.numpy.sampling import Characters, TurnRows, complete
from retrain.backends.objective import Totals, moments_of, split_by_group
from retrain.backends.rows import AdmittedTurn, LiveRows, TurnFeed, unsampled, with_turns
from retrain.backends.saved import reading, write_facts
from retrain.backends.text import as_written, to_groups
from retrain.base.errors import (
    BackendMemoryError,
    ConfigError,
    FullContextError,
    NonFiniteError,
    PromptError,
    RecordsError,
)
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import (
    FirstTurn,
    Given,
    Group,
    Loss,
    NextTurn,
    Prompt,
    Rollout,
    TeacherScores,
    TrainingSample,
)
from retrain.config.files import NUMPY, weights_of
from retrain.control.rules.concurrency_limit import WAITED_S, CallFacts

FORMAT = 2  # of a checkpoint's two files; increment when old ones can no longer be read
FACTS = "policy.json"
PREVIOUS, START, TEACHER = "previous_gradient", "start", "teacher"


class NumpyBackend(Backend):
    """A policy and its optimizer; weights, samples and updates depend only on the seed."""

    def __init__(self, spec: BackendSpec, options: NumpyOptions) -> None:
        self._permit, self._observe_call = spec.permit, spec.observe_call
        self._latency_s = float(options.api_latency_s)
        self._computing = threading.Lock()
        self.characters = Characters(spec.alphabet)
        # a negative seed means a random one
        self._random = np.random.default_rng(spec.seed if spec.seed >= 0 else None)
        self.weights = initial_weights(
            self.characters.end, options.embedding, options.hidden, options.dtype, self._random
        )
        self._reference = self.weights.copy()  # the same after a resume, because the seed determines it
        self._teacher: Weights | None = None  # of a teacher that is this policy
        self._start: Weights | None = None  # instead of the seed's, if the run began with other weights
        self._new_optimizer = Sgd if options.optimizer == "sgd" else partial(Adam, self.weights.flat)
        self._optimizer = self._new_optimizer()
        self._identity: dict[str, object] = {  # what a checkpoint and a policy must share
            "format": FORMAT,
            "alphabet": self.characters.alphabet,
            "optimizer": options.optimizer,
            "shapes": {name: list(shape) for name, shape in self.weights.shapes.items()},
            "dtype": options.dtype,
        }
        self._previous: list[Array] = []  # gradient of a single-part step, to compare with the next step's
        is_remote = self._latency_s > 0
        self.info = BackendInfo(
            self.weights.flat.size,
            remote=is_remote,
            extends=True,
            answers_turns=not is_remote,
            deterministic=True,
        )
        weights = self.weights
        self._costs = ModelCosts(  # the input table is computed once per call, and biases are not counted
            body=weights["recurrent"].size,
            head=weights["output"].size,
            weight_bytes=weights.flat.itemsize,
            trained_bytes=weights.flat.nbytes,
        )
        self._work = WorkMeter()

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        if problem := next(filter(None, map(length_problem, prompts)), ""):
            raise FullContextError(problem)
        encoded = [*map(self.characters.of, prompts)]
        drawn = self._drawn(encoded, np.full(len(prompts), sampling.max_tokens), sampling)
        return to_groups(self.characters, prompts, drawn, sampling.group_size, self._optimizer.steps)

    def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        """Sample another turn of each rollout that the context has room for; it runs again from its start."""
        begun = [self._begin(turn) for turn in turns]
        fits = [one for one in begun if one is not None]
        limits = np.array([one.limit for one in fits], np.int64)
        drawn = self._drawn([one.ids for one in fits], limits, sampling) if fits else []
        return with_turns(self.characters, begun, drawn)

    def sample_turns(self, feed: TurnFeed, sampling: Sampling) -> None:
        turns = TurnRows(self.weights, LiveRows(feed, self.characters, self._begin), sampling.temperature)
        with np.errstate(all="ignore"), _fitting("turns", "lower group_size or max_tokens"):
            turns.run()
        self._work.add(*turns.work(self._costs))

    def read(self, rollout: Rollout) -> Ids:
        characters = self.characters
        return (*characters.of(rollout.prompt), *rollout.placed(characters.end)[0])

    def shown(self, tokens: Ids) -> str:
        return self.characters.completions([self.characters.read(tokens)])[0]

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        parts = split_by_group(samples, optimization.micro_batches)
        with self._call(), np.errstate(all="ignore"):
            began_s = time.perf_counter()
            with _fitting(f"{len(samples)} rollouts", "raise micro_batches or lower max_tokens"):
                totals, gradient, squares, work = self._accumulate(parts, loss, optimization)
            causes = [] if np.isfinite(totals.loss) else [f"the loss is {totals.loss}"]
            causes += [f"the gradient of {name!r} is not finite" for name in gradient.non_finite()]
            if causes:
                raise NonFiniteError(
                    f"{'; '.join(causes)}; the optimizer step was not taken, lower lr or check the rewards"
                )
            moments = self._compare(gradient.flat, squares, parts) if squares else None
            norm = clip_by_norm(gradient.flat, optimization.max_grad_norm)
            self._optimizer.step(self.weights.flat, gradient.flat, optimization.lr)
            time_s = time.perf_counter() - began_s
        stats = totals.stats(norm, moments, optimization)
        return stats if self.info.remote else replace(stats, work=replace(work, time_s=time_s))

    def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        rollouts, characters = [], self.characters
        for demonstration in demonstrations:
            prompt, row = demonstration.prompt, f"[warmup].path: row {demonstration.prompt.id}"
            if prompt.messages:
                raise ConfigError(f"{row} is a conversation, which needs a chat template")
            characters.encode(prompt.text, f"{row}: ")
            tokens = (*characters.encode(demonstration.completion, f"{row}: "), characters.end)
            rollouts.append(as_written(characters, demonstration, tokens))
        return rollouts

    def reset_optimizer(self) -> None:
        self._optimizer = self._new_optimizer()
        self._previous = []

    def take_sampling_work(self) -> SamplingWork:
        return self._work.take()

    def save(self, directory: Path) -> None:
        """Write all state that later steps depend on, bit for bit: arrays as npz, the rest as JSON."""
        arrays: dict[str, Any] = {"weights": self.weights.flat, **self._optimizer.arrays}
        if self._previous:
            arrays[PREVIOUS] = self._previous[0]
        if self._start is not None:
            arrays[START] = self._start.flat
        if self._teacher is not None:
            arrays[TEACHER] = self._teacher.flat
        np.savez(directory / NUMPY, **arrays)
        progress = {"optimizer_steps": self._optimizer.steps, "random": self._random.bit_generator.state}
        write_facts(directory / FACTS, self._identity | progress)

    def load(self, directory: Path) -> None:
        with reading(directory / FACTS, "numpy", self._identity, zipfile.BadZipFile) as facts:
            arrays = arrays_of(directory)
            targets = {"weights": self.weights.flat, **self._optimizer.arrays}
            values = {name: arrays[name] for name in targets}
            self._random.bit_generator.state = facts["random"]
            self._optimizer.steps = facts["optimizer_steps"]
            for name, target in targets.items():
                target[:] = values[name]
            self._previous = [arrays[PREVIOUS]] if PREVIOUS in arrays else []
            if START in arrays:
                self._reference.flat[:] = arrays[START]
                self._start = self._reference
            if self._teacher is not None and TEACHER in arrays:
                self._teacher.flat[:] = arrays[TEACHER]

    def start_from(self, adapter: str, *, is_reference: bool) -> None:
        file = weights_of(adapter)
        directory = file.parent if file else Path(adapter)
        identity = {key: value for key, value in self._identity.items() if key != "optimizer"}
        fix = "make them equal, or name another run"
        try:
            with reading(directory / FACTS, "numpy", identity, zipfile.BadZipFile, fix=fix):
                self.weights.flat[:] = arrays_of(directory)["weights"]
        except RecordsError as error:
            raise ConfigError(f"[model].adapter: {error}") from error
        if is_reference:
            self._reference = self._start = self.weights.copy()
        if self._teacher is not None:
            self._teacher.flat[:] = self.weights.flat

    def has_start(self) -> bool:
        return self._start is not None

    def open_teacher(self, teacher: TeacherSpec) -> NumpyTeacher:
        if teacher.name == SELF:
            self._teacher = self._teacher or self.weights.copy()
            return NumpyTeacher(teacher, self._teacher, self.characters, self.weights)
        return NumpyTeacher(teacher, weights_of_run(teacher.name, self.characters), self.characters)

    def _begin(self, turn: FirstTurn | NextTurn) -> AdmittedTurn | None:
        """Return what a turn is sampled from; None without room for it."""
        if isinstance(turn, FirstTurn):
            if problem := length_problem(turn.prompt):
                raise FullContextError(problem)
            rollout = unsampled(turn.prompt, self._optimizer.steps)
        else:
            text = "".join(content for _, content in turn.messages)
            if len(text) > CONTEXT:
                raise PromptError(
                    f"an observation has {len(text)} characters, and the policy's context is {CONTEXT}; "
                    "shorten what the environment says"
                )
            characters, tokens = self.characters, turn.tokens
            read = characters.read(tokens) if tokens else characters.encode(text, "observation ")
            observation = Given(len(turn.rollout.tokens), read, text)
            rollout = replace(turn.rollout, given=(*turn.rollout.given, observation))
        ids = self.read(rollout)
        return AdmittedTurn(rollout, ids, turn.max_tokens) if len(ids) <= CONTEXT else None

    def _drawn(self, contexts: Sequence[Ids], limits: Ints, sampling: Sampling) -> list[Drawn]:
        """Return each context's completions, at most `limits` (contexts,) tokens long."""
        random = self._random if sampling.seed is None else np.random.default_rng(sampling.seed)
        with self._call(), np.errstate(all="ignore"):
            began_s = time.perf_counter()
            with _fitting(f"{len(contexts)} prompts", "lower group_size or max_tokens"):
                trace = unroll_prompts(self.weights, contexts)
                states = trace.states[trace.packed.last()].repeat(sampling.group_size, axis=0)
                limits = limits.repeat(sampling.group_size)
                prefilled_s = time.perf_counter()
                drawn = complete(self.weights, states, sampling.temperature, limits, random)
            ended_s = time.perf_counter()
        if not self.info.remote:
            before, lengths = [len(ids) for ids in contexts], np.array([len(one.tokens) for one in drawn])
            self._work.add(
                self._costs.prefill(before, max(before, default=0), prefilled_s - began_s),
                self._costs.decode(0, lengths, ended_s - prefilled_s),
            )
        return drawn

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Simulate one API call if `api_latency_s` is set: calls wait concurrently and compute in turn."""
        if self._latency_s == 0:
            yield
            return
        asked_s = time.perf_counter()
        with self._permit():
            waited = time.perf_counter() - asked_s > WAITED_S
            time.sleep(self._latency_s)
            with self._computing:
                yield
        if self._observe_call is not None:
            self._observe_call(CallFacts("call", self._latency_s, waited=waited))

    def _accumulate(
        self, parts: Sequence[Sequence[TrainingSample]], loss: Loss, optimization: Optimization
    ) -> tuple[Totals, Weights, list[float], Work]:
        """Return the sums over micro-batches of loss, gradient and work, and squared norms if requested."""
        prompts = {sample.rollout.prompt for part in parts for sample in part}
        encoded = {prompt: self.characters.of(prompt) for prompt in prompts}
        gradient = self.weights.zeros_like()
        totals, squares, work = [], [], self._costs.optimize()
        for part in parts:
            prompt_ids = [encoded[sample.rollout.prompt] for sample in part]
            total, part_gradient = loss_gradient(
                self.weights, self._reference, prompt_ids, part, loss, optimization
            )
            gradient.flat += part_gradient.flat
            totals.append(total)
            before = [len(ids) for ids in set(prompt_ids)]  # each distinct prompt runs once
            after, drawn = [sample.rollout.length for sample in part], [len(s.rollout.tokens) for s in part]
            run = sum(before) + sum(after) - len(after)  # last tokens are not fed back
            passes, reference = max(before) + max(after) - 1, optimization.kl_coef > 0
            work += self._costs.train(run, sum(drawn), passes, reference=reference)
            if optimization.wants_moments:
                squares.append(self._optimizer.sqr_norm(part_gradient.flat))
        return Totals.sum(totals), gradient, squares, work

    def _compare(
        self, gradient: Array, squares: Sequence[float], parts: Sequence[Sequence[TrainingSample]]
    ) -> GradientMoments | None:
        """Return the moments of the step's parts, and keep a single part's gradient for the next step."""
        optimizer, before = self._optimizer, self._previous
        self._previous = [gradient.copy()] if len(parts) == 1 else []
        moments = moments_of(squares, parts, [gradient], before, lambda arrays: optimizer.sqr_norm(*arrays))
        return moments if optimizer.steps >= optimizer.first_settled_step else None


def weights_of_run(teacher: str, characters: Characters) -> Weights:
    """Return the weights of a finished run; a ConfigError if there are none, or its tokens are others."""
    file = weights_of(teacher)
    if file is None or file.name != NUMPY:
        raise ConfigError(f"[teacher].teacher: {teacher!r} is no run of the numpy backend; name one that is")
    try:
        with reading(file.parent / FACTS, "numpy", {"format": FORMAT}, zipfile.BadZipFile) as facts:
            weights = Weights({name: tuple(shape) for name, shape in facts["shapes"].items()}, facts["dtype"])
            weights.flat[:] = arrays_of(file.parent)["weights"]
            alphabet = str(facts["alphabet"])
    except RecordsError as error:
        raise ConfigError(f"[teacher].teacher: {error}") from error
    tokens = enumerate(zip_longest(alphabet, characters.alphabet))
    for number, (its, own) in tokens:
        if its != own:
            its, own = (repr(token) if token else "the end" for token in (its, own))
            raise ConfigError(
                f"[teacher].teacher: token {number} of {teacher} is {its}, and {own} in this run; name a run "
                "of a task with the same alphabet"
            )
    return weights


class NumpyTeacher(Teacher):
    """Weights that score tokens; with `policy`, those that `refresh` copies."""

    def __init__(
        self, spec: TeacherSpec, weights: Weights, characters: Characters, policy: Weights | None = None
    ) -> None:
        self._spec, self._weights, self._characters, self._policy = spec, weights, characters, policy

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        prompts = [self._characters.of(rollout.prompt) for rollout in rollouts]
        batch = Batch.of(prompts, rollouts, self._characters.end)
        with np.errstate(all="ignore"):
            logp = batch.run(self._weights, self._spec.temperature)[2][batch.rows].astype(np.float64)
        if not np.isfinite(logp).all():
            raise NonFiniteError(f"[teacher].teacher: {self._spec.name} gives no finite log-probabilities")
        chosen, likeliest = logp[np.arange(len(logp)), batch.targets], logp.argmax(axis=1)
        scores, start = [], 0
        for prompt, rollout in zip(prompts, rollouts, strict=True):
            own = slice(start, start + len(rollout.tokens))
            start = own.stop
            whole, read = logp[own] if self._spec.is_whole else None, len(prompt) + rollout.length
            scores.append(TeacherScores(chosen[own], read, likeliest[own], whole))
        return scores

    def refresh(self) -> None:
        if self._policy is None:
            super().refresh()
        else:
            self._weights.flat[:] = self._policy.flat


def arrays_of(directory: Path) -> dict[str, Array]:
    """Return the arrays of a checkpoint."""
    # opened here, because np.load does not close a file that is not a zip
    with (directory / NUMPY).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


@contextmanager
def _fitting(what: str, advice: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as error:
        raise BackendMemoryError(f"{what} did not fit in memory ({error}); {advice}") from error
