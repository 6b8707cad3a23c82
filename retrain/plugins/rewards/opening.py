"""Opens a reward by name: the plugin's own scorer, or its function called once per completion.

Rewards outside their plugin's range are rejected, since a policy's text may exploit a scorer. A plugin whose
rewards have bounds declares them in a constant: `RANGE = (0.0, 1.0)`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from retrain.base import registry
from retrain.base.errors import ConfigError, RunFailedError
from retrain.base.user_code import told_by
from retrain.plugins.rewards import (
    SPEC,
    Answer,
    BatchScorer,
    MetricLog,
    Outcome,
    Score,
    UnscoredError,
    call_for_one,
    call_with_columns,
    is_number,
    one_each,
    score_of,
)
from retrain.plugins.sandbox import with_sandbox

MOST_AT_ONCE = 64  # coroutines in flight; common HTTP clients and servers only queue beyond that
LIMIT_S = 600.0  # limit of one call; no useful call takes longer
TOO_LONG = 'took over {:g} s; reward = "custom" has a timeout_s of its own'
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class RewardRange:
    """The range of a plugin's rewards, including both ends."""

    reward: str  # name of the plugin
    low: float = -math.inf
    high: float = math.inf

    def keep(self, scores: Iterable[Score]) -> list[Score]:
        """Return the scores, with those out of bounds (or NaN) as errors without a value."""
        is_bounded = self.low > -math.inf or self.high < math.inf
        return [self._kept(score) for score in scores] if is_bounded else list(scores)

    def _kept(self, score: Score) -> Score:
        if score.value is None or self.low - ROUNDING <= score.value <= self.high + ROUNDING:
            return score
        declared = f"outside its range {self.low:g} to {self.high:g}"
        what = f"the reward {self.reward!r} returned {score.value:g}, {declared}"
        return Score(None, Outcome.ERROR, what, score.is_over_limit, is_unjudged=True, parts=score.parts)


def range_of(name: str) -> RewardRange:
    """Return the range that a plugin declares; a ConfigError if that is not two numbers in order."""
    declared = registry.plugin("rewards", name).constant("RANGE", None)
    if declared is None:
        return RewardRange(name)
    if not (isinstance(declared, tuple) and len(declared) == 2 and all(map(is_number, declared))):
        raise ConfigError(f"{name!r}: RANGE is {declared!r}; needs the lowest and the highest reward")
    low, high = map(float, declared)
    if low >= high:
        raise ConfigError(f"{name!r}: RANGE is {declared!r}; needs the lowest reward first")
    return RewardRange(name, low, high)


def is_pure(name: str, params: Mapping[str, Any]) -> bool:
    """Whether a reward, and each that it consists of, declares that any process may score a completion."""
    plugin = registry.plugin("rewards", name)
    if plugin.constant("PURE", False) is not True or registry.takes(plugin.found, SPEC.by_name):
        return False
    return all(is_pure(*part) for part in registry.ask("rewards", name, "made_of", params) or ())


def open_reward(
    name: str, params: Mapping[str, Any], sandbox: Mapping[str, Any] | None = None
) -> BatchScorer:
    """Open a reward by TOML name, entry point or dotted path.

    `sandbox` holds `sandbox` and `sandbox_options`, for a reward that takes both and names no sandbox itself.

    Raises:
        ConfigError: no such reward, it rejects its parameters, or what it opens cannot score.
    """
    plugin = registry.plugin("rewards", name)
    opener = plugin.hook("open_scorer")
    if opener is None:
        return CallingScorer(plugin.function(), name, params)
    taken = {parameter.name for parameter in plugin.parameters or ()}
    arguments = with_sandbox(params, sandbox) if sandbox and taken.issuperset(sandbox) else params
    scorer: BatchScorer = registry.check_made("rewards", name, opener(**arguments))
    return scorer if isinstance(scorer, BatchScorer) else ForeignScorer(scorer)


class ForeignScorer(BatchScorer):
    """A scorer whose class does not derive from BatchScorer, with the defaults of what that has besides."""

    score_all: Any = None  # the object's own methods, coroutine functions among them
    close: Any = None

    def __init__(self, scorer: Any) -> None:
        self.score_all, self.close = scorer.score_all, scorer.close


