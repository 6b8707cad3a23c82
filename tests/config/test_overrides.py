"""`--set`: what replaces a value of the file, and what would replace nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.config.load import load_config

TWO = """
[campaign]
seeds = [0, 1]
max_steps = 9
[[campaign.conditions]]
name = "a"
training.lr = 1e-3
algorithm.loss_params.clip_low = 0.1
[[campaign.conditions]]
advantage_mode = "grpo"
algorithm.loss_params.clip_low = 0.2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(TWO)
    return path


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("training.max_steps", "has no effect, because campaign.max_steps = 9 decides; set that"),
        ("training.seed", "has no effect, because campaign.seeds = [0, 1] decides; set that"),
        (
            "algorithm.loss_params.clip_low",
            "has no effect, because every condition gives its own [algorithm.loss_params].clip_low",
        ),
    ],
)
def test_an_override_that_would_change_nothing_is_refused(key: str, why: str, file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [f"{key}=0.5" if "clip" in key else f"{key}=5"])
    assert caught.value.problems == (f"--set {key}: {why}",)


def test_steps_of_a_campaign_whose_conditions_all_have_their_own_are_refused(file: Path) -> None:
    file.write_text("[campaign]\nseeds = [0]\n[[campaign.conditions]]\ntraining.max_steps = 5000\n")
    with pytest.raises(ConfigError, match=r"every condition gives its own \[training\].max_steps"):
        load_config(file, ["campaign.max_steps=20"])


def test_an_override_that_one_condition_takes_is_kept(file: Path) -> None:
    assert load_config(file, ["training.lr=1e-2"]).training.lr == 1e-2


def test_an_override_of_steps_holds_where_no_campaign_says_how_many(file: Path) -> None:
    file.write_text("[training]\nmax_steps = 8\n")
    assert load_config(file, ["training.max_steps=5"]).training.max_steps == 5
