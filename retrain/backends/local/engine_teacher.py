"""A teacher that is a model at a server, which tells the log-probabilities of a prompt's tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from retrain.backends import BackendSpec, Teacher
from retrain.backends.engines import Ids, RefusedError
from retrain.backends.engines.openai import Engine, ScoredPrompt, ServedModel
from retrain.backends.local import LocalOptions
from retrain.backends.local.engine import MOST_CALLS, EngineSampler
from retrain.backends.local.training import Top
from retrain.backends.text import PARTIAL
from retrain.base.errors import ConfigError, NonFiniteError, RunFailedError
from retrain.base.rollouts import Floats, Ints, Prompt, Rollout, TeacherScores

T = TypeVar("T")
log = logging.getLogger(__name__)

KEY = "[teacher].teacher"
TOKENS_PER_CALL = 8192  # unless one rollout has more; an answer has about 150 bytes for each
TOP = 20  # likeliest tokens in place of whole distributions; vLLM's own limit, unless --max-logprobs sets it
TRIED_TOKENS = 256  # whose texts are compared before the first step
IMPOSSIBLE = -9999.0  # nats that vLLM writes for minus infinity, which JSON has not
ROUNDING = 1e-3  # nats by which a log-probability may exceed 0


class Ask(Protocol):
    """Makes a call of a server."""

    def __call__(self, call: Callable[[Engine], T], /) -> T: ...


def open_engine_teacher(
    spec: BackendSpec,
    options: LocalOptions,
    sampler: EngineSampler | None,
    encode: Callable[[Prompt], Ids],
    tokenizer: Any,
    known: int,
    *,
    is_whole: bool,
) -> EngineTeacher:
    """Return the teacher at `teacher_url`, or at the server that samples, once it has scored a few tokens.

    Args:
        known: number of tokens that the policy has an embedding for.
        is_whole: whether it tells its likeliest tokens, in place of whole distributions.

    Raises:
        ConfigError: the server refuses, tells no log-probabilities of prompts, or its tokens are others.
        InfrastructureError: the server does not answer.
    """
    ask, close = _server(spec, options, sampler)
    try:
        model = _chosen(ask(Engine.models), options.teacher_model)
        teacher = EngineTeacher(ask, close, model, encode, tokenizer, known, TOP if is_whole else 1)
        teacher.try_out()
    except (RefusedError, RunFailedError) as error:
        close()
        raise ConfigError(f"{KEY}: {error}") from error
    except BaseException:
        close()
        raise
    return teacher


def _server(
    spec: BackendSpec, options: LocalOptions, sampler: EngineSampler | None
) -> tuple[Ask, Callable[[], None]]:
    """Return how to ask the teacher's server, and what to do at the end."""
    if options.teacher_url:
        own = Engine(
            options.teacher_url,
            reload=options.engine_reload,
            silence_s=options.engine_timeout_s,
            permit=spec.permit,
            observe_call=spec.observe_call,
            named_by="[backend.options].teacher_url",
        )

        def ask(call: Callable[[Engine], T]) -> T:
            return call(own)

        return ask, partial(own.close, ())
    if sampler is None:
        raise ConfigError(f"{KEY}: needs the server of the teacher; set [backend.options].teacher_url")
    return sampler.ask, lambda: None


def _chosen(models: Sequence[ServedModel], name: str) -> ServedModel:
    """Return the model of this name, or the only one; adapters are none unless they are named."""
    fitting = [model for model in models if (model.name == name if name else not model.is_adapter)]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(model.name for model in models) or "none"
    key = "[backend.options].teacher_model"
    raise ConfigError(f"{key}: got {name!r}; the server has these models: {listed}; name one of them")


