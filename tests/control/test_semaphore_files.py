import errno
import fcntl
import os
import pwd
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retrain.base.errors import LaunchError, RecordsError, may_pass
from retrain.base.locks import locked
from retrain.control.semaphore import FileSemaphore, lock_sharing_problem
from retrain.control.semaphore.wait_queue import WakeupListener, wake, wakeup_address
from tests.semaphore_processes import HOLD, running, wait_until

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
server:/home /home nfs4 rw,relatime,vers=4.2 0 0
/dev/sdb /home/local xfs rw 0 0
me@host:/ /mnt/two\\040words fuse.sshfs rw 0 0
share /tmp 9p rw 0 0
tmpfs /tmp tmpfs rw 0 0
mds:/l /lustre lustre rw,localflock 0 0
mds:/s /scratch lustre rw,flock 0 0
"""


@pytest.fixture
def mounted(tmp_path_factory, monkeypatch):
    """Replace the mount table."""
    proc = tmp_path_factory.mktemp("proc")
    (proc / "self").mkdir()
    monkeypatch.setattr("psutil.PROCFS_PATH", str(proc))
    return (proc / "self" / "mounts").write_text


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_directory_and_files_are_for_their_owner_only(tmp_path):
    directory = tmp_path / "deep" / "permits"
    semaphore = FileSemaphore(directory, 2)
    with semaphore:
        semaphore.set_permits(1)
        assert not semaphore.acquire(timeout_s=0.001)

    assert mode(directory) == 0o700
    assert {mode(path) for path in directory.iterdir()} == {0o600}


def test_files_are_never_unlinked_nor_replaced_but_the_number(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    with semaphore:
        before = {path.name: path.stat().st_ino for path in tmp_path.glob("*[!.json]")}
    with semaphore:
        semaphore.set_permits(2)

    assert before.items() <= {path.name: path.stat().st_ino for path in tmp_path.iterdir()}.items()


@pytest.mark.parametrize("name", ["permits.json", "permits.lock", "turnstile.lock", "slot-0000"])
def test_a_planted_link_is_refused_and_its_target_left_alone(tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("precious")
    directory = tmp_path / "permits"
    directory.mkdir()
    (directory / name).symlink_to(target)

    with pytest.raises(RecordsError, match="symbolic link"), FileSemaphore(directory, 1):
        pass

    assert target.read_text() == "precious"


SET_ON_A_FULL_DISK = """
import resource, signal, sys
from retrain.control.semaphore import FileSemaphore
semaphore = FileSemaphore(sys.argv[1], 2)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (12, 12))  # a part fits, and is written without a word
semaphore.set_permits(3)
"""


def test_a_number_that_does_not_fit_on_the_disk_is_refused_and_the_old_one_stays(tmp_path):
    script = [sys.executable, "-B", "-c", SET_ON_A_FULL_DISK, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)

    assert "RecordsError" in done.stderr
    assert "permits.json: cannot write (File too large); raise the file size limit" in done.stderr
    assert FileSemaphore.inspect(tmp_path).permits == 2


def test_a_directory_that_cannot_be_made_is_named_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(RecordsError, match=r"file/permits: cannot make the directory .*; something else is"):
        FileSemaphore(tmp_path / "file" / "permits", 1)


def test_a_planted_pipe_does_not_hang_anybody(tmp_path):
    FileSemaphore(tmp_path, 1)
    os.mkfifo(tmp_path / "slot-0000")

    with pytest.raises(RecordsError, match="not a regular file"):
        FileSemaphore.inspect(tmp_path)


@pytest.mark.parametrize("waits", [False, True])
def test_a_directory_that_was_removed_is_named_and_may_be_made_again(tmp_path, waits):
    directory = tmp_path / "permits"
    semaphore = FileSemaphore(directory, 1)
    with semaphore, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(semaphore.acquire) if waits else None
        if waits:
            wait_until(lambda: FileSemaphore.inspect(directory).waiting == 1)
        shutil.rmtree(directory)

        with pytest.raises(RecordsError, match=r"permits: cannot take a permit \(No such file") as raised:
            (waiting.result if waits else semaphore.acquire)()

    assert may_pass(raised.value)  # whoever starts anew makes the directory
    assert FileSemaphore(directory, 1).acquire(timeout_s=60)


@pytest.fixture
def refuse_locks(monkeypatch):
    """Have an operation of `flock` fail, as on a file server that is away."""
    flock = fcntl.flock

    def refuse(refused):
        def stale(fd, operation):
            if operation == refused:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            flock(fd, operation)

        monkeypatch.setattr(fcntl, "flock", stale)

    return refuse


def test_a_permit_whose_file_server_is_away_is_given_back_without_an_error(tmp_path, refuse_locks):
    semaphore = FileSemaphore(tmp_path, 1)
    with semaphore:  # the call has its result, which must not be lost
        refuse_locks(fcntl.LOCK_UN)
    assert semaphore.acquire(timeout_s=0)


def test_a_waiter_whose_file_server_is_away_is_told(tmp_path, refuse_locks):
    semaphore = FileSemaphore(tmp_path, 1)
    with locked(tmp_path / "turnstile.lock"):
        refuse_locks(fcntl.LOCK_EX)
        with pytest.raises(RecordsError, match=r"cannot take a permit \(Stale file handle\)"):
            semaphore.acquire(timeout_s=60)
    assert semaphore.acquire(timeout_s=0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "4", '{"permits": 0, "slots": 1}', '{"permits": true, "slots": 1}', "[" * 4000, "\xff"],
)
def test_a_damaged_number_is_named_and_set_again_by_whoever_opens_the_semaphore(tmp_path, text):
    FileSemaphore(tmp_path, 1)
    (tmp_path / "permits.json").write_text(text, encoding="latin-1")

    with pytest.raises(RecordsError, match=r"permits\.json: damaged; .*`retrain resume` does, repairs it"):
        FileSemaphore.inspect(tmp_path)

    assert FileSemaphore(tmp_path, 1).acquire(timeout_s=60)


def test_what_a_killed_writer_of_the_number_left_is_removed_by_whoever_opens_the_semaphore(tmp_path):
    (tmp_path / ".permits.json.1-0a1b2c3d.tmp").write_text("{")
    FileSemaphore(tmp_path, 1)
    assert not list(tmp_path.glob(".*"))


def test_permits_that_are_out_still_count_when_their_number_was_lost(tmp_path):
    with FileSemaphore(tmp_path, 2):
        (tmp_path / "permits.json").unlink()

        anew = FileSemaphore(tmp_path, 1)

        assert not anew.acquire(timeout_s=0.1)
    assert anew.acquire(timeout_s=60)


def test_inspecting_shows_who_holds_and_how_many_wait(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1, label="run 1")
    with semaphore, running(HOLD, tmp_path), running(HOLD, tmp_path):
        wait_until(lambda: FileSemaphore.inspect(tmp_path).waiting == 2)

        state = FileSemaphore.inspect(tmp_path)

        (holder,) = state.holders
        assert (state.permits, state.waiting) == (1, 2)
        assert (holder.pid, holder.host, holder.label) == (os.getpid(), os.uname().nodename, "run 1")
        assert holder.held_s > 0


def test_inspecting_all_the_time_takes_nothing_from_anybody(tmp_path):
    semaphore = FileSemaphore(tmp_path, 1)
    code = """
