"""What the Tinker SDK leaves behind, ended in the files that call it."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator

import pytest

CALLS_SDK = [  # marks of a file that calls the SDK: what it leaves behind is charged to nobody else
    pytest.mark.extras,
    pytest.mark.usefixtures("tinker_sdk"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
CANCELLATIONS = 10


@pytest.fixture(scope="module")
def tinker_sdk() -> Iterator[None]:
    """End, after a file that calls the Tinker SDK, what only the SDK knows: its tasks and its connections.

    For the settings of each session it opens a connection that only the garbage collector closes, with a
    warning; the file's own marks ignore it. Left to chance, it would be charged to the test of another file.
    """
    yield
    if (holders := sys.modules.get("tinker.lib.internal_client_holder")) is None:
        return
    if loop := holders._internal_client_holder_thread_singleton.loop_if_started():
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result()
    gc.collect()


async def _end_tasks() -> None:
    """End the tasks of this loop: those that close something by themselves, attempts at lost servers not.

    A task that begins another attempt instead of being cancelled is cancelled again, but not for ever.
    """
    for _ in range(CANCELLATIONS):
        if not (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            return
        _, tasks = await asyncio.wait(tasks, timeout=0.5)
        for task in tasks:
            task.cancel()
