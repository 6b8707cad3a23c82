"""Functions that compute on after their time are ended, and processes play further episodes."""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, count
from traceback import walk_stack

import pytest

from retrain.base import event_loop
from retrain.base.rollouts import Prompt
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.tools import ToolBox, ToolCall
from retrain.trainer.episodes import Episodes, summary_of
from tests.plugins.test_environments import HOW, write
from tests.semaphore_processes import wait_until


def spin() -> int:
    """Count for ever."""
    return sum(0 for _ in count())


def compute_in_c() -> None:
    """Compute for seconds without Python's lock, in a function of C, which no exit interrupts."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000_000)


class Game:
    """Spins for prompt 0; else its reward is the process that plays it."""

    def start(self, prompt: Prompt) -> str:
        self.spins = prompt.id == 0
        return "?"

    def step(self, completion: str) -> tuple[str, float, bool]:
        if self.spins:
            spin()
        return "", float(os.getpid()), True


class CompiledGame(Game):
    """The same, but computes in C."""

    def step(self, completion: str) -> tuple[str, float, bool]:
        if self.spins:
            compute_in_c()
        return "", float(os.getpid()), True


class CoroutineGame(Game):
    """The same, as a coroutine."""

    async def step(self, completion: str) -> tuple[str, float, bool]:  # type: ignore[override]
        return super().step(completion)


def has_watched() -> bool:
    """Whether no thread is watched any more."""
    return all(thread.name != "runaway" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def usual_interval() -> Iterator[None]:
    usual_s = sys.getswitchinterval()
    yield
    wait_until(has_watched)
    sys.setswitchinterval(usual_s)


def has_stopped() -> bool:
    """Whether no thread is in `spin` any more."""
    frames = chain.from_iterable(walk_stack(frame) for frame in sys._current_frames().values())
    return all(frame.f_code is not spin.__code__ for frame, _ in frames)


@pytest.mark.parametrize("game", [Game, CompiledGame, CoroutineGame])
def test_further_episodes_are_played_in_processes(game: Callable[[], Game]) -> None:
    known, name = len(event_loop.RUNAWAYS), f"{__name__}.{game.__name__}"  # type: ignore[attr-defined]
    episodes = Episodes(EnvironmentSection(environment=name, time_limit_s=1.0), game, write("x"))
    try:
        (first,) = episodes.play([Prompt(0, "?", "")], HOW)
        wait_until(lambda: len(event_loop.RUNAWAYS) > known)
        wait_until(has_stopped)
        (second,) = episodes.play([Prompt(1, "?", "")], HOW)
    finally:
        episodes.close()
    spinning, fine = first.rollouts[0].episode, second.rollouts[0].episode
    assert spinning
    assert spinning.timed_out
    assert fine
    assert fine.error == ""
    assert fine.reward != os.getpid()
    summary = summary_of(second.rollouts)
    assert summary
    assert summary.runaway == fine.runaway != ""


def test_a_tool_that_computes_on_is_ended() -> None:
    known, box = len(event_loop.RUNAWAYS), ToolBox({"tools": [f"{__name__}.spin"], "call_limit_s": 0.2}, None)
    said, is_error = asyncio.run(box.answer(ToolCall("spin", {})))
    assert (said, is_error) == ("error: spin took longer than 0.2 s", True)
    wait_until(lambda: len(event_loop.RUNAWAYS) > known)
    wait_until(has_stopped)
    assert event_loop.RUNAWAYS[-1] == "the tool spin"


def test_each_of_many_threads_that_share_a_processor_is_ended() -> None:
    def exit_from_spin() -> None:
        with suppress(SystemExit):
            spin()

    known = len(event_loop.RUNAWAYS)
    spinning = [threading.Thread(target=exit_from_spin, daemon=True) for _ in range(16)]
    for thread in spinning:
        thread.start()
    for thread in spinning:
        event_loop.end_runaway(thread, "one of many")
    wait_until(has_stopped)
    assert len(event_loop.RUNAWAYS) == known + len(spinning)


def test_threads_pass_the_lock_on_more_often_once_one_cannot_be_ended() -> None:
    def compute() -> None:
        with suppress(SystemExit):
            compute_in_c()

    usual_s, computing = sys.getswitchinterval(), threading.Thread(target=compute, daemon=True)
    computing.start()
    event_loop.end_runaway(computing, "a function of C")
    wait_until(has_watched)
    assert sys.getswitchinterval() < usual_s / 10
    computing.join()


def test_a_thread_that_waits_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "WATCHED_S", 0.5)
    over, known, ended = threading.Event(), len(event_loop.RUNAWAYS), threading.Event()

    def wait() -> None:
        over.wait()
        ended.set()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    event_loop.end_runaway(waiting, "a wait")
    while not has_watched():
        pass  # this thread computes
    over.set()
    assert ended.wait(60)
    assert len(event_loop.RUNAWAYS) == known


def test_the_time_of_a_thread_that_ends_while_it_is_asked_for_is_not_known() -> None:
    """By the thread's own data, which the system has freed by then, it would end the process."""

    class Ending(threading.Thread):
        def is_alive(self) -> bool:
            return True

    ended = Ending(target=time.process_time)
    ended.start()
    ended.join()
    wait_until(lambda: event_loop._processor_s(ended) == 0)  # the system ends it a little later
    assert event_loop._processor_s(threading.current_thread()) == pytest.approx(time.thread_time(), abs=0.1)
