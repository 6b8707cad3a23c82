"""The tinker backend's calls: what they send, and the permits that each holds and gives back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tinker.types import ForwardBackwardOutput, OptimStepResponse

from retrain.backends import BackendSpec
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.calls import ApiCalls
from retrain.backends.tinker.session import UpdateOutcome
from retrain.backends.tinker.wire import to_datum
from retrain.base.errors import InfrastructureError
from retrain.base.event_loop import in_thread
from retrain.control.semaphore import FileSemaphore
from tests.backends.test_tinker_parts import GSPO, sample
from tests.semaphore_processes import wait_until

pytestmark = pytest.mark.extras


def test_a_datum_holds_every_token_but_the_last() -> None:
    datum = to_datum((5, 6), sample(), GSPO)
    assert datum.model_input.to_ints() == [5, 6, 7, 8]
    assert datum.loss_fn_inputs["target_tokens"].data == [6, 7, 8, 9]


@pytest.mark.parametrize("lacks", [0, 1])
def test_a_sum_that_one_part_of_an_update_lacks_is_not_known(lacks: int) -> None:
    """Not that of the others: it is compared with ours of the whole update."""
    told: list[dict[str, float]] = [{"loss:sum": 1.0, "mean": 3.0}, {"loss:sum": 2.0, "mean": 4.0}]
    parts = [ForwardBackwardOutput("", [], metrics) for metrics in told]
    assert UpdateOutcome.of(parts, OptimStepResponse()).metrics == {"loss:sum": 3.0, "mean": 4.0}
    del told[lacks]["loss:sum"]
    assert UpdateOutcome.of(parts, OptimStepResponse()).metrics == {"mean": 4.0}


def holders(directory: Path) -> int:
    return len(FileSemaphore.inspect(directory).holders)


def calls(directory: Path, permits: int, timeout_s: float = 60.0) -> ApiCalls:
    spec = BackendSpec(0, permit=lambda: FileSemaphore(directory, permits))
    return ApiCalls(spec, TinkerOptions(permit_timeout_s=timeout_s))


def test_waiting_for_a_permit_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    async def check() -> None:
        busy = FileSemaphore(tmp_path, 1)
        busy.acquire()
        waiter = asyncio.ensure_future(_hold(calls(tmp_path, 1)))
        await asyncio.sleep(0)  # the loop turns although the waiter waits
        assert not waiter.done()
        busy.release()
        await waiter
        wait_until(lambda: holders(tmp_path) == 0)

    asyncio.run(check())


def test_a_cancelled_wait_gives_its_permit_back_when_it_comes(tmp_path: Path) -> None:
    async def check() -> None:
        busy = FileSemaphore(tmp_path, 1)
        busy.acquire()
        waiter = asyncio.ensure_future(_hold(calls(tmp_path, 1)))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        busy.release()
        await _hold(calls(tmp_path, 1))

    asyncio.run(check())


def test_a_cancelled_call_gives_its_permit_back(tmp_path: Path) -> None:
    async def check() -> None:
        inside = asyncio.Event()
        caller = asyncio.ensure_future(_hold(calls(tmp_path, 1), inside, asyncio.Event()))
        await inside.wait()
        assert holders(tmp_path) == 1
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        wait_until(lambda: holders(tmp_path) == 0)

    asyncio.run(check())


def test_a_wait_that_takes_too_long_is_an_infrastructure_failure(tmp_path: Path) -> None:
    async def check() -> None:
        with FileSemaphore(tmp_path, 1), pytest.raises(InfrastructureError, match="no permit"):
            await _hold(calls(tmp_path, 1, timeout_s=0.01))

    asyncio.run(check())


@pytest.mark.parametrize(("count", "together"), [(1, False), (2, True)])
def test_two_calls_go_together_only_with_two_calls(tmp_path: Path, count: int, together: bool) -> None:
    most = 0

    async def check() -> None:
        second_began = asyncio.Event()

        async def call(is_second: bool) -> bool:
            nonlocal most
            most = max(most, holders(tmp_path))
            if is_second:
                second_began.set()
            elif together:
                await second_began.wait()
            return is_second

        source = calls(tmp_path, count)
        assert await source.pair("two", lambda: call(False), lambda: call(True)) == (False, True)

    asyncio.run(check())
    assert most == count
    wait_until(lambda: holders(tmp_path) == 0)  # a wait that was given up returns its permit when it comes


def test_many_runs_with_pairs_never_block_each_other(tmp_path: Path) -> None:
    """Each holds one permit and could use another: with hold-and-wait this would never end."""
    in_flight, most = 0, 0

    async def call() -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await in_thread(lambda: None)  # a turn of another thread
        in_flight -= 1

    async def check() -> None:
        sources = [calls(tmp_path, 2) for _ in range(6)]
        await asyncio.gather(*(source.pair("two", call, call) for source in sources for _ in range(5)))

    asyncio.run(check())
    assert most <= 2
    wait_until(lambda: holders(tmp_path) == 0)


def test_a_failed_first_call_ends_the_second(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    async def check() -> None:
        with pytest.raises(ConnectionError):
            await calls(tmp_path, 2).pair("two", fail, asyncio.Event().wait)
        wait_until(lambda: holders(tmp_path) == 0)

    asyncio.run(check())


async def _hold(
    source: ApiCalls, inside: asyncio.Event | None = None, until: asyncio.Event | None = None
) -> None:
    async def call() -> None:
        if inside is not None:
            inside.set()
        if until is not None:
            await until.wait()

    await source.once("hold", call)
