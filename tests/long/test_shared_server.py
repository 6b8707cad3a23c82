"""A server that runs share: started once, restarted, and ended with its last user, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.backends.engines.shared_server import READY, STARTING, ServerFiles, ServerState, SharedServer
from retrain.base.errors import ConfigError
from retrain.base.locks import holder, start_mark
from tests.semaphore_processes import wait_until
from tests.stopping import is_running

SERVER = """
import http.server, os, pathlib, sys, time
while pathlib.Path(__file__).with_name("closed").exists():
    time.sleep(0.02)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["TOKEN"].encode())
print("serving", *sys.argv[2:], flush=True)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
server.serve_forever()
"""
HANGING = """import threading
threading.Thread(target=server.serve_forever).start()
order = pathlib.Path(__file__).with_name("hang")
while not order.exists():
    time.sleep(0.02)
order.unlink()
server.shutdown()
server.server_close()
time.sleep(600)
"""
WITH_A_CHILD = """
import pathlib, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that hangs
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
"""
USER = """
import sys, time
from retrain.backends.engines.shared_server import SharedServer
user = SharedServer([sys.executable, sys.argv[1], "{port}"], {"TOKEN": "{key}"}, "the engine", 0.5)
print(user.ready(60).url, flush=True)
time.sleep(600)
"""


@pytest.fixture
def script(temporary: Path) -> Path:
    path = temporary / "server.py"
    path.write_text(SERVER)
    return path


def use(script: Path, *more: str) -> SharedServer:
    return SharedServer([sys.executable, str(script), "{port}", *more], {"TOKEN": "{key}"}, "the engine", 0.5)


@pytest.fixture
def user(script: Path) -> Iterator[SharedServer]:
    user = use(script)
    yield user
    user.close()
    wait_until(lambda: not is_alive(user.files))


def is_alive(files: ServerFiles) -> bool:
    daemon, server = holder(files.daemon_lock), files.read_state()
    return any(one and one.pid and is_running(one.pid, one.started) for one in (daemon, server))


def started_user(script: Path) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", USER, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_users_of_one_command_share_a_server_and_its_key(user, script):
    seen, closed = [], script.with_name("closed")
    closed.touch()  # until its start was seen

    def look(state: ServerState, waited_s: float) -> None:
        seen.append(state.state)
        closed.unlink(missing_ok=True)

    state = user.ready(60, look)
    assert set(seen) == {STARTING}
    with urllib.request.urlopen(state.url, timeout=10) as answer:
        assert answer.read().decode() == state.key
    processes = [started_user(script) for _ in range(4)]
    try:
        assert {url for _, url in processes} == {state.url}
        assert user.files.log.read_text().count("serving") == 1
    finally:
        for process, _ in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_memory_that_each_would_choose_for_itself_is_that_of_whoever_starts_it(script):
    command = [sys.executable, str(script), "{port}", "{memory} GiB"]
    first, second = (
        SharedServer(command, {"TOKEN": "{key}"}, "the engine", 0.5, memory=chosen) for chosen in "73"
    )
    assert second.ready(60) == first.ready(60)
    assert "serving 3 GiB" in first.files.log.read_text()
    for user in (first, second):
        user.close()
    wait_until(lambda: not is_alive(first.files))


def test_whoever_waits_may_give_up(user, script):
    script.with_name("closed").touch()  # it is still starting

    def give_up(*_: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        user.ready(60, give_up)


def test_a_crashed_server_comes_back_at_the_same_address(user):
    before = user.ready(60)
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: user.files.read_state().restarts == 1)
    after = user.ready(60)
    assert (after.url, after.key, after.restarts) == (before.url, before.key, 1)
    assert after.problem == "the server ended by SIGKILL"
    assert after.last_lines.startswith("serving")
    assert after.pid != before.pid


def test_a_server_that_hangs_without_listening_is_started_again(script, user):
    script.write_text(SERVER.replace("server.serve_forever()", HANGING))
    before = user.ready(60)
    script.with_name("hang").touch()
    wait_until(lambda: not before.listens())
    after = user.ready(60)
    assert after.listens()
    assert (after.restarts, after.problem) == (1, "the server stopped listening")
    assert not is_running(before.pid, before.started)


def test_the_last_user_ends_the_server_even_if_it_is_killed(script):
    first, url = started_user(script)
    second, same = started_user(script)
    files = next(ServerFiles(path) for path in script.parent.glob("retrain-engines-*/*"))
    assert url == same
    for process in (first, second):
        assert is_alive(files)
        process.kill()
        process.wait()
        process.stdout.close()
    wait_until(lambda: not is_alive(files))


def test_a_killed_daemon_takes_its_server_along_and_is_replaced(user):
    before = user.ready(60)
    daemon = holder(user.files.daemon_lock)
    os.kill(daemon.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(before.pid, before.started))
    after = user.ready(60)
    assert after.state == READY
    assert after.pid != before.pid


@pytest.mark.parametrize("killed", [["daemon"], ["daemon", "server"]])
def test_nothing_of_a_server_outlives_its_daemon_and_users(script, killed):
    script.write_text(WITH_A_CHILD + SERVER)
    process, _ = started_user(script)
    files = next(ServerFiles(path) for path in script.parent.glob("retrain-engines-*/*"))
    child = int(script.with_name("child").read_text())
    began = start_mark(child)
    pids = {"daemon": holder(files.daemon_lock).pid, "server": files.read_state().pid}
    process.kill()
    process.wait()
    process.stdout.close()
    for name in killed:
        os.kill(pids[name], signal.SIGKILL)
    wait_until(lambda: not is_running(child, began))
    wait_until(lambda: not is_alive(files))


def test_a_server_that_cannot_start_is_an_error_with_its_own_words(script):
    script.write_text("import sys\nfor n in range(50): print('line', n)\nsys.exit('no such model: abc')\n")
    user = use(script)
    shown = "".join(
        rf"\n  {line}" for line in ("line 46", "line 47", "line 48", "line 49", "no such model: abc")
    )
    with pytest.raises(ConfigError, match=rf"the engine: .*exit code 1.*log{shown}$"):
        user.ready(60)
    assert user.files.read_state().last_lines.startswith("line 11\n")
    user.close()
    wait_until(lambda: not is_alive(user.files))


def test_a_folder_of_somebody_else_is_refused(script):
    folder = script.parent / f"retrain-engines-{os.getuid()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="not a folder of this user alone"):
        use(script)
