"""The run.toml of runs that differ in their seed are rendered once, and are what each alone would be."""

from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from retrain.campaign.reconcile import RunTexts
from retrain.config.load import load_config
from retrain.config.resolve import as_tables
from retrain.plan.build import plan_runs
from retrain.plan.matrix import RunPlan
from retrain.records.provenance import Provenance
from tests.results.test_run_tables import TOML

NAMED = TOML.replace('name = "a"', "name = 'a \"quoted\\name\", é'").replace("[0, 1, 12]", "[3, 1, 12]")
ORIGIN = Provenance("study", ('data.seed="3\n[run]\n"',), "/somewhere", None, "local", "0" * 64)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunPlan, ...]:
    path = tmp_path / "file.toml"
    path.write_text(NAMED)
    return plan_runs(load_config(path)).runs


def alone(run: RunPlan) -> str:
    tables = as_tables(run.config)
    known = {key: value for key, value in vars(ORIGIN).items() if value is not None and key != "options"}
    tables["run"] = {**tables["run"], "campaign": "study-1", "origin": known}
    return tomli_w.dumps(tables)


def test_each_text_is_what_the_run_alone_would_have(runs: tuple[RunPlan, ...]) -> None:
    texts = RunTexts("study-1", ORIGIN)
    assert [texts.of(run) for run in runs] == [alone(run) for run in runs]


def test_a_run_that_differs_from_its_condition_has_its_own_text(runs: tuple[RunPlan, ...]) -> None:
    """As one has that began with another configuration, or with other files."""
    first, _, other, *_ = runs
    config, identity = other.config, other.config.run
    assert identity is not None
    changed = [
        replace(other, config=replace(config, training=replace(config.training, lr=0.25))),
        replace(other, config=replace(config, run=replace(identity, files={"data.options.path": "0f"}))),
        other,
    ]
    texts = RunTexts("study-1", ORIGIN)
    texts.of(first)
    assert [texts.of(run) for run in changed] == [alone(run) for run in changed]
