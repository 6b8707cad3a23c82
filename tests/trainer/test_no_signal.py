"""Steps from which nothing can be learned: told in words, on every way out of a run."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from retrain.base.rollouts import Prompt
from retrain.cli.render.status import warnings
from retrain.control.rules.signs import SignalWatch
from retrain.records.metrics import read_metrics
from retrain.records.run_row import NAME_LIMIT, RunEntry, RunRow, read_run
from retrain.records.step_row import RolloutSummary
from retrain.results.report.gather import gather
from retrain.trainer import worker
from tests.clocks import without_times
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import make_run, train, with_

STEPS = 14
LONG = with_("training", max_steps=STEPS)
HOPELESS = {**LONG, "reward": {"reward": f"{__name__}.never"}}
TOLD = "no learning signal in steps 1 to {step}, with a mean reward of 0: no completion has a reward of 1"
TIED = RolloutSummary(
    batch_size=2,
    group_size=4,
    mean_reward=0.25,
    reward_std=0.0,
    correct_rate=0.0,
    zero_signal_group_fraction=1.0,
    max_token_hit_rate=0.0,
    length_p50=3.0,
    length_p95=3.0,
    length_max=3,
    tokens_per_step=24,
    tokens_per_second=24.0,
    reward_error_fraction=0.0,
    reward_timeout_fraction=0.0,
    reward_faults=0,
    reward_over_limits=0,
    sandbox=None,
)


def never(completion: str, prompt: Prompt) -> float:
    return 0.0


def observed(steps: int, rollouts: RolloutSummary = TIED, start: int = 0, entropy: float | None = 1.0) -> str:
    """What is told after so many steps alike, from the step after `start` on."""
    watch = SignalWatch()
    return [
        watch.observe(start + step, rollouts, trained=False, entropy=entropy) for step in range(1, steps + 1)
    ][-1]


def test_a_run_whose_completions_all_fail_is_named_with_what_to_do(tmp_path: Path) -> None:
    files = train(tmp_path / "r", HOPELESS)
    rows = read_metrics(files.directory)
    assert [row.get("no_signal", "").partition(";")[0] for row in rows] == [
        TOLD.format(step=step) if step >= 10 else "" for step in range(1, STEPS + 1)
    ]
    assert {row["updates"] for row in rows} == {0}
    row = read_run(RunEntry("r", "a", 0, STEPS), files).row
    assert row.no_signal.startswith(TOLD.format(step=STEPS))
    assert [str(line) for line in warnings([row])] == [f"r: {row.no_signal}"]
    assert gather(files.directory).problems == (f"{rows[0]['run']}: {row.no_signal}",)


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    whole, broken = train(tmp_path / "whole", HOPELESS), make_run(tmp_path / "broken", HOPELESS)
    assert worker.run(broken.directory, StopAfterStep(broken, step=6)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert without_times(read_metrics(broken.directory)) == without_times(read_metrics(whole.directory))


def test_a_run_that_learns_is_not_named(tmp_path: Path) -> None:
    rows = read_metrics(train(tmp_path / "r", {**LONG, "reward": {"reward": "partial"}}).directory)
    assert not any("no_signal" in row for row in rows)


@pytest.mark.parametrize(
    ("start", "changed", "entropy", "said"),
    [
        (0, {"correct_rate": 1.0}, 1.0, "every completion has a reward of 1; use harder prompts"),
        (0, {"max_token_hit_rate": 1.0}, 0.0, "100% of completions were cut off; raise"),
        (5, {"max_token_hit_rate": 0.9}, 1.0, "90% .* were cut off; .* or lower"),
        (5, {"max_token_hit_rate": 1.0}, 0.001, r"hardly differ \(entropy 0\.001 nats per token\); lower"),
        (0, {}, None, "no completion has a reward of 1; read `retrain samples`"),
        (5, {}, None, "no completion has a reward of 1; .* easier prompts or a lower"),
        (0, {"correct_rate": 0.5}, 1.0, "prompts are always solved or never"),
    ],
)
def test_the_likely_reason_is_told(
    start: int, changed: dict[str, float], entropy: float | None, said: str
) -> None:
    told = observed(10, replace(TIED, **changed), start, entropy)
    assert told.startswith(
        f"no learning signal in steps {start + 1} to {start + 10}, with a mean reward of 0.25: "
    )
    assert re.search(said, told), told
    assert len(observed(99, replace(TIED, **changed), 10**6 * start, entropy)) <= NAME_LIMIT


def test_nothing_is_told_soon_or_of_a_policy_that_has_learned_its_task() -> None:
    assert not observed(9)
    assert not observed(99, replace(TIED, correct_rate=1.0), start=5)


def test_a_signal_ends_the_count_and_counts_only_if_something_was_trained_on() -> None:
    watch, some = SignalWatch(), replace(TIED, zero_signal_group_fraction=0.5)
    for step in range(1, 31):
        watch = SignalWatch(**json.loads(json.dumps(asdict(watch))))
        told = watch.observe(step, some, trained=step == 15, entropy=None)
        assert bool(told) == (10 <= step < 15 or step >= 25), step


@pytest.mark.parametrize(
    "why",
    [
        "no completion has a reward of 1",
        "{}% of completions were cut off; raise [training].max_tokens",
        "completions hardly differ (entropy 1.{}e-05 nats per token)",
    ],
)
def test_runs_of_a_condition_without_a_signal_are_told_once(why: str) -> None:
    said = "no learning signal in steps 1 to {0}, with a mean reward of 0.{0}: " + why.replace("{}", "{0}")
    rows = [
        RunRow(
            run_id=f"{name}_s{seed}",
            condition=name,
            seed=seed,
            state="done",
            max_steps=99,
            no_signal=said.format(80 + seed),
        )
        for seed in range(12)
        for name in ("a", "b")
    ]
    told = [str(line) for line in warnings(rows)]
    assert len(told) == 2
    assert told[0].startswith("a_s0, a_s1, ")


def test_before_any_update_no_learning_rate_is_blamed():
    told = SignalWatch(steps=9, rewards=0.0).observe(
        10, replace(TIED, correct_rate=0.0, max_token_hit_rate=0.0), trained=False, entropy=0.001
    )
    assert "hardly differ" in told
    assert "lr" not in told
