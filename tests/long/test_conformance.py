"""`retrain plugins --check`: built-in plugins pass, and reports what breaks it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.campaign.conformance import check_plugin

Retrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("rewards", "match"), ("advantages", "maxrl"), ("losses", "gspo"), ("losses", "cispo"),
     ("transforms", "gtpo_sepa"), ("tasks", "addition"), ("curricula", "shuffle"),
     ("curricula", "pool"), ("curricula", "skip"), ("backends", "numpy"), ("launchers", "local")],
)  # fmt: skip
def test_built_in_plugins_pass(kind: str, name: str, here: Path) -> None:
    assert [finding for finding in check_plugin(kind, name, {}) if finding.problem] == []


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        ("def score(c, p): return float('nan')", "own.score", "FAILED  it scores"),
        (
            "def estimate(rewards): return -rewards",
            "own.estimate",
            "got a smaller advantage",
        ),
        (
            "RANGE = (0.0, 1.0)\ndef score(c, p): return 0.5 if c else 7.0",
            "own.score",
            "the reward 'own.score' returned 7, outside its range 0 to 1",
        ),
        (
            "import retrain\nclass Own(retrain.Curriculum):\n"
            "    def choose(self, count): return [0] * count\n"
            "def open_curriculum(prompts, *, seed): return Own()",
            "own.open_curriculum",
            "chose position 0 twice; set `repeats = True` if that is meant",
        ),
        (
            "import random, retrain\nclass Own(retrain.Curriculum):\n"
            "    repeats = True\n"
            "    def choose(self, count): return [random.randrange(12) for _ in range(count)]\n"
            "def open_curriculum(prompts, *, seed): return Own()",
            "own.open_curriculum",
            "after a resume it chose",
        ),
        (
            "import itertools\nPURE, calls = True, itertools.count()\ndef score(c, p): return next(calls)",
            "own.score",
            "declares PURE = True, and scores the same completions otherwise in another order",
        ),
        ("def score(c): return 0.0", "own.score", "is called with (completion, prompt)"),
        ("def score(c, p): return {}['b']", "own.score", "own.py:1: KeyError: 'b'"),
    ],
)
def test_a_breach_of_the_contract_is_reported(
    code: str, name: str, says: str, retrain: Retrain, here: Path
) -> None:
    (here / "own.py").write_text(code)
    told = retrain("plugins", "--check", name)
    assert (told.returncode, says in told.stdout) == (2, True), told.stdout + told.stderr


WRITES_BESIDE_ITS_RUN = """
class Own:
    id = "1"
    def __init__(self, run):
        (run.campaign_directory / "own.db").write_text("")
    def rows(self, rows): pass
    def flush(self): pass
    def close(self, state, result): pass
def open_logger(run): return Own(run)
"""


def test_a_logger_that_is_checked_writes_nothing_where_the_check_was_started(
    retrain: Retrain, here: Path
) -> None:
    (here / "own.py").write_text(WRITES_BESIDE_ITS_RUN)
    assert retrain("plugins", "loggers", "--check", "own.open_logger").returncode == 0
    assert not (here / "own.db").exists()
