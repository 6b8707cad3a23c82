"""Sandboxes: what gets out of them, what they leave behind, and what they are when they cannot work."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, Outcome, Score, python
from retrain.plugins.rewards.python.scorer import ProgramRunner, ProgramScorer
from retrain.plugins.sandbox import Sandbox, SandboxError, auto, choose
from retrain.plugins.sandbox.cell import Cell, holes
from retrain.plugins.sandbox.inside import boot_text
from tests.conftest import temporary_files_in
from tests.namespaces import BUBBLEWRAP
from tests.semaphore_processes import wait_until
from tests.stopping import has_ended

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="confines less elsewhere")
ANEW = pytest.param("bubblewrap anew", marks=BUBBLEWRAP.marks)
CONTAINER = ["env", "-i", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"]
PRINTS = '[{"input": "", "output": "1"}]'
OPTIONS = {"command": {"command": CONTAINER, "python": sys.executable}, "bubblewrap anew": {"warm": False}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return where programs without a mount of their own have their folders."""
    with temporary_files_in(tmp_path_factory.mktemp("folders")) as folder:
        yield folder


@pytest.fixture(scope="module", params=[BUBBLEWRAP, ANEW, "process", "command"])
def scorer(request: pytest.FixtureRequest, folders: Path) -> Iterator[ProgramScorer]:
    name, options = request.param.split()[0], dict(OPTIONS.get(request.param, {}))
    if name == "command":
        options["command"] = [*CONTAINER, f"TMPDIR={folders}"]
    opened = python.open_scorer(
        tests="stdio", workers=2, timeout_s=5.0, memory_mb=256, sandbox=name, sandbox_options=options
    )
    assert isinstance(opened, ProgramScorer)
    yield opened
    opened.close()


def scored(scorer: ProgramScorer, program: str, cases: str = PRINTS) -> Score:
    return scorer.score_all([Answer(program, Prompt(0, "?", cases))])[0]


def left_behind(folders: Path) -> tuple[list[Path], set[int], int]:
    """Folders of programs, processes and open descriptors."""
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    return list(folders.iterdir()), processes, len(list(Path("/proc/self/fd").iterdir()))


BREAKERS = {
    "hides a directory": "import os; os.umask(0o777); os.makedirs('d/e'); 1/0",
    "nests directories": "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')",
    "fills the disk": "for n in range(40): open(str(n), 'wb').write(bytes(8 << 20))\n1/0",
    "makes many files": "for n in range(10**5): open(str(n), 'w').close()\n1/0",
    "prints without end": "while True: print('x' * 10**6)",
    "takes all memory": "x = []\nwhile True: x.append(bytes(10**8))",
    "forks": "import os\nwhile True: os.fork()",
    "starts threads without end": "import threading, time\n"
    "while True: threading.Thread(target=time.sleep, args=(9,)).start()",
    "kills whatever it can": "import os, signal\nfor pid in (-1, os.getppid(), 1):\n"
    "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n1/0",
    "closes every descriptor": "import os; os.closerange(0, 1024)",
    "links to the world": "import os; os.symlink('/', 'root'); os.link('/etc/passwd', 'p')",
    "ignores signals": "import signal\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nos._exit(1)",
}


@ON_LINUX
@pytest.mark.parametrize("what", BREAKERS)
def test_a_program_that_breaks_things_gets_0_and_leaves_nothing(
    scorer: ProgramScorer, folders: Path, what: str
) -> None:
    assert [s.value for s in scorer.score_all([Answer("print(1)", Prompt(0, "?", PRINTS))] * 2)] == [1, 1]
    before = left_behind(folders)
    assert scored(scorer, BREAKERS[what]).value == 0
    assert left_behind(folders) == before
    assert scored(scorer, "print(1)") == Score(1.0)


@ON_LINUX
def test_a_program_cannot_change_who_may_read_what(scorer: ProgramScorer) -> None:
    changes = "import os\ntry: os.chmod('.', 0)\nexcept PermissionError: print(1)"
    assert scored(scorer, changes) == Score(1.0)


