from retrain.control.semaphore import FileSemaphore
from tests.semaphore_processes import running, wait_until

# The parent holds a permit; the child does what `act` says, then waits to be told to end.
FORK = """
import os, sys, subprocess, threading
from retrain.control.semaphore import FileSemaphore
semaphore = FileSemaphore(sys.argv[1], 1, label="parent")
semaphore.acquire()
pid = os.fork()
if pid == 0:
    {child}
    sys.stdin.readline()
    os._exit(0)
{parent}
"""


def test_a_forked_child_does_not_keep_its_dead_parents_permit(tmp_path):
    code = FORK.format(child="print(os.getpid(), flush=True)", parent="os.waitpid(pid, 0)")
    with running(code, tmp_path) as parent:
        child_pid = int(parent.line())
        parent.kill()

        assert FileSemaphore(tmp_path, 1).acquire(timeout_s=60)
        parent.tell()
    assert child_pid


def test_a_child_process_does_not_keep_its_dead_parents_permit(tmp_path):
    code = """
import subprocess, sys
from retrain.control.semaphore import FileSemaphore
with FileSemaphore(sys.argv[1], 1):
    child = subprocess.Popen([sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read()"])
    child.wait()
"""
    with running(code, tmp_path) as parent:
        assert parent.line() == "up"
        parent.kill()

        assert FileSemaphore(tmp_path, 1).acquire(timeout_s=60)


def test_a_forked_child_has_no_permit_to_release(tmp_path):
    child = """
    try:
        semaphore.release()
    except RuntimeError:
        print("refused", flush=True)
"""
    with running(FORK.format(child=child, parent="os.waitpid(pid, 0)"), tmp_path) as parent:
        assert parent.line() == "refused"
        assert len(FileSemaphore.inspect(tmp_path).holders) == 1


def test_a_childs_end_leaves_the_parents_permit_alone(tmp_path):
    code = FORK.format(
        child="del semaphore; sys.exit(0)",
        parent="os.waitpid(pid, 0); print('child ended', flush=True); sys.stdin.readline()",
    )
    with running(code, tmp_path) as parent:
        assert parent.line() == "child ended"

        assert not FileSemaphore(tmp_path, 1).acquire(timeout_s=0)
        assert FileSemaphore.inspect(tmp_path).holders[0].pid == parent.process.pid


def test_a_forked_child_waits_for_permits_of_its_own(tmp_path):
    child = """
    semaphore.acquire()
    print(os.getpid(), flush=True)
"""
    FileSemaphore(tmp_path, 1)
    parent_code = "sys.stdin.readline(); semaphore.release(); os.waitpid(pid, 0)"
    with running(FORK.format(child=child, parent=parent_code), tmp_path) as parent:
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 1)
        parent.tell()

        child_pid = int(parent.line())

        assert [holder.pid for holder in FileSemaphore.inspect(tmp_path).holders] == [child_pid]
        parent.tell()


def test_a_fork_beside_waiting_threads_takes_no_place_in_the_queue(tmp_path):
    code = """
import os, sys, threading, warnings
from retrain.control.semaphore import FileSemaphore
warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is the point
semaphore = FileSemaphore(sys.argv[1], 1)
for timeout_s in (None, 60, 60):
    threading.Thread(target=semaphore.acquire, args=(timeout_s,), daemon=True).start()
sys.stdin.readline()
if os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.readline()
    os._exit(0)
os.wait()
"""
    semaphore = FileSemaphore(tmp_path, 1)
    semaphore.acquire()
    with running(code, tmp_path) as parent:
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 3)
        parent.tell()
        assert parent.line() == "forked"

        parent.kill()

        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 0)
        semaphore.release()
        assert semaphore.acquire(timeout_s=60)
