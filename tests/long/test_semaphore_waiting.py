import gc
import math
import os
import signal
import sys
import threading
import time

import pytest

from retrain.control.semaphore import FileSemaphore
from retrain.control.semaphore.wait_queue import Deadline, WaitQueue
from tests.semaphore_processes import HOLD, interrupt, is_locked, open_descriptors, running, wait_until

WAIT = """
import sys
from retrain.control.semaphore import FileSemaphore
semaphore = FileSemaphore(sys.argv[1], 1)
timeout_s = None if sys.argv[2] == "None" else float(sys.argv[2])
print("ready", flush=True)
try:
    semaphore.acquire(timeout_s)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
"""

INTERRUPTED_AGAIN_AND_AGAIN = """
import signal, sys
from retrain.control.semaphore import FileSemaphore
semaphore = FileSemaphore(sys.argv[1], 1)
interrupts, said = 0, -1

def interrupted(*_):
    global interrupts
    interrupts += 1  # counted here: Python drops an exception that it raises inside a finalizer
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
while interrupts < 300:
    try:
        while interrupts < 300:
            if said != interrupts:
                said = interrupts
                print(said, flush=True)
            if semaphore.acquire(0.5 if interrupts % 2 else None):
                semaphore.release()
    except KeyboardInterrupt:
        try:
            semaphore.release()  # interrupted with the permit in hand
        except RuntimeError:
            pass
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_watcher_gives_up_in_time(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)

    with semaphore:
        start = time.monotonic()
        assert not semaphore.acquire(timeout_s=0.05)

    assert time.monotonic() - start >= 0.05
    assert FileSemaphore.inspect(tmp_path).waiting == 0


def test_a_waiter_in_the_wait_queue_gives_up_in_time(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    with semaphore, running(HOLD, tmp_path):
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)

        assert not semaphore.acquire(timeout_s=0.05)

        assert FileSemaphore.inspect(tmp_path).waiting == 1


def test_a_newcomer_does_not_overtake_a_waiter(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    semaphore.acquire()
    with running(HOLD, tmp_path) as waiter:
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)
        wait_until(lambda: not semaphore.acquire(timeout_s=0) and is_locked(tmp_path / "turnstile.lock"))
        waiter.send(signal.SIGSTOP)
        os.waitpid(waiter.process.pid, os.WUNTRACED)
        semaphore.release()

        assert not semaphore.acquire(timeout_s=0)

        waiter.send(signal.SIGCONT)
        assert [waiter.line(), waiter.line()] == ["ready", "holding"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a newcomer may overtake")
def test_a_newcomer_does_not_overtake_one_that_is_about_to_watch(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    semaphore.acquire()
    with running(HOLD, tmp_path) as watcher:
        wait_until(lambda: is_locked(tmp_path / "turnstile.lock"))
        with running(HOLD, tmp_path) as next_one:
            wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 2)
            next_one.send(signal.SIGSTOP)
            os.waitpid(next_one.process.pid, os.WUNTRACED)
            watcher.kill()  # nobody watches now
            semaphore.release()

            assert not semaphore.acquire(timeout_s=0)
            assert not semaphore.acquire(timeout_s=0.01)

            next_one.send(signal.SIGCONT)
            assert [next_one.line(), next_one.line()] == ["ready", "holding"]
            next_one.tell()
            assert semaphore.acquire(timeout_s=60)
            semaphore.release()


def test_a_waiter_in_the_wait_queue_is_admitted_before_its_time_is_over(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    with running(HOLD, tmp_path) as holder, running(HOLD, tmp_path) as watcher:
        assert [holder.line(), watcher.line()] == ["ready", "ready"]
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)
        thread = threading.Thread(target=semaphore.acquire, args=(60,))
        thread.start()
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 2)

        holder.tell()
        watcher.tell()
        thread.join()

        assert len(FileSemaphore.inspect(tmp_path).holders) == 1
        semaphore.release()


def test_timeouts_in_a_row_cost_one_thread_and_leave_nothing(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    with running(HOLD, tmp_path) as holder, running(HOLD, tmp_path):
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)

        assert not any(semaphore.acquire(timeout_s=0.002) for _ in range(20))

        assert len(set(threading.enumerate()) - threads) <= 1
        holder.kill()
    wait_until(lambda: threads.issuperset(threading.enumerate()))
    gc.collect()
    assert open_descriptors() <= descriptors
    assert semaphore.acquire(timeout_s=0)
    semaphore.release()


def test_a_waiter_that_takes_over_a_later_place_does_not_wait_for_itself(tmp_path):
    queue = WaitQueue(str(tmp_path / "queue"))
    first, earlier, later = (queue.arrive(may_wait=True) for _ in range(3))
    assert queue.enter(later, Deadline(0)) is None  # parked, behind the earlier place
    threading.Timer(0, first.close).start()

    inside = queue.enter(earlier, Deadline(10))

    assert inside is not None
    inside.close()


def test_a_copy_of_a_place_that_c_code_forked_keeps_nobody_out(tmp_path):
    queue = WaitQueue(str(tmp_path / "queue"))
    first, second = queue.arrive(may_wait=True), queue.arrive(may_wait=True)
    copy = os.dup(second.fileno())  # shares the open file, as the child does
    second.close()
    first.close()

    newcomer = queue.arrive(may_wait=False)

    os.close(copy)
    assert newcomer is not None


def test_an_infinite_timeout_waits_for_ever(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)

    assert semaphore.acquire(timeout_s=math.inf)
    semaphore.release()


@pytest.mark.parametrize("timeout_s", [-1, math.nan])
def test_a_timeout_that_is_no_time_is_an_error(tmp_path, timeout_s):
    with pytest.raises(ValueError, match="timeout_s"):
        FileSemaphore(tmp_path, 1).acquire(timeout_s)


@pytest.mark.parametrize("timeout_s", [None, 60])
@pytest.mark.parametrize("behind_another", [False, True])
def test_ctrl_c_gets_a_waiter_out_with_nothing_left_behind(tmp_path, timeout_s, behind_another):
    semaphore = FileSemaphore(tmp_path, 1)
    semaphore.acquire()
    with running(HOLD, tmp_path) as other, running(WAIT, tmp_path, timeout_s) as waiter:
        if not behind_another:
            other.kill()
        assert waiter.line() == "ready"
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1 + behind_another)

        interrupt(waiter)

        assert waiter.line() == "interrupted"
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == behind_another)
        semaphore.release()
        if behind_another:
            assert [other.line(), other.line()] == ["ready", "holding"]
            other.tell()
        assert semaphore.acquire(timeout_s=60)
        semaphore.release()


def test_ctrl_c_at_any_moment_leaks_no_permit_and_no_place(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    with running(INTERRUPTED_AGAIN_AND_AGAIN, tmp_path) as child:
        for number in range(300):
            assert child.line() == str(number)
            with semaphore:
                interrupt(child)
        assert child.line() == "done"

        assert semaphore.acquire(timeout_s=60)
        semaphore.release()
        state = FileSemaphore.inspect(tmp_path)
        assert (state.holders, state.waiting) == ((), 0)
        assert child.process.poll() is None


def test_a_handler_that_returns_does_not_end_the_wait(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    code = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('handled', flush=True))" + HOLD
    with semaphore, running(code, tmp_path) as waiter:
        assert waiter.line() == "ready"
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)
        waiter.send(signal.SIGUSR1)
        assert waiter.line() == "handled"
        assert FileSemaphore.inspect(tmp_path).waiting == 1

        semaphore.release()
        assert waiter.line() == "holding"
        waiter.tell()
        assert waiter.line() == "released"
        assert semaphore.acquire()
