"""Environments of verifiers, played unchanged by its own harness `null`.

CI does not run these tests: verifiers brings a hundred packages, and its harness downloads more with `uv` the
first time. `pip install '.[test,verifiers]' uv && pytest tests/verifiers` runs them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt
from retrain.campaign.conformance import dry_run
from retrain.records.metrics import read_metrics
from retrain.records.samples import read_samples
from retrain.trainer import worker
from tests.trainer.test_trainer import SMALL, make_run

SUMS = {"taskset": "sums-v1"}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed taskset, the module can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).parent)


def opener(**options: Any) -> Any:
    return registry.bound("environments", "verifiers", options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"taskset": "nowhere-v1"}, "taskset: verifiers cannot play 'nowhere-v1' as configured"),
        ({**SUMS, "config": {"agent": {"max_turnz": 3}}}, "max_turnz"),
        ({**SUMS, "config": {"agent": {"harness": {"id": "none"}}}}, "harness 'none' not found"),
    ],
)
def test_what_verifiers_refuses_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        opener(**options)()
    assert said in str(refusal.value)


def test_an_episode_asks_the_policy_and_is_worth_its_reward() -> None:
    assert dry_run(opener(**SUMS), Prompt(1, "1", ""), ["1"], is_program=True) == ""
    said = dry_run(opener(**SUMS), Prompt(9, "9", ""), ["1"], is_program=True)
    assert said.endswith("taskset 'sums-v1' has 9 tasks; set [data.options].count = 9")


def test_a_run_trains_on_what_its_agents_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import verifiers.v1 as vf

    began, serving = [], vf.Env.serving

    def counted(env: Any) -> Any:
        began.append(env)
        return serving(env)

    monkeypatch.setattr(vf.Env, "serving", counted)
    size = {**SMALL["training"], "max_steps": 2, "batch_size": 2, "group_size": 2, "max_tokens": 2}
    data = {"task": "numbered", "options": {"count": 9, "held_out": 0.0}}
    table = {"environment": "verifiers", "options": SUMS, "time_limit_s": 300.0}
    run = make_run(tmp_path / "run", {"training": size, "data": data, "environment": table})
    assert worker.run(run.directory, threading.Event()) == 0
    assert 2 <= len(began) < 8  # episodes of a step share servers
    rows = read_metrics(run.directory)
    shown = read_samples(run.samples)
    assert not [row["error"] for row in shown if "error" in row]
    assert [(row["episode_errors"], row["separate_samples"], row["turns_mean"]) for row in rows] == [
        (0, 0, 1.0)
    ] * 2
    assert {row["prompt"][3:] for row in shown} == {"="}