@ON_LINUX
def test_a_program_can_cut_only_files_that_it_may_open(scorer: ProgramScorer) -> None:
    cuts = "import os\nopen('x', 'w').truncate(1)\ntry: os.truncate('x', 0)\nexcept PermissionError: print(1)"
    assert scored(scorer, cuts) == Score(1.0)


@ON_LINUX
def test_a_program_that_runs_when_its_scorer_closes_leaves_nothing(folders: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sandbox = dataclasses.replace(choose("process", {}), readable=())
    closing = ProgramScorer(ProgramRunner(sandbox, "stdio", 60.0, 1 << 30), workers=1)
    before = left_behind(folders)
    program = f"open('own', 'w').write('x')\nopen({str(pipe)!r}, 'w').write('x')\nimport time\ntime.sleep(60)"
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(scored, closing, program)
        pipe.read_text()
        closing.close()
        assert found.result().value is None
    assert left_behind(folders) == before


def test_a_forbidden_system_call_is_a_fault(scorer: ProgramScorer) -> None:
    assert scored(scorer, "import ctypes; ctypes.CDLL(None).ptrace(0, 0, 0, 0)").outcome is Outcome.FAULT


DENIED = {
    "a process": "import os\ntry: os.fork()\nexcept OSError: print(1)",
    "a socket": "import socket\ntry: socket.socket()\nexcept OSError: print(1)",
    "a signal": "import os\ntry: os.kill(os.getppid(), 0)\nexcept OSError: print(1)",
    "a file": "try: open('/etc/passwd')\nexcept OSError: pass\nprint(1)",
    "a folder": "import os\ntry: os.listdir('/proc')\nexcept OSError: pass\nprint(1)",
    "threads without end": "import _thread, os\n_thread.stack_size(1 << 15)\n"
    "try:\n    while True: _thread.start_new_thread(int, ())\n"
    "except RuntimeError: print(1, flush=True)\nos._exit(0)",
}


@ON_LINUX
@pytest.mark.parametrize("what", DENIED)
def test_a_completion_that_was_denied_something_keeps_its_score_and_is_counted(
    scorer: ProgramScorer, what: str
) -> None:
    found = scored(scorer, DENIED[what])
    assert (found.value, found.outcome) == (1.0, Outcome.FAULT)


OVER = {
    "memory": ("bytearray(1 << 40)", 0),
    "memory, by another name": ("try: bytearray(1 << 40)\nexcept MemoryError: raise ValueError", 0),
    "memory, little by little, and goes on": (
        "x = []\ntry:\n    while True: x.append(b'1' * (1 << 16))\nexcept MemoryError: x = 1\nprint(1)",
        1,
    ),
    "memory, mapped": ("import mmap; mmap.mmap(-1, 1 << 40)", 0),
    "a file": ("open('f', 'wb').write(bytes(32 << 20))", 0),
    "descriptors": ("x = [open('/dev/null') for _ in range(100)]", 0),
}


@ON_LINUX
@pytest.mark.parametrize("what", OVER)
def test_a_completion_that_runs_into_a_limit_keeps_its_score_and_is_counted(
    scorer: ProgramScorer, what: str
) -> None:
    program, value = OVER[what]
    found = scored(scorer, program)
    assert found == Score(value, is_over_limit=True)


@ON_LINUX
def test_a_program_that_fills_its_folder_gets_0_even_if_it_goes_on(scorer: ProgramScorer) -> None:
    fills = "try:\n    for n in range(40): open(str(n), 'wb').write(bytes(4 << 20))\nexcept OSError: pass"
    found = scored(scorer, f"{fills}\nprint(1)")
    assert (found.value, found.outcome) == (0.0, Outcome.FAULT)


@ON_LINUX
def test_threads_and_files_of_its_own_are_no_fault(scorer: ProgramScorer) -> None:
    program = (
        "import concurrent.futures as c, os, tempfile\nopen('own', 'w').write('x')\nopen('own').read()\n"
        "tempfile.TemporaryFile().write(b'x')\nos.listdir('.')\nopen('/dev/null').read()\n"
        "with c.ThreadPoolExecutor(8) as pool: print(sum(pool.map(int, '10')))"
    )
    assert scored(scorer, program) == Score(1.0)


def test_a_program_gets_its_input_as_a_file(scorer: ProgramScorer) -> None:
    reads = "import os; print(os.read(0, os.fstat(0).st_size).decode().strip())"
    assert scored(scorer, reads, '[{"input": "1\\n", "output": "1"}]') == Score(1.0)


def test_a_program_opens_its_input_by_the_name_of_a_device(scorer: ProgramScorer) -> None:
    reads = "for name in ('/dev/stdin', '/dev/fd/0'): print(open(name).read(), end='')\nprint(input())"
    assert scored(scorer, reads, '[{"input": "7\\n", "output": "7\\n7\\n7"}]') == Score(1.0)


def test_programs_do_not_see_each_others_files(scorer: ProgramScorer) -> None:
    assert scored(scorer, "open('left', 'w'); print(1)") == Score(1.0)
    assert scored(scorer, "import os; print(int('left' not in os.listdir('.')))") == Score(1.0)


@ON_LINUX
@pytest.mark.parametrize("name", [BUBBLEWRAP, ANEW, "process"])
def test_nothing_gets_out_of_a_sandbox(name: str) -> None:
    assert holes(choose(name.split()[0], OPTIONS.get(name, {}))) == []


def test_the_self_test_finds_what_is_open() -> None:
    opened = choose("command", OPTIONS["command"])
    assert "files" in holes(opened)


def test_auto_takes_what_the_self_test_proves(monkeypatch: pytest.MonkeyPatch) -> None:
    from retrain.plugins.sandbox import bubblewrap

    monkeypatch.setattr(bubblewrap, "executable", lambda: None)
    auto.open_sandbox.cache_clear()
    try:
        assert auto.open_sandbox().name == "process"
        with pytest.raises(ConfigError, match="bwrap not found"):
            choose("bubblewrap", {})
    finally:
        auto.open_sandbox.cache_clear()


def test_a_command_runs_the_program_and_this_machine_the_tests_of_which_it_warns() -> None:
    options = {"command": [*CONTAINER, "INSIDE=1"], "python": sys.executable}
    assert "this machine" in choose("command", options).weakness
    tests = "import os\nassert is_inside() and 'INSIDE' not in os.environ"
    program = "import os\ndef is_inside(): return 'INSIDE' in os.environ"
    prompt = Prompt(0, "?", tests)
    assert python.score(program, prompt, sandbox="command", sandbox_options=options) == 1.0


def test_auto_says_that_temporary_files_have_no_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    auto.open_sandbox.cache_clear()
    with pytest.raises(ConfigError, match=r"programs need a directory for temporary files .*set TMPDIR"):
        auto.open_sandbox()


@pytest.mark.parametrize("command", [["no-such-command"], ["false"]])
def test_a_sandbox_that_does_not_start_leaves_its_completions_unscored(command: list[str]) -> None:
    broken = Sandbox("broken", command)
    scorer = ProgramScorer(ProgramRunner(broken, "stdio", 5.0, 1 << 29), workers=1)
    found = scored(scorer, "print(1)")
    scorer.close()
    assert (found.value, found.outcome) == (None, Outcome.ERROR)
    with pytest.raises(SandboxError):
        Cell(broken)


def test_a_command_that_runs_no_program_and_says_nothing_is_told_as_that() -> None:
    runner = ProgramRunner(Sandbox("silent", ["false"], single_use=True), "stdio", 5.0, 1 << 29)
    with closing(ProgramScorer(runner, workers=1)) as scorer:
        found = scored(scorer, "print(1)")
    assert (found.value, found.message) == (None, "silent has ended without a program: without a message")


READS = len(boot_text(Sandbox("any", [], single_use=True)))  # of what a container is sent, but for the limits
SAYS_NO_LAST_WORDS = [
    "exit 1",
    f"head -c {READS} > /dev/null; yes",
    "echo '{1}' >&2; echo '{\"level\": 1}' >&2",
]


@pytest.mark.parametrize("ending", SAYS_NO_LAST_WORDS)
def test_a_container_that_ends_while_a_program_runs_costs_its_completion(ending: str) -> None:
    options = {"command": ["sh", "-c", f"echo '{{}}' >&2; {ending}"]}
    opened = python.open_scorer(tests="stdio", workers=1, sandbox="command", sandbox_options=options)
    (found,) = opened.score_all([Answer("print(1)", Prompt(0, "?", PRINTS))])  # type: ignore[misc]
    opened.close()
    assert (found.value, found.outcome) == (0.0, Outcome.FAULT)


SHOWS_WHETHER_IT_MAY_BE_READ = """
import ctypes, sys
from retrain.plugins.sandbox.cell import Cell
from retrain.plugins.sandbox import choose
Cell(choose("process", {}))
print(ctypes.CDLL(None).prctl(3))
"""


@ON_LINUX
def test_a_run_beside_which_programs_run_cannot_be_read_by_them() -> None:
    shows = [sys.executable, "-W", "ignore", "-c", SHOWS_WHETHER_IT_MAY_BE_READ]
    assert subprocess.check_output(shows, text=True).strip() == "0"


OPENS_AND_WAITS = """
import psutil, select, sys
from retrain.plugins.sandbox import Limits
from retrain.plugins.sandbox.cell import Cell
from retrain.plugins.sandbox import choose
from retrain.plugins.sandbox.inside import values
cell = Cell(choose(sys.argv[1], {}))
program = cell.start(Limits(60.0, 1 << 29))
program.send(values.frame({"job": "stdio", "source": "print(1, flush=True)\\nwhile True: pass", "input": ""}))
select.select([program], [], [])
print(*[process.pid for process in psutil.Process().children(recursive=True)], flush=True)
input()
"""


@pytest.mark.parametrize("name", [BUBBLEWRAP, "process"])
def test_a_sandbox_ends_with_the_process_that_opened_it(name: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OPENS_AND_WAITS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as opener:
        assert opener.stdout is not None
        pids = [int(pid) for pid in opener.stdout.readline().split()]
        left = [psutil.Process(pid) for pid in pids]
        opener.kill()
    assert len(left) >= 2
    wait_until(lambda: all(map(has_ended, left)))


READS = """
import sys
from pathlib import Path
from retrain.base import registry
from retrain.plugins.sandbox.cell import LONGEST_OUTPUT, PROBE, PROBE_LIMITS, Cell
cell = Cell(registry.find_plugin("sandbox", sys.argv[1])())
for path in Path(sys.argv[2]).iterdir():
    if path.suffix:
        job = {"job": "stdio", "source": PROBE, "input": str(path)}
        ended, output = cell.run(PROBE_LIMITS, job, LONGEST_OUTPUT)
        print(path.name, ended.broke, output.decode().strip())
cell.close()
"""


@pytest.fixture(params=["a virtual environment", "a link to the interpreter"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """Return the directory of a campaign which is also an environment's, or holds a link; its interpreter."""
    base = Path(sys.executable).resolve()
    if request.param == "a virtual environment":
        subprocess.run([base, "-m", "venv", "--without-pip", "--symlinks", tmp_path], check=True)
        interpreter = tmp_path / "bin" / "python"
    else:
        interpreter = tmp_path / "python"
        interpreter.symlink_to(base)
    (tmp_path / "answers.jsonl").write_text("{}")
    (tmp_path / ".env.txt").write_text("KEY=1")
    return tmp_path, interpreter


@pytest.mark.parametrize("sandbox", [BUBBLEWRAP, pytest.param("process", marks=ON_LINUX)])
def test_a_program_reads_only_the_interpreter_of_a_project_that_holds_it(
    sandbox: str, project: tuple[Path, Path]
) -> None:
    directory, interpreter = project
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [interpreter, "-c", READS, sandbox, directory]
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in answer.stdout.splitlines() if not line.startswith("pyvenv.cfg")]
    assert sorted(lines) == [".env.txt  []", "answers.jsonl  []"], answer.stderr
