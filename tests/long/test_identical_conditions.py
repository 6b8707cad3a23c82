"""Conditions that cannot differ are named before the campaign, and where rows show it, while it runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.results.report.gather import gather

Retrain = Callable[..., subprocess.CompletedProcess[str]]
FILE = """
[training]
batch_size = 4
group_size = 4
max_tokens = 5
temperature = 1.0
lr = 0.05
{training}
[reward]
reward = "partial"
[campaign]
seeds = [0, 1]
max_steps = {steps}
launcher = "inline"
[[campaign.conditions]]
name = "narrow"
algorithm.loss_params = {{ clip_high = 0.2 }}
[[campaign.conditions]]
name = "wide"
algorithm.loss_params = {{ clip_high = 0.28 }}
[[campaign.conditions]]
name = "other"
advantage_mode = "grpo"
"""
CANNOT = "narrow, wide: cannot differ: algorithm.loss_params has no effect here"
AGREE = "narrow, wide: 10 steps of seed 0, 1 agree to the last digit"
LONGER = """
[[campaign.conditions]]
name = "longer"
algorithm.loss_params = { clip_high = 0.2 }
training.max_steps = 30
"""


def write(here: Path, *, training: str = "", steps: int = 12) -> None:
    (here / "c.toml").write_text(FILE.format(training=training, steps=steps))


def notes(retrain: Retrain) -> list[str]:
    warnings = json.loads(retrain("explain", "c.toml", "--json").stdout)["warnings"]
    return [one for one in warnings if "cannot differ" in one]


def test_explain_names_conditions_whose_bounds_cut_nothing(retrain: Retrain, here: Path) -> None:
    write(here)
    (note,) = notes(retrain)
    assert note.startswith(CANNOT)


@pytest.mark.parametrize("training", ["updates_per_batch = 2", "minibatches = 2"])
def test_explain_names_none_that_may_differ(training: str, retrain: Retrain, here: Path) -> None:
    write(here, training=training)
    assert notes(retrain) == []


def test_a_campaign_names_them_once_ten_steps_agree(retrain: Retrain, here: Path) -> None:
    write(here)
    assert retrain("run", "c.toml").returncode == 0
    (campaign,) = (here / "logs").iterdir()
    told = [line for line in retrain("status").stdout.splitlines() if "last digit" in line]
    assert len(told) == 1
    assert told[0].strip().startswith(AGREE)
    (problem,) = [one for one in gather(campaign).problems if "last digit" in one]
    assert problem.startswith(AGREE)


def test_nothing_is_said_before_ten_steps(retrain: Retrain, here: Path) -> None:
    write(here, steps=9)
    assert retrain("run", "c.toml").returncode == 0
    assert "last digit" not in retrain("status").stdout


def test_explain_names_losses_that_are_the_same_on_samples_of_the_policy(
    retrain: Retrain, here: Path
) -> None:
    write(here)
    text = (here / "c.toml").read_text()
    plain = 'loss_mode = "importance_sampling"'
    (here / "c.toml").write_text(text.replace("loss_params = { clip_high = 0.28 }", plain))
    (note,) = notes(retrain)
    assert note.startswith("narrow, wide: cannot differ: algorithm.loss_mode, algorithm.loss_params have no ")


def test_steps_that_agree_prove_nothing_of_later_ones(retrain: Retrain, here: Path) -> None:
    write(here)
    (here / "c.toml").write_text((here / "c.toml").read_text() + LONGER)
    assert retrain("run", "c.toml").returncode == 0
    (told,) = [line for line in retrain("status").stdout.splitlines() if "last digit" in line]
    assert "longer" in told
    assert told.endswith("what sets these conditions apart had no effect in them")
