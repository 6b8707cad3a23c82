"""Coroutines of backends and rewards, run from plain code."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import pytest

from retrain.base.event_loop import EventLoopThread, in_thread


@pytest.fixture
def calls() -> Iterator[EventLoopThread]:
    calls = EventLoopThread()
    yield calls
    calls.close()


async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


class Later:
    """Awaitable, and no coroutine."""

    def __await__(self) -> Generator[Any, None, int]:
        return double(2).__await__()


def test_what_is_not_awaitable_is_given_back(calls: EventLoopThread) -> None:
    assert calls.wait_for(4) == 4


@pytest.mark.parametrize("make", [lambda: double(2), Later], ids=["coroutine", "awaitable"])
def test_what_is_awaitable_is_waited_for(calls: EventLoopThread, make: Callable[[], Awaitable[int]]) -> None:
    assert calls.wait_for(make()) == 4


def test_an_exception_comes_out_as_it_is(calls: EventLoopThread) -> None:
    async def fail() -> None:
        raise LookupError("lost")

    with pytest.raises(LookupError, match="lost"):
        calls.wait_for(fail())


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_call_that_wants_the_process_to_end_is_heard(
    calls: EventLoopThread, kind: type[BaseException]
) -> None:
    async def leave() -> None:
        raise kind

    async def several() -> None:
        await asyncio.gather(leave(), asyncio.Event().wait())

    for _ in range(2):
        with pytest.raises(kind):
            calls.wait_for(several())
    assert calls.wait_for(double(2)) == 4


def test_what_still_runs_at_the_end_is_cancelled_and_may_clean_up(calls: EventLoopThread) -> None:
    events: list[str] = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            events.append("cleaned up")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return task

    task = calls.wait_for(start())
    calls.close()
    assert events == ["cleaned up"]
    assert task.cancelled()
    assert "backend-loop" not in {thread.name for thread in threading.enumerate()}


def test_closing_twice_or_before_the_first_call_is_fine(calls: EventLoopThread) -> None:
    calls.close()
    assert calls.wait_for(double(1)) == 2
    calls.close()
    calls.close()


def test_what_a_thread_finds_after_its_loop_was_closed_is_taken_back() -> None:
    may_find, taken_back = threading.Event(), threading.Event()

    async def ask() -> asyncio.Future[bool]:
        return in_thread(lambda: may_find.wait(60), unwanted=lambda _: taken_back.set())

    loop = asyncio.new_event_loop()
    asked = loop.run_until_complete(ask())  # and never awaited
    loop.close()
    may_find.set()
    assert taken_back.wait(60)
    assert not asked.done()