import sys
from retrain.control.semaphore import FileSemaphore
print("up", flush=True)
while True:
    FileSemaphore.inspect(sys.argv[1])
"""
    with running(code, tmp_path) as inspector:
        assert inspector.line() == "up"
        for _ in range(200):
            assert semaphore.acquire(timeout_s=60)
            semaphore.release()


def test_a_copy_is_inspected_without_holders(tmp_path):
    with FileSemaphore(tmp_path / "permits", 3):
        shutil.copytree(tmp_path / "permits", tmp_path / "copy")

    state = FileSemaphore.inspect(tmp_path / "copy")

    assert (state.permits, state.holders, state.waiting) == (3, (), 0)


def test_inspecting_writes_nothing(tmp_path):
    with FileSemaphore(tmp_path, 2):
        tmp_path.chmod(0o500)
        before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

        assert len(FileSemaphore.inspect(tmp_path).holders) == 1

        assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
        tmp_path.chmod(0o700)


def test_inspecting_something_else_says_so(tmp_path):
    with pytest.raises(RecordsError, match="is not a semaphore's directory"):
        FileSemaphore.inspect(tmp_path)


def test_labels_are_bounded_when_written_and_when_read(tmp_path):
    with FileSemaphore(tmp_path, 1, label="\x00\udc80🙂" * 10_000):
        assert len(FileSemaphore.inspect(tmp_path).holders[0].label) == 100

        (tmp_path / "slot-0000").write_text(
            '{"pid": 1, "clock": "x", "monotonic_s": 0, "wall_s": 1e300, "host": "", "label": "'
            + "x" * 3000
            + '"}'
        )
        (holder,) = FileSemaphore.inspect(tmp_path).holders
        assert (len(holder.label), holder.held_s) == (100, 0.0)


ENDLESS = '{"pid": Infinity, "clock": "x", "monotonic_s": 0, "wall_s": 0, "host": "", "label": ""}'


@pytest.mark.parametrize("record", ["", "null", '{"pid": []}', "[" * 4000, ENDLESS])
def test_a_record_that_makes_no_sense_is_still_a_holder(tmp_path, record):
    with FileSemaphore(tmp_path, 1):
        (tmp_path / "slot-0000").write_text(record)

        assert [holder.pid for holder in FileSemaphore.inspect(tmp_path).holders] == [0]


def test_setting_the_wall_clock_changes_no_holding_time(tmp_path):
    began = time.monotonic()
    with FileSemaphore(tmp_path, 1):
        slot = tmp_path / "slot-0000"
        slot.write_text(slot.read_text().replace('"wall_s": 1', '"wall_s": 9'))

        held_s = FileSemaphore.inspect(tmp_path).holders[0].held_s
        assert 0 < held_s <= time.monotonic() - began


def test_the_module_needs_only_the_standard_library():
    code = (
        "import sys; import retrain.control.semaphore; "
        "print([m for m in ('numpy', 'pydantic', 'rich', 'psutil', 'filelock') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("in_file_system", [sys.platform != "linux", True])
def test_a_release_wakes_the_watcher_also_after_one_was_killed(tmp_path, in_file_system):
    (tmp_path / "turnstile.lock").touch()
    address = wakeup_address(tmp_path / "turnstile.lock", in_file_system=in_file_system)
    wake(address)  # nobody listens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as killed:
        killed.bind(address)  # and leaves the file behind, as a kill does
    ear = WakeupListener(address)
    try:
        wake(address)
        ear.wait(timeout_s=600)
    finally:
        ear.close()


HOLD_ONCE = """
import sys
from retrain.control.semaphore import FileSemaphore
with FileSemaphore(sys.argv[1], 1):
    pass
