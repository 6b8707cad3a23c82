"""What a speed of the rate limiter means where nothing else is said, and what `run` says of a plan."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import ConfigError
from retrain.config.load import parse
from retrain.plan.build import plan_runs

Call = Callable[..., subprocess.CompletedProcess[str]]
SPEED = {"rate_limit_speed_batch_per_sim": 1.0}


def staleness_of(raw: dict[str, Any]) -> list[int]:
    return [run.config.rate_limiter.max_staleness for run in plan_runs(parse(raw, "c.toml")).runs]


def test_a_speed_alone_overlaps_sampling_and_training_by_one_version() -> None:
    assert staleness_of({"rate_limiter": SPEED}) == [1]
    assert staleness_of({}) == [0]
    assert staleness_of({"rate_limiter": {"rate_limit_speed_batch_per_sim": 0.0}}) == [0]


def test_a_given_staleness_stays() -> None:
    assert staleness_of({"rate_limiter": {**SPEED, "max_staleness": 3}}) == [3]
    assert staleness_of({"rate_limiter": {**SPEED, "max_staleness": 0}}) == [0]


def test_a_speed_of_a_condition_overlaps_that_condition() -> None:
    conditions = [{"name": "alone"}, {"name": "ahead", "rate_limiter": SPEED}]
    assert staleness_of({"campaign": {"seeds": [0], "conditions": conditions}}) == [0, 1]


def test_a_refused_reservoir_names_the_speed_that_works() -> None:
    limiter = {"buffer": "reservoir", "rate_limit_speed_batch_per_sim": 0.5, "nb_time_steps": 6}
    training = {"batch_size": 4}
    with pytest.raises(ConfigError, match=r"got 0\.5, .* needs at least 1\.5 ") as refused:
        parse({"rate_limiter": limiter, "training": training}, "c.toml")
    assert "rate_limit_speed_batch_per_sim" in str(refused.value)
    limiter["rate_limit_speed_batch_per_sim"] = 1.5
    assert staleness_of({"rate_limiter": {**limiter, "watermark": 4}, "training": training}) == [1]


def test_a_refused_watermark_names_the_value_that_works_and_keys_of_the_file() -> None:
    limiter = {"buffer": "reservoir", "rate_limit_speed_batch_per_sim": 2.0, "nb_time_steps": 6}
    raw = {"rate_limiter": limiter, "training": {"batch_size": 4}}
    with pytest.raises(ConfigError, match=r"watermark: got 0; needs at least 4, a whole batch") as refused:
        parse(raw, "c.toml")
    assert "samples_per_batch" not in str(refused.value)
    limiter["watermark"] = 4
    assert staleness_of(raw) == [1]
    raw["backpressure"] = {"enabled": True, "max_batch_size": 16}
    with pytest.raises(ConfigError, match=r"at least 16.* \[backpressure\]\.max_batch_size = 16"):
        parse(raw, "c.toml")


def test_run_says_what_explain_says_of_a_plan(retrain: Call, campaign_file: Path) -> None:
    sets = ["--set", "campaign.max_workers=3", "--set", "campaign.parallel=false"]
    sets += ["--set", "rate_limiter.watermark=4"]
    notes = ["max_workers = 3 has no effect", "[rate_limiter] has no effect with max_staleness = 0"]
    explained = " ".join(retrain("explain", campaign_file.name, *sets).stdout.split())
    ran = " ".join(retrain("run", campaign_file.name, *sets).stderr.split())
    for note in notes:
        assert note in explained
        assert note in ran
