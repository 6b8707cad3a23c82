"""`async with FileSemaphore`: the event loop goes on, and a cancelled task leaves nothing behind."""

import asyncio
import random
import threading

import pytest

from retrain.control.semaphore import FileSemaphore
from tests.semaphore_processes import is_locked, open_descriptors, wait_until


async def hold(semaphore, inside=None, until=None):
    async with semaphore:
        if inside is not None:
            inside.set()
        if until is not None:
            await until.wait()


async def waiting(directory, number):
    while FileSemaphore.inspect(directory).waiting != number:
        await asyncio.sleep(0.001)


def is_free(directory):
    state = FileSemaphore.inspect(directory)
    return (state.holders, state.waiting) == ((), 0)


def test_a_waiting_task_does_not_block_the_event_loop(tmp_path):
    async def check():
        semaphore, inside, release = FileSemaphore(tmp_path, 1), asyncio.Event(), asyncio.Event()
        first = asyncio.ensure_future(hold(semaphore, inside, release))
        await inside.wait()
        second = asyncio.ensure_future(hold(semaphore))
        await waiting(tmp_path, 1)
        release.set()
        await asyncio.gather(first, second)

    asyncio.run(check())
    assert is_free(tmp_path)


@pytest.mark.parametrize("in_front", [0, 1])
def test_a_cancelled_wait_ends_while_the_permit_stays_out(tmp_path, in_front):
    async def check():
        semaphore = FileSemaphore(tmp_path, 1)
        async with semaphore:
            others = [asyncio.ensure_future(hold(semaphore)) for _ in range(in_front)]
            await waiting(tmp_path, in_front)
            waiter = asyncio.ensure_future(hold(semaphore))
            await waiting(tmp_path, in_front + 1)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            await waiting(tmp_path, in_front)
        await asyncio.gather(*others)

    asyncio.run(check())
    assert is_free(tmp_path)


def test_a_cancelled_body_gives_its_permit_back(tmp_path):
    async def check():
        inside = asyncio.Event()
        holder = asyncio.ensure_future(hold(FileSemaphore(tmp_path, 1), inside, asyncio.Event()))
        await inside.wait()
        holder.cancel()
        await asyncio.gather(holder, return_exceptions=True)

    asyncio.run(check())
    assert is_free(tmp_path)


def test_a_task_cancelled_after_its_permit_came_and_before_it_goes_on_gives_it_back(tmp_path):
    async def check():
        semaphore = FileSemaphore(tmp_path, 1)
        semaphore.acquire()
        threads = set(threading.enumerate())
        waiter = asyncio.ensure_future(hold(semaphore))
        await waiting(tmp_path, 1)
        semaphore.release()
        wait_until(lambda: threads.issuperset(threading.enumerate()))  # it came, and the loop stands still
        await asyncio.sleep(0)  # the loop's next turn is the waiter's
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert is_free(tmp_path)

    asyncio.run(check())


def test_cancelled_at_any_moment_no_permit_no_place_and_no_file_is_lost(tmp_path):
    chance = random.Random(3)

    async def check():
        semaphore = FileSemaphore(tmp_path, 2)
        for _ in range(40):
            tasks = [asyncio.ensure_future(hold(semaphore)) for _ in range(5)]
            await asyncio.sleep(chance.random() * 0.004)
            for task in chance.sample(tasks, 3):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    threads, descriptors = set(threading.enumerate()), open_descriptors()
    asyncio.run(check())
    wait_until(lambda: is_free(tmp_path) and threads.issuperset(threading.enumerate()))
    assert open_descriptors() <= descriptors + 1  # the wakeup socket


def test_a_loop_that_ends_takes_its_waiters_along(tmp_path):
    async def check():
        asyncio.ensure_future(hold(semaphore))  # noqa: RUF006
        await waiting(tmp_path, 1)

    with (semaphore := FileSemaphore(tmp_path, 1)):
        asyncio.run(check())
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 0)
    assert is_free(tmp_path)


def test_each_task_of_a_thread_gives_back_its_own(tmp_path):
    async def check():
        semaphore, inside, release = FileSemaphore(tmp_path, 2), asyncio.Event(), asyncio.Event()
        async with semaphore:
            later = asyncio.ensure_future(hold(semaphore, inside, release))
            await inside.wait()
        assert [is_locked(tmp_path / f"slot-000{n}") for n in (0, 1)] == [False, True]
        release.set()
        await later

    asyncio.run(check())


def test_a_permit_that_failed_to_come_is_an_error_and_no_hang(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    (tmp_path / "permits.json").write_text("damaged")

    with pytest.raises(Exception, match="damaged"):
        asyncio.run(hold(semaphore))
