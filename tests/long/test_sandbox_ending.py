"""How a sandbox and a program in it ended: what is believed, tried again, and counted as what."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, Outcome, Score, python
from retrain.plugins.sandbox import Sandbox, SandboxError, bubblewrap, cell
from retrain.plugins.sandbox.inside import zygote

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="confines less elsewhere")
TESTS = {"stdio": '[{"input": "", "output": "1"}]', "asserts": "assert f() == 1"}
PROGRAM = "def f(): return 1\nprint(1)"


def scored(tests: str, program: str = PROGRAM, script: str = "", timeout_s: float = 20.0) -> Score:
    """Score a program in `process`, or in a client that is a shell's script."""
    options = {"command": ["sh", "-c", script, "client"], "python": sys.executable}
    where = {"sandbox": "command", "sandbox_options": options} if script else {"sandbox": "process"}
    opened = python.open_scorer(tests=tests, workers=1, timeout_s=timeout_s, **where)  # type: ignore[arg-type]
    try:
        (found,) = opened.score_all([Answer(program, Prompt(0, "?", TESTS[tests]))])  # type: ignore[misc]
        return found
    finally:
        opened.close()


@pytest.mark.parametrize("tests", TESTS)
@pytest.mark.parametrize("line", ['{"code":125,"message":"x"}', '{"fault":"x","level":3}', "{}"])
def test_lines_of_a_client_are_not_taken_for_the_end_of_a_program(tests: str, line: str) -> None:
    assert scored(tests, script=f"\"$@\"; echo '{line}' >&2") == Score(1.0)


@pytest.mark.parametrize("tests", TESTS)
def test_a_container_that_dies_while_a_program_runs_is_a_fault(tests: str) -> None:
    found = scored(tests, script="""echo '{}' >&2; echo '{"code":125,"message":"x"}' >&2; exit 1""")
    assert (found.value, found.outcome) == (0.0, Outcome.FAULT)


@pytest.mark.parametrize("tests", TESTS)
def test_a_container_that_dies_once_costs_nothing(tests: str, tmp_path: Path) -> None:
    script = f"mkdir {tmp_path}/died 2>&- && echo '{{}}' >&2 && exit 1; exec \"$@\""
    assert scored(tests, script=script) == Score(1.0)


@ON_LINUX
def test_a_program_may_use_all_cores_for_all_of_its_time() -> None:
    program = "import resource; print(int(resource.getrlimit(resource.RLIMIT_CPU)[0] >= {}))"
    cores = len(os.sched_getaffinity(0))
    assert scored("stdio", program.format(20 * cores)) == Score(1.0)


@ON_LINUX
def test_a_program_that_is_killed_before_its_end_has_run_out_of_memory() -> None:
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"  # as the kernel would
    program = subprocess.Popen([sys.executable, "-c", kill], start_new_session=True)
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    ended = zygote.end(program.pid, {"memory_bytes": 1 << 40})
    program.returncode = ended[0]  # it is no longer a child
    assert ended == (-9, True)


@ON_LINUX
def test_a_program_that_hangs_after_it_was_denied_something_is_a_fault() -> None:
    program = "import os, time\ntry: os.fork()\nexcept OSError: pass\ntime.sleep(60)"
    found = scored("stdio", program, timeout_s=3.0)
    assert (found.value, found.outcome) == (0.0, Outcome.FAULT)
    assert "in time" in found.message
    assert "denied 1" in found.message
    assert found.sign == f"broke a rule of the sandbox: {found.message}"


OUT_OF_MEMORY = {
    Outcome.FAULT: "import os\ntry: os.fork()\nexcept OSError: bytearray(1 << 40)",
    Outcome.TIMEOUT: "import atexit, time\natexit.register(time.sleep, 60)\nbytearray(1 << 40)",
}


@ON_LINUX
@pytest.mark.parametrize("outcome", OUT_OF_MEMORY)
def test_a_program_that_runs_out_of_memory_is_counted_whatever_else_it_does(outcome: Outcome) -> None:
    limit_s = 60.0 if outcome is Outcome.FAULT else 4.0
    found = scored("stdio", OUT_OF_MEMORY[outcome], timeout_s=limit_s)
    assert (found.outcome, found.is_over_limit) == (outcome, True)


UNCOUNTED = """
mount -t tmpfs -o nr_inodes=0,size=1m none "$1" && exec "$2" -c '
import os, sys
from retrain.plugins.sandbox.inside import zygote
folder = os.open(sys.argv[1], os.O_RDONLY)
assert os.statvfs(folder).f_files == 0 and not zygote.has_no_room(folder)
open(sys.argv[1] + "/full", "wb").write(bytes(1 << 20))
assert zygote.has_no_room(folder)
' "$1"
"""


@ON_LINUX
def test_a_file_system_that_counts_no_files_is_not_full(tmp_path: Path) -> None:
    own = ["unshare", "--user", "--map-root-user", "--mount"]
    if "CI" not in os.environ and subprocess.run([*own, "true"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine refuses user namespaces")
    subprocess.run([*own, "sh", "-c", UNCOUNTED, "sh", str(tmp_path), sys.executable], check=True)


@ON_LINUX
def test_the_self_test_fails_where_a_harmless_program_breaks_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    breaks = "import ctypes; print([], flush=True); ctypes.CDLL(None).ptrace(0, 0, 0, 0)"
    monkeypatch.setattr(cell, "PROBE", breaks)
    with pytest.raises(SandboxError, match="a harmless one made a forbidden system call"):
        cell.holes(Sandbox("process", [sys.executable]))


def test_bubblewrap_that_starts_anew_tells_where_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "executable", lambda: "bwrap")
    assert bubblewrap.open_sandbox().weakness == ""
    assert '"process"' in bubblewrap.open_sandbox(warm=False).weakness
