"""No known way to a reward without a solution earns one, in any sandbox; every honest solution earns 1."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import psutil
import pytest

import tests.cheats
from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, BatchScorer, Score, match, python
from retrain.plugins.sandbox import bubblewrap
from retrain.plugins.sandbox.process import readable_paths
from tests.cheats import (
    EXPECTED,
    Cheat,
    Honest,
    descriptors,
    endings,
    equality,
    files,
    introspection,
    patches,
    processes,
    protocol,
    reached,
    resources,
    returned,
    swallowed,
)
from tests.cheats.boxes import HEDGES, Hedge
from tests.cheats.honest import HONEST
from tests.cheats.working import WITHOUT_LANDLOCK, WORKING
from tests.namespaces import BUBBLEWRAP

FAMILIES = (
    descriptors,
    patches,
    equality,
    introspection,
    processes,
    files,
    endings,
    resources,
    returned,
    protocol,
    swallowed,
    reached,
)
CHEATS = [cheat for family in FAMILIES for cheat in family.CHEATS]
SANDBOXES = [BUBBLEWRAP, pytest.param("process"), pytest.param("command")]
# What these do is judged by the tests, which `command` runs in `process`: nothing of a container is in it.
ANSWERS = [
    cheat
    for family in (patches, equality, introspection, returned, swallowed, reached)
    for cheat in family.CHEATS
]
TRIED = [
    pytest.param(*sandbox.values, cheat, marks=sandbox.marks, id=f"{sandbox.values[0]}-{cheat.name}")
    for sandbox in SANDBOXES
    for cheat in CHEATS
    if sandbox.values != ("command",) or cheat.mode != "asserts" or cheat not in ANSWERS
]
Judge = Callable[[str, str, str, str, float], Score]
PAGE = Path(__file__).parents[2] / "docs" / "rewards-reference.md"
LIMIT_S, SHORT_LIMIT_S = 30.0, 1.0


class Telling(BaseHTTPRequestHandler):
    """Tells the expected values, as the run's own servers and environment might."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(told().encode())

    def log_message(self, *_: object) -> None:
        pass


def told() -> str:
    return " ".join(map(str, EXPECTED.values()))


def container() -> dict[str, object]:
    """Return options of the sandbox `command`: a container of the user's own."""
    binds = [word for path in readable_paths() for word in ("--ro-bind", path, path)]
    command = [
        str(bubblewrap.executable()),
        "--unshare-all",
        "--die-with-parent",
        "--tmpfs",
        "/tmp",
        *binds,
        "--dev",
        "/dev",
        "--proc",
        "/proc",
    ]
    return {"command": [*command, "--"], "python": sys.executable}


def program_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("retrain-program-*"))


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, str]]:
    """What programs might reach, by its name in them."""
    with (
        tempfile.TemporaryDirectory() as directory,
        ThreadingHTTPServer(("127.0.0.1", 0), Telling) as server,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim,
    ):
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield {
            "@VICTIM@": str(victim.pid),
            "@MARKER@": str(Path(directory) / "marker"),
            "@TESTS@": tests.cheats.__file__,
            "@PORT@": str(server.server_port),
        }
        server.shutdown()
        thread.join()
        assert victim.poll() is None
        assert os.listdir(directory) == []  # noqa: PTH208
        victim.kill()


@pytest.fixture(scope="module")
def judge(places: dict[str, str]) -> Iterator[Judge]:
    """Judge a program in a sandbox, warm from the one before; afterwards, nothing may be left."""
    scorers: dict[tuple[str, str, float], BatchScorer] = {}
    children = set(psutil.Process().children(recursive=True))
    folders = program_folders()

    def judge(sandbox: str, program: str, tests: str, mode: str, limit_s: float) -> Score:
        if (sandbox, mode, limit_s) not in scorers:
            how = {"tests": "stdio"} if mode == "stdio" else {"shared": mode == "shared"}
            opened = python.open_scorer(
                workers=1,
                timeout_s=limit_s,
                sandbox=sandbox,
                sandbox_options=container() if sandbox == "command" else {},
                **how,  # type: ignore[arg-type]
            )
            scorers[sandbox, mode, limit_s] = opened
        for name, place in places.items():
            program = program.replace(name, place)
        answer = Answer(program, Prompt(0, "?", tests))
        (score,) = scorers[sandbox, mode, limit_s].score_all([answer])
        return score

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXPECTED", told())
        yield judge
    for scorer in scorers.values():
        scorer.close()
    assert set(psutil.Process().children(recursive=True)) <= children
    left = program_folders() - folders
    while left & program_folders():  # those of other tests, at the same time, end with their programs
        time.sleep(0.1)


# not by way of a fixture's parameter, as each of so many would be set up anew
@pytest.mark.parametrize(("sandbox", "cheat"), TRIED)
def test_a_cheat_earns_nothing(judge: Judge, sandbox: str, cheat: Cheat) -> None:
    limit_s = SHORT_LIMIT_S if cheat.hangs else LIMIT_S
    found = judge(sandbox, cheat.program, cheat.tests, cheat.mode, limit_s)
    assert found.value == (cheat.name in WORKING[sandbox]), found


@pytest.mark.parametrize("honest", HONEST, ids=lambda honest: honest.name)
@pytest.mark.parametrize("sandbox", SANDBOXES)
def test_an_honest_solution_earns_1(judge: Judge, sandbox: str, honest: Honest) -> None:
    assert judge(sandbox, honest.program, honest.answer, honest.mode, LIMIT_S) == Score(1.0)


@pytest.mark.parametrize("hedge", HEDGES, ids=lambda hedge: hedge.name)
def test_two_answers_are_right_for_at_most_one_question(hedge: Hedge) -> None:
    one, other = map(str, EXPECTED.values())
    completion = hedge.of(one, other)
    assert sum(match.score(completion, Prompt(0, "?", wanted)) for wanted in (one, other)) <= 1


def test_every_cheat_that_works_is_documented() -> None:
    working = frozenset().union(*WORKING.values(), WITHOUT_LANDLOCK)
    assert working <= {cheat.name for cheat in CHEATS}
    assert [name for name in sorted(working) if f"*{name}*" not in PAGE.read_text()] == []


@pytest.mark.parametrize("cheat", equality.CHEATS[:3] + introspection.CHEATS[:3], ids=lambda one: one.name)
def test_a_cheat_is_one_where_the_tests_share_its_interpreter(cheat: Cheat) -> None:
    assert python.score(cheat.program, Prompt(0, "?", cheat.tests), shared=True, sandbox="process") == 1


def test_names_are_unique() -> None:
    names = [cheat.name for cheat in CHEATS]
    assert len(set(names)) == len(names)