class CallingScorer(BatchScorer):
    """Calls a function for each completion in turn, or once for all if it has TRL's signature.

    Returned awaitables are awaited concurrently.
    """

    def __init__(
        self, function: Callable[..., Any], name: str = "", params: Mapping[str, Any] | None = None
    ) -> None:
        """Wrap a function; `name` is the reward's, for errors."""
        self._function = function
        self._params = params or {}
        self._takes_columns = registry.takes(function, SPEC.by_name)
        self._name = f"reward {name!r}" if name else "the reward"
        self._scored = 0

    @property
    def scored(self) -> int:
        return self._scored

    def score_all(self, answers: Sequence[Answer]) -> list[Score] | Awaitable[list[Score]]:
        """Score every completion, in order; a RunFailedError names the prompt whose reward is no number."""
        batches = [answers] if self._takes_columns and answers else [[answer] for answer in answers]
        calls = [(batch, MetricLog()) for batch in batches]
        returned: list[Any] = []
        try:
            with call_limit(LIMIT_S) as begin:
                for batch, log in calls:
                    begin()
                    returned.append(self._call(batch, log))
                    self._scored += 0 if inspect.isawaitable(returned[-1]) else len(batch)
        except BaseException:
            close_unawaited(returned)
            raise
        if any(map(inspect.isawaitable, returned)):
            return self._await_all(calls, returned)
        return [
            score
            for call, result in zip(calls, returned, strict=True)
            for score in self._scores(*call, result)
        ]

    def _call(self, batch: Sequence[Answer], log: MetricLog) -> Any:
        try:
            if self._takes_columns:
                return call_with_columns(self._function, batch, self._params, log)
            return call_for_one(self._function, batch[0], self._params)
        except (UnscoredError, TimeoutError) as error:
            return unscored(error)
        except SystemExit as error:
            raise self._exited(batch, error) from error

    async def _await_all(
        self, calls: Sequence[tuple[Sequence[Answer], MetricLog]], returned: Sequence[Any]
    ) -> list[Score]:
        """Await all awaitables; the first exception cancels the others and is raised unchanged."""
        slots = asyncio.Semaphore(MOST_AT_ONCE)

        async def scores_of(batch: Sequence[Answer], log: MetricLog, result: Any) -> list[Score]:
            if not inspect.isawaitable(result):
                return self._scores(batch, log, result)
            async with slots:
                try:
                    async with asyncio.timeout(LIMIT_S) as limit:
                        result = await result
                except (UnscoredError, TimeoutError) as error:
                    result = unscored(TimeoutError(TOO_LONG.format(LIMIT_S)) if limit.expired() else error)
                except SystemExit as error:
                    raise self._exited(batch, error) from error
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    result = Score(None, Outcome.ERROR, "the reward cancelled itself")
            self._scored += len(batch)
            return self._scores(batch, log, result)

        tasks = [
            asyncio.ensure_future(scores_of(*call, result))
            for call, result in zip(calls, returned, strict=True)
        ]
        try:
            return [score for scores in await asyncio.gather(*tasks) for score in scores]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            close_unawaited(returned)

    def _exited(self, batch: Sequence[Answer], error: SystemExit) -> RunFailedError:
        return RunFailedError(
            f"{self._name}, prompt {batch[0].prompt.id}: called sys.exit({error.code!r}); "
            'use reward = "custom" for code that may end its process'
        )

    def _scores(self, batch: Sequence[Answer], log: MetricLog, result: Any) -> list[Score]:
        """Return the scores of a call's completions from what it returned, or the Score of each."""
        if isinstance(result, Score):
            return [log.added_to(result)] * len(batch)
        try:
            rewards = one_each(result, len(batch)) if self._takes_columns else [result]
        except TypeError as error:
            raise RunFailedError(f"{self._name}: {error}") from error
        scores = (self._score_of(answer, reward) for answer, reward in zip(batch, rewards, strict=True))
        return [log.added_to(score) for score in scores]

    def _score_of(self, answer: Answer, reward: object) -> Score:
        if reward is None and self._takes_columns:
            return Score(None, Outcome.ERROR, "the reward is None", is_unjudged=True)
        try:
            return score_of(reward)
        except TypeError as error:
            raise RunFailedError(f"{self._name}, prompt {answer.prompt.id}: {error}") from error


def close_unawaited(returned: Sequence[Any]) -> None:
    """Close coroutines that will not be awaited; closing a finished one does nothing."""
    for coroutine in filter(inspect.iscoroutine, returned):
        coroutine.close()


def unscored(error: UnscoredError | TimeoutError) -> Score:
    """Return the outcome for a completion that a function could not score."""
    if isinstance(error, TimeoutError):
        return Score(None, Outcome.TIMEOUT, told_by(error))
    return Score(None, Outcome.ERROR, told_by(error), is_unjudged=True)


@contextmanager
def call_limit(limit_s: float) -> Iterator[Callable[[], object]]:
    """Yield a function that begins a call: TimeoutError is raised after a limit, even while it is blocked.

    This needs SIGALRM, which only the main thread receives: in other threads, and while another timer runs,
    there is no limit. C code that does not check for signals is not interrupted.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield lambda: None
        return
    before = signal.getsignal(signal.SIGALRM)

    def stop(*_: object) -> None:
        raise TimeoutError(TOO_LONG.format(limit_s))

    def begin() -> None:
        signal.signal(signal.SIGALRM, stop)  # for each call, as one may have set its own
        signal.setitimer(signal.ITIMER_REAL, limit_s)

    try:
        yield begin
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
