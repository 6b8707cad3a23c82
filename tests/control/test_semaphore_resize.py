import pytest

from retrain.control.semaphore import FileSemaphore
from tests.semaphore_processes import HOLD, running, wait_until


def test_growing_lets_a_waiter_in(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    with semaphore, running(HOLD, tmp_path) as waiter:
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)

        semaphore.set_permits(2)

        assert [waiter.line(), waiter.line()] == ["ready", "holding"]
        assert len(FileSemaphore.inspect(tmp_path).holders) == 2


def test_after_a_shrink_all_old_holders_above_the_number_must_release_first(tmp_path):
    semaphore = FileSemaphore(tmp_path, 4)
    holders = [FileSemaphore(tmp_path, 4) for _ in range(4)]
    for holder in holders:
        holder.acquire()

    semaphore.set_permits(2)
    admitted = []
    for holder in holders:  # slots 0 and 1 come free while 2 and 3 are still held
        holder.release()
        admitted.append(semaphore.acquire(timeout_s=0))

    assert admitted == [False, False, True, True]
    assert not semaphore.acquire(timeout_s=0)
    semaphore.release()
    semaphore.release()


def test_a_number_shrunk_and_grown_again_is_all_usable(tmp_path):
    semaphore = FileSemaphore(tmp_path, 4)
    semaphore.set_permits(1)
    semaphore.set_permits(3)

    assert [semaphore.acquire(timeout_s=0) for _ in range(4)] == [True, True, True, False]


def test_who_starts_again_does_not_undo_a_resize(tmp_path):
    FileSemaphore(tmp_path, 4).set_permits(2)

    assert FileSemaphore(tmp_path, 4).permits == 2


def test_a_resize_is_seen_through_every_object(tmp_path):
    one, other = FileSemaphore(tmp_path, 1), FileSemaphore(tmp_path, 1)

    one.set_permits(3)

    assert other.permits == 3
    assert FileSemaphore.inspect(tmp_path).permits == 3


@pytest.mark.parametrize("permits", [0, 1.5, True])
def test_a_resize_to_nonsense_changes_nothing(tmp_path, permits):
    semaphore = FileSemaphore(tmp_path, 2)

    with pytest.raises(ValueError, match="permits: got"):
        semaphore.set_permits(permits)

    assert semaphore.permits == 2
