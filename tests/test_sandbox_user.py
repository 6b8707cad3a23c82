"""Sandboxes of an ordinary user, where the other tests run as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import BUBBLEWRAP

NOBODY = 65534
READS_PACKAGES = """
import os, sys
sys.exit(not all(os.access(path, os.X_OK) for path in os.environ["PYTHONPATH"].split(":")))
"""
SCORES = """
import os, sys
from retrain.rewards import python
from retrain.rollouts import Prompt
assert os.getuid() != 0
cases = '[{"input": "1", "output": "1"}]'
print(python.score("print(input())", Prompt(0, "?", cases), tests="stdio", sandbox=sys.argv[1]))
print(python.score("def f(): return 1", Prompt(0, "?", "assert f() == 1"), sandbox=sys.argv[1]))
"""


def run_as_nobody(interpreter: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    packages = [str(Path(__file__).parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    return subprocess.run(
        [interpreter, *arguments],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(packages)},
        capture_output=True,
        text=True,
    )


def interpreter_of_nobody() -> str:
    """Return an interpreter of this version that an ordinary user may run, "" if there is none."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        try:
            if run_as_nobody(path, "-c", READS_PACKAGES).returncode == 0:
                return path
        except OSError:  # it is root's own, or does not exist
            continue
    return ""


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", [BUBBLEWRAP, "process"])
def test_programs_run_for_an_ordinary_user(name: str) -> None:
    interpreter = interpreter_of_nobody()
    if not interpreter and "CI" not in os.environ:
        pytest.skip("no interpreter of this version that an ordinary user may run with these packages")
    own = ("--user", "--map-root-user", "--mount", "true")
    if name == "bubblewrap" and "CI" not in os.environ and run_as_nobody("unshare", *own).returncode:
        pytest.skip("this machine refuses user namespaces to ordinary users")
    found = run_as_nobody(interpreter, "-c", SCORES, name)
    assert (found.stdout.split(), found.returncode) == (["1.0", "1.0"], 0), found.stderr
