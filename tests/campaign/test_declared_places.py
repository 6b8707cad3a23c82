"""Where runs compute, and which keys have no effect there: launchers and backends declare it themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.base import user_code
from retrain.base.errors import ConfigError
from retrain.campaign.conformance import check_plugin
from retrain.campaign.launcher_setup import as_launched
from retrain.campaign.run import start
from retrain.config.load import parse
from retrain.config.resolve import runs_here
from retrain.plan.build import plan_runs
from retrain.plan.explain import Decisions
from retrain.plan.matrix import Plan
from retrain.plan.notes import warnings_of
from retrain.plan.preflight import memory_of

LAUNCHER = "from retrain import find_plugin\nopen_launcher = find_plugin('launchers', 'inline')\n"
HERE = "def runs_here(options): return True\n"
IN_TURN = "def unused_keys(options): return {'parallel': 'it has one place', 'retries': 'it never fails'}\n"
BACKEND = """
from retrain import MemoryEstimate, find_plugin

connect = find_plugin("backends", "numpy")

def computes_here(options): return True
def takes_permits(options): return False
def spells(options): return True
def memory(config, prompts): return MemoryEstimate("cpu", {}, 1, 2, 1)
"""


@pytest.fixture(autouse=True)
def own_plugins(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a backend, and launchers that declare nothing, a place, keys without effect, or a wrong key."""
    monkeypatch.syspath_prepend(str(here))
    user_code.search_first(here)
    (here / "declared_backend.py").write_text(BACKEND)
    wrong = IN_TURN.replace("retries", "retrys")
    files = {"elsewhere": "", "nearby": HERE, "in_turn": HERE + IN_TURN, "misspelt": wrong}
    for name, hooks in files.items():
        (here / f"declared_{name}.py").write_text(LAUNCHER + hooks)


def plan_with(launcher: str, **campaign: object) -> Plan:
    raw = {
        "backend": {"backend": "declared_backend.connect"},
        "training": {"max_tokens": 1024},
        "campaign": {"seeds": [0, 1, 2, 3], "parallel": True, "launcher": launcher, **campaign},
    }
    return plan_runs(parse(raw, "c.toml"), "c.toml")


@pytest.mark.parametrize(("name", "is_here"), [("nearby", True), ("elsewhere", False)])
def test_what_runs_here_by_its_own_word_shares_this_machines_cores_and_memory(
    name: str, is_here: bool
) -> None:
    plan = plan_with(f"declared_{name}.open_launcher")
    decisions = Decisions(plan, {}, None, 2.0, "c.toml", "logs")
    lines = decisions.checklist(None, sets_max_tokens=True)
    assert any("4 workers share 2 CPU cores" in line.answer for line in lines) == is_here
    config = parse({"backend": {"backend": "declared_backend.connect"}}, "c.toml")
    assert memory_of(config) is not None  # a single run is one here
    campaign_of = parse({"campaign": {"seeds": [0], "launcher": f"declared_{name}.open_launcher"}}, "c.toml")
    assert runs_here(campaign_of.campaign) == is_here


def test_keys_that_a_launcher_of_others_does_not_use_are_reported_if_they_are_set() -> None:
    launcher = "declared_in_turn.open_launcher"
    plan = plan_with(launcher)
    told = [line for line in warnings_of(plan, {}) if "no effect" in line]
    assert told == [f'parallel has no effect with launcher = "{launcher}": it has one place']
    assert not plan.shares_cores
    assert as_launched(plan, "c.toml").workers == 1
    several = warnings_of(plan_with(launcher, retries=5), {})
    assert any(line.startswith("retries has no effect") for line in several)


def test_a_run_is_checked_beside_as_many_workers_as_its_launcher_runs(here: Path) -> None:
    alone = "def check(config, task): return ['[campaign]: too many'] * (config.campaign.max_workers > 1)"
    (here / "lonely_backend.py").write_text(f"{BACKEND}\n{alone}\n")
    file = here / "c.toml"
    file.write_text(
        '[backend]\nbackend = "lonely_backend.connect"\n[campaign]\nseeds = [0, 1]\nparallel = true\n'
        'max_workers = 2\nlauncher = "declared_in_turn.open_launcher"\n'
    )
    assert start(file).plan.workers == 1
    with pytest.raises(ConfigError, match="too many"):
        start(file, ['campaign.launcher="declared_nearby.open_launcher"'])


def test_a_key_that_does_not_exist_is_refused_with_the_nearest() -> None:
    name = "declared_misspelt.open_launcher"
    with pytest.raises(ConfigError, match=r"unused_keys: .*no key 'retrys'; did you mean 'retries'\?"):
        as_launched(plan_with(name), "c.toml")
    found = [one.problem for one in check_plugin("launchers", name, {})]
    assert any("did you mean 'retries'?" in problem for problem in found)


def test_a_vocabulary_of_characters_is_what_compares_an_answers_length_with_max_tokens() -> None:
    plan = plan_with("declared_nearby.open_launcher")
    answers = dict.fromkeys(plan.first_runs, 3)
    assert any("longest answer" in line for line in warnings_of(plan, answers))