class EngineTeacher(Teacher):
    """A model at a server. Its answers are of temperature 1 whatever a call asks for."""

    def __init__(
        self,
        ask: Ask,
        close: Callable[[], None],
        model: ServedModel,
        encode: Callable[[Prompt], Ids],
        tokenizer: Any,
        known: int,
        most: int,
    ) -> None:
        self._ask, self._close, self._known, self._most = ask, close, known, most
        self._model, self._encode, self._tokenizer = model, encode, tokenizer
        self._same: set[int] = set()  # tokens that have been compared

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        rows, places = [], []
        for rollout in rollouts:
            prompt, (read, own) = self._encode(rollout.prompt), rollout.placed()
            rows.append((*prompt, *read))
            places.append([len(prompt) + place - 1 for place in own])  # the first token has no scores
        context, longest = self._model.context, max(map(len, rows))
        if context is not None and longest >= context:
            raise ConfigError(
                f"{KEY}: a prompt with its completion has {longest} tokens, and the server's context is "
                f"{context}, with the one that it samples; lower max_tokens, or start it with more (vLLM: "
                "--max-model-len)"
            )
        scores = []
        for row, own, scored in zip(rows, places, self._scored(rows), strict=True):
            logprobs = scored.logprobs[own]
            if not (np.isfinite(logprobs) & (logprobs > IMPOSSIBLE)).all():
                raise NonFiniteError(f"{KEY}: {self._model.name} gives no finite log-probabilities")
            whole = self._top(scored.top[own], scored.top_logprobs[own]) if self._most > 1 else None
            scores.append(TeacherScores(logprobs, len(row), scored.top[own, 0], whole))
        return scores

    def _top(self, ids: Ints, logprobs: Floats) -> Top:
        """Return the likeliest tokens without those, of a vocabulary rounded up, that the policy has not."""
        is_unknown = ids >= self._known
        order = np.argsort(is_unknown, axis=1, kind="stable")[:, : ids.shape[1] - is_unknown.sum(1).max()]
        return Top(*(torch.from_numpy(np.take_along_axis(each, order, 1)) for each in (ids, logprobs)))

    def close(self) -> None:
        self._close()

    def try_out(self) -> None:
        """Have tokens of the whole vocabulary scored: the server must do it, and have the same ones."""
        added = {*self._tokenizer.get_added_vocab().values()}
        every = {*self._tokenizer.get_vocab().values()}
        ids = sorted(token for token in every - added or every if token < self._known)
        most = min(TRIED_TOKENS, len(ids), (self._model.context or self._known) - 2)
        tried = [ids[number] for number in np.linspace(0, len(ids) - 1, most).round().astype(int)]
        # the first token is told nothing of, so it is one that comes again
        (scored,) = self._scored([(tried[-1], *tried)])
        if not any(scored.texts):
            log.warning("%s: the server does not tell its tokens' texts, which cannot be compared", KEY)

    def _scored(self, rows: Sequence[Ids]) -> list[ScoredPrompt]:
        """Return what the model makes of each row, by calls at the same time."""
        with ThreadPoolExecutor(MOST_CALLS) as threads:
            scored = [*chain.from_iterable(threads.map(self._ask_for, _calls(rows)))]
        for row, one in zip(rows, scored, strict=True):
            if (one.logprobs > ROUNDING).any():
                raise RunFailedError(
                    f"the teacher's server gives {one.logprobs.max():g} as a log-probability; start it so "
                    "that it returns them (vLLM: --logprobs-mode raw_logprobs or processed_logprobs)"
                )
            self._compare(row[1:], one.texts)
        return scored

    def _ask_for(self, rows: Sequence[Ids]) -> list[ScoredPrompt]:
        return self._ask(lambda engine: engine.score(self._model.name, rows, self._most))

    def _compare(self, ids: Ids, texts: Sequence[str | None]) -> None:
        """Raise a ConfigError if a token, met for the first time, has another text at the server."""
        for token, text in zip(ids, texts, strict=True):
            if token in self._same or text is None:
                continue
            self._same.add(token)
            own = self._tokenizer.decode([token])
            # some servers tell a token with its space, some without, and bytes of a character as they like
            if PARTIAL in own + text or not own.strip() or not text.strip() or own.strip() == text.strip():
                continue
            raise ConfigError(
                f"{KEY}: token {token} is {text!r} in the teacher and {own!r} in [model].model; name a "
                "teacher with the model's tokenizer"
            )


def _calls(rows: Sequence[Ids]) -> Iterator[list[Ids]]:
    """Iterate over rows in calls of some tokens, or of one row."""
    call: list[Ids] = []
    tokens = 0
    for row in rows:
        if call and tokens + len(row) > TOKENS_PER_CALL:
            yield call
            call, tokens = [], 0
        call.append(row)
        tokens += len(row)
    yield call
