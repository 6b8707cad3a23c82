"""How far trainer and sampler are apart, limits of importance ratios, and a warning when both drift."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import signs
from retrain.backends import Optimization
from retrain.backends.objective import RatioCap, TokenData, Totals
from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Loss
from retrain.cli.render.status import warnings
from retrain.config.load import load_config
from retrain.control.rules import signs as rules
from retrain.control.rules.signs import MismatchTrend
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunEntry, read_run
from retrain.results.report.gather import gather
from tests.trainer.test_trainer import SMALL, train

SAMPLED = np.log([0.5, 0.4, 0.2, 0.1])
NOW = np.log([0.5, 0.8, 0.8, 0.05])  # ratios 1, 2, 4 and 0.5; 2 for the first rollout, 2 for the second
ADVANTAGES = np.array([1.0, -1.0, 1.0, 1.0])
ROLLOUT = np.array([0, 0, 1, 1])
REINFORCE = registry.find_plugin("losses", "importance_sampling")


def data() -> TokenData:
    return TokenData(SAMPLED, ADVANTAGES, np.ones(4), np.ones(4), ROLLOUT, np.full(4, -1))


def test_the_mismatch_is_measured_over_all_micro_batches() -> None:
    _, totals = data().evaluate(Loss("", REINFORCE), NOW, np.zeros(4), None, Optimization(0.1))
    found = Totals.sum([totals, totals]).stats(1.0, None, Optimization(0.1)).mismatch
    assert found is not None
    assert found.mean == pytest.approx(np.log([1, 2, 4, 2]).mean())
    assert found.max == pytest.approx(np.log(4))
    assert found.kl == pytest.approx(np.mean([r - 1 - np.log(r) for r in (1, 2, 4, 0.5)]))


@pytest.mark.parametrize(
    ("cap", "ratios"),
    [
        (RatioCap(3.0), [1, 2, 3, 0.5]),
        (RatioCap(1.0), [1, 1, 1, 0.5]),
        (RatioCap(3.0, mode="mask"), [1, 2, 0, 0.5]),
        (RatioCap(1.5, "sequence"), [0.75, 1.5, 3, 0.375]),  # both rollouts have a ratio of 2
        (RatioCap(1.5, "sequence", "mask"), [0, 0, 0, 0]),
    ],
)
def test_ratios_above_the_cap_are_truncated_or_masked(cap: RatioCap, ratios: list[float]) -> None:
    terms = cap.limit(REINFORCE)(NOW, SAMPLED, ADVANTAGES, ROLLOUT)
    assert terms.slope == pytest.approx(-np.array(ratios) * ADVANTAGES)
    plain = REINFORCE(NOW, SAMPLED, ADVANTAGES, ROLLOUT)
    assert np.array_equal(terms.clipped, ~np.isclose(terms.slope, plain.slope))


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_cap_that_nothing_exceeds_changes_no_loss(name: str) -> None:
    evaluate = registry.find_plugin("losses", name)
    plain, capped = (f(NOW, SAMPLED, ADVANTAGES, ROLLOUT) for f in (evaluate, RatioCap(5.0).limit(evaluate)))
    assert np.array_equal(plain.slope, capped.slope)
    assert np.array_equal(plain.value, capped.value)


@pytest.mark.parametrize("name", ["importance_sampling", "cispo"])
def test_a_run_records_its_mismatch_and_may_cap_ratios(tmp_path: Path, name: str) -> None:
    capped = {"loss_mode": name, "ratio_cap": 1.0, "ratio_cap_mode": "mask"}
    raw = {**SMALL, "algorithm": capped, "reward": {"reward": "partial"}}
    rows = [row for row in read_metrics(train(tmp_path / "r", raw).directory) if "mismatch_kl" in row]
    assert rows
    assert all(0 <= row["mismatch_kl"] < 1e-3 and row["mismatch_max"] < 0.1 for row in rows)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("ratio_cap = 0.5", r"ratio_cap: got 0\.5; needs 0 \(no limit\) or at least 1"),
        ('ratio_cap = 2.0\nloss_mode = "gspo"', r"ratio_cap_scope: .*one ratio per rollout"),
        ('ratio_cap_scope = "turn"', "ratio_cap_scope"),
    ],
)
def test_caps_that_make_no_sense_are_refused(tmp_path: Path, keys: str, said: str) -> None:
    (tmp_path / "c.toml").write_text(f"[algorithm]\n{keys}\n")
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "c.toml")


def test_a_mismatch_that_grows_steadily_is_warned_of_once_per_multiple() -> None:
    trend = MismatchTrend()
    said = [(step, trend.observe(1e-3 * 1.05**step, step + 1)) for step in range(200)]
    warned = [step for step, text in said if text]
    assert warned[:3] == [39, 69, 99]
    told = "mismatch_kl rose steadily from 0.0013 to 0.0054 nats per token in 40 steps, up to step 40"
    assert said[39][1] == told


@given(st.integers(0, 2**32 - 1))
def test_a_mismatch_that_varies_by_a_tenth_is_not_warned_of(seed: int) -> None:
    random, trend = np.random.default_rng(seed), MismatchTrend()
    assert not any(trend.observe(0.01 * random.lognormal(0, 0.1), step) for step in range(300))


def test_of_mismatches_that_vary_by_a_factor_of_two_few_are_warned_of() -> None:
    random, trends = np.random.default_rng(0), [MismatchTrend() for _ in range(40)]
    for step in range(500):
        for trend in trends:
            trend.observe(0.01 * random.lognormal(0, 0.7), step)
    assert sum(bool(trend.rise) for trend in trends) <= 5


def test_noise_that_is_alike_from_step_to_step_is_rarely_named() -> None:
    """At most 5 % of runs of 500 steps."""
    runs = [signs.noise(np.random.default_rng(run), 0.9, 0.7) for run in range(100)]
    assert sum(map(signs.is_mismatch_named, runs)) <= 5


@pytest.mark.parametrize("deviation", [0.1, 0.5])
def test_a_rise_to_ten_times_in_200_steps_is_found_in_such_noise(deviation: float) -> None:
    rise = np.log(1 + 9 * np.clip((signs.STEP - 150) / 200, 0, 1))
    runs = [rise + signs.noise(np.random.default_rng(run), 0.9, deviation) for run in range(40)]
    assert sum(map(signs.is_mismatch_named, runs)) >= 38


def test_a_trend_survives_json_and_goes_on_alike() -> None:
    trend = MismatchTrend()
    for step in range(90):
        copy = MismatchTrend(**json.loads(json.dumps(asdict(trend))))
        assert copy.observe(1e-3 * 1.05**step, step) == trend.observe(1e-3 * 1.05**step, step)
        assert copy.rise == trend.rise


def test_status_and_report_go_on_telling_the_last_steady_rise_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after steps that trained on nothing."""
    every = {"WINDOW": 1, "RISES": 0, "SPANS": {1: 0.0}, "FACTOR": 1.0, "NOTABLE": 0.0}
    for name, value in every.items():
        monkeypatch.setattr(rules, name, value)  # whatever there is counts as a rise
    files = train(tmp_path / "r", {**SMALL, "reward": {"reward": "partial"}})
    rows = read_metrics(files.directory)
    last = max(row["step"] for row in rows if "mismatch_kl" in row)
    row = read_run(RunEntry("r", "a", 0, len(rows)), files).row
    assert row.mismatch_rise.endswith(f"up to step {last}")
    assert [str(line) for line in warnings([row])] == [f"r: {row.mismatch_rise}"]
    assert gather(files.directory).problems == (f"{rows[0]['run']}: {row.mismatch_rise}",)