"""


def test_a_process_that_held_a_permit_ends_without_an_open_socket(tmp_path):
    script = [sys.executable, "-X", "dev", "-c", HOLD_ONCE, str(tmp_path)]

    assert subprocess.run(script, capture_output=True, text=True, check=True).stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file with their mounts")
@pytest.mark.parametrize(
    ("directory", "problem"),
    [
        ("/data", None),
        ("/home/me/logs", "on a nfs4 file system (mounted at /home)"),
        ("/home/local/logs", None),
        ("/homes/me", None),
        ("/mnt/two words/x", "on a fuse.sshfs file system (mounted at /mnt/two words)"),
        ("/tmp/x", None),
        ("/lustre/x", "without the option flock"),
        ("/scratch/x", None),
    ],
)
def test_file_systems_are_judged_by_their_longest_and_latest_mount(directory, problem, mounted):
    mounted(MOUNTS)
    said = lock_sharing_problem(directory)

    assert said is None if problem is None else problem in said


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file with their mounts")
def test_a_mount_table_that_makes_no_sense_or_is_missing_has_no_problem(mounted):
    assert lock_sharing_problem("/data") is None
    mounted("\n - \nx y z - \n")
    assert lock_sharing_problem("/data") is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no file with their mounts")
def test_a_file_system_without_shared_locks_is_refused(tmp_path, mounted):
    mounted("server:/ / nfs rw 0 0\n")

    with pytest.raises(LaunchError, match="put the permits on a local disk"):
        FileSemaphore(tmp_path / "permits", 1)
    assert not (tmp_path / "permits").exists()
    assert FileSemaphore(tmp_path / "permits", 1, allow_unshared=True).acquire(timeout_s=0)


OTHER_USER = """
import os, pwd, sys
from retrain.control.semaphore import FileSemaphore
FileSemaphore(sys.argv[2], 2)  # imports all that the other user may not read here
if os.getuid() == 0:
    os.setuid(65534)
try:
    FileSemaphore(sys.argv[1], 2)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_second_user_of_a_shared_directory_is_told_once_what_to_set():
    with tempfile.TemporaryDirectory() as name:  # unlike pytest's, one that others may enter
        Path(name).chmod(0o755)
        directory = Path(name) / "permits"
        directory.mkdir()
        directory.chmod(0o1777)
        with FileSemaphore(directory, 2):
            if os.getuid() != 0:  # no other user can be had: what theirs would look like
                for path in directory.iterdir():
                    path.chmod(0)
            command = [sys.executable, "-c", OTHER_USER, str(directory), f"{name}/own"]
            told = subprocess.run(command, capture_output=True, text=True, check=True)
    owner = pwd.getpwuid(os.getuid()).pw_name
    assert told.stdout == (
        f"LaunchError {directory}: its permits belong to the user {owner}, and users cannot share permits; "
        "set backend.throttle_dir to a directory of your own\n"
    )
