"""Opens a reward by name: the plugin's own scorer, or its function called once per completion."""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from retrain import registry
from retrain.errors import RunFailedError
from retrain.rewards import Answer, BatchScorer, Outcome, Score, UnscoredError, number_of

MOST_AT_ONCE = 64  # coroutines in flight; common HTTP clients and servers only queue beyond that
LIMIT_S = 600.0  # limit of one call; no useful call takes longer
TOO_LONG = 'took over {:g} s; reward = "custom" has a timeout_s of its own'


def open_scorer(
    name: str, params: Mapping[str, Any], sandbox: Mapping[str, Any] | None = None
) -> BatchScorer:
    """Open a reward by TOML name, entry point or dotted path.

    `sandbox` holds `sandbox` and `sandbox_options`, for a reward that takes them as parameters.

    Raises:
        ConfigError: no such reward, or it rejects its parameters.
    """
    opener = registry.hook("rewards", name, "open_scorer")
    if opener is not None:
        taken = {parameter.name for parameter in registry.plugin("rewards", name).parameters() or ()}
        given = {key: value for key, value in (sandbox or {}).items() if key in taken}
        scorer: BatchScorer = opener(**{**given, **params})
        return scorer
    return CallingScorer(partial(registry.find("rewards", name), **params), name)


class CallingScorer:
    """Calls a function for each completion in turn; returned awaitables are awaited concurrently."""

    def __init__(self, function: Callable[..., Any], name: str = "") -> None:
        """Wrap a function; `name` is the reward's, for errors."""
        self._function = function
        self._name = f"reward {name!r}" if name else "the reward"

    def score_all(self, answers: Sequence[Answer]) -> list[Score] | Awaitable[list[Score]]:
        """Score every completion, in order.

        Raises:
            RunFailedError: a reward is not a number, or called sys.exit; names the prompt. Other
                exceptions of the function are raised unchanged.
        """
        given: list[Any] = []
        try:
            given.extend(map(self._call, answers))
        except BaseException:
            close_unawaited(given)
            raise
        if any(map(inspect.isawaitable, given)):
            return self._await_all(answers, given)
        return [self._score_of(answer, one) for answer, one in zip(answers, given, strict=True)]

    def close(self) -> None:
        """Do nothing: no process or connection is open."""

    def _call(self, answer: Answer) -> Any:
        try:
            with _interrupted_after(LIMIT_S, TOO_LONG.format(LIMIT_S)):
                return self._function(answer.completion, answer.prompt)
        except (UnscoredError, TimeoutError) as error:
            return unscored(error)
        except SystemExit as error:
            raise self._exited(answer, error) from error

    async def _await_all(self, answers: Sequence[Answer], given: Sequence[Any]) -> list[Score]:
        """Await all awaitables; the first exception cancels the others and is raised unchanged."""
        slots = asyncio.Semaphore(MOST_AT_ONCE)
        tasks = [
            asyncio.ensure_future(self._awaited(answer, one, slots))
            for answer, one in zip(answers, given, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            close_unawaited(given)

    async def _awaited(self, answer: Answer, given: Any, slots: asyncio.Semaphore) -> Score:
        if not inspect.isawaitable(given):
            return self._score_of(answer, given)
        async with slots:
            try:
                async with asyncio.timeout(LIMIT_S) as limit:
                    return self._score_of(answer, await given)
            except (UnscoredError, TimeoutError) as error:
                return unscored(TimeoutError(TOO_LONG.format(LIMIT_S)) if limit.expired() else error)
            except SystemExit as error:
                raise self._exited(answer, error) from error
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                return unscored(UnscoredError("the reward cancelled itself"))

    def _exited(self, answer: Answer, error: SystemExit) -> RunFailedError:
        return RunFailedError(
            f"{self._name}, prompt {answer.prompt.id}: called sys.exit({error.code!r}); "
            'use reward = "custom" for code that may end its process'
        )

    def _score_of(self, answer: Answer, given: Any) -> Score:
        if isinstance(given, Score):
            return given
        try:
            return Score(number_of(given))
        except TypeError as error:
            raise RunFailedError(f"{self._name}, prompt {answer.prompt.id}: {error}") from error


def close_unawaited(given: Sequence[Any]) -> None:
    """Close coroutines that will not be awaited; closing a finished one does nothing."""
    for one in given:
        if inspect.iscoroutine(one):
            one.close()


def unscored(error: UnscoredError | TimeoutError) -> Score:
    """Return the outcome for a completion that a function could not score."""
    outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else Outcome.ERROR
    return Score(None, outcome, str(error))


@contextmanager
def _interrupted_after(limit_s: float, said: str) -> Iterator[None]:
    """Raise TimeoutError in code that takes longer, even while it is blocked.

    Needs SIGALRM, which only the main thread receives: in other threads, and while another timer runs,
    there is no limit. C code that does not check for signals is not interrupted.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(said)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
