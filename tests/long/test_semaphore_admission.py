import subprocess
import sys
import threading
from pathlib import Path

import pytest

from retrain.control.semaphore import FileSemaphore
from tests.semaphore_processes import HOLD, NURSERY, is_locked, judge, running, wait_until


def storm(tmp_path: Path, workers: int, kills: int, limits: list[int], entries: int):
    """Kill until there were so many kills and entries, however long that takes."""
    log = tmp_path / "log"
    arguments = [tmp_path / "permits", workers, kills, limits, log, entries]
    subprocess.run([sys.executable, "-c", NURSERY, *map(str, arguments)], check=True)
    return judge(log)


def test_kills_at_random_moments_never_let_a_fourth_holder_in(tmp_path):
    seen = storm(tmp_path, workers=8, kills=60, limits=[3], entries=500)

    assert seen.most_at_once == 3
    assert seen.kills >= 60
    assert seen.entries >= 500
    state = FileSemaphore.inspect(tmp_path / "permits")
    assert (state.holders, state.waiting) == ((), 0)


def test_nobody_is_admitted_above_a_new_number_while_old_holders_drain(tmp_path):
    seen = storm(tmp_path, workers=8, kills=100, limits=[4, 1, 3, 2], entries=200)

    assert seen.above_limit == 0
    assert seen.most_at_once == 4
    assert seen.entries >= 200


def test_the_judge_sees_two_holders_of_one_permit(tmp_path):
    log = tmp_path / "log"
    log.write_text("ask 1 10\nenter 1 11\nresized 1 12\nask 2 13\nenter 2 14\nleave 1 15\nkill 2 16\n")

    seen = judge(log)

    assert (seen.most_at_once, seen.above_limit, seen.entries, seen.kills) == (2, 1, 2, 1)


def test_a_killed_holder_leaves_its_permit_to_the_next(tmp_path):
    with running(HOLD, tmp_path) as holder:
        assert [holder.line(), holder.line()] == ["ready", "holding"]
        with running(HOLD, tmp_path) as waiter:
            wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)

            holder.kill()

            assert [waiter.line(), waiter.line()] == ["ready", "holding"]


def test_a_killed_watcher_does_not_hold_up_those_behind_it(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    semaphore.acquire()
    with running(HOLD, tmp_path) as watcher:
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)
        with running(HOLD, tmp_path) as behind:
            wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 2)
            watcher.kill()
            semaphore.release()

            assert [behind.line(), behind.line()] == ["ready", "holding"]


def test_threads_of_one_process_each_count(tmp_path):
    semaphore = FileSemaphore(tmp_path, 2)
    inside, most, lock = [], [], threading.Lock()

    def work(name):
        for _ in range(20):
            with semaphore:
                with lock:
                    inside.append(name)
                    most.append(len(inside))
                with lock:
                    inside.remove(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(most) == 160
    assert max(most) <= 2
    assert FileSemaphore.inspect(tmp_path).holders == ()


def test_acquiring_twice_takes_two_permits(tmp_path):
    semaphore = FileSemaphore(tmp_path, 2)

    with semaphore, semaphore:
        assert len(FileSemaphore.inspect(tmp_path).holders) == 2
        assert not semaphore.acquire(timeout_s=0)

    assert FileSemaphore.inspect(tmp_path).holders == ()


def test_two_objects_of_one_process_share_the_permits(tmp_path):
    one, other = FileSemaphore(tmp_path, 1), FileSemaphore(tmp_path, 1)

    with one:
        assert not other.acquire(timeout_s=0)
    with other:
        assert not one.acquire(timeout_s=0)


def test_release_without_acquire_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="release without acquire"):
        FileSemaphore(tmp_path, 1).release()


def test_another_thread_may_release(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    semaphore.acquire()

    thread = threading.Thread(target=semaphore.release)
    thread.start()
    thread.join()

    assert semaphore.acquire(timeout_s=0)
    semaphore.release()


def test_another_thread_releases_the_oldest(tmp_path):
    semaphore = FileSemaphore(tmp_path, 2)
    for _ in range(2):
        thread = threading.Thread(target=semaphore.acquire)
        thread.start()
        thread.join()

    semaphore.release()

    assert [is_locked(tmp_path / f"slot-000{n}") for n in (0, 1)] == [False, True]
    semaphore.release()


def test_a_permit_comes_back_when_the_body_fails(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)

    with pytest.raises(KeyError), semaphore:
        raise KeyError

    assert semaphore.acquire(timeout_s=0)
    semaphore.release()


def test_a_dropped_semaphore_drops_its_permits(tmp_path):
    FileSemaphore(tmp_path, 1).acquire()

    assert FileSemaphore.inspect(tmp_path).holders == ()


@pytest.mark.parametrize("permits", [0, -1, 2.0, True, "3", None, 513])
def test_permits_must_be_a_whole_number_in_range(tmp_path, permits):
    with pytest.raises(ValueError, match="permits: got"):
        FileSemaphore(tmp_path / "new", permits)

    assert not (tmp_path / "new").exists()
