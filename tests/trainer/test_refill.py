"""Groups that teach nothing are replaced by further ones, and all that was sampled is told."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from contextlib import closing, nullcontext
from itertools import count
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from retrain.base.errors import ConfigError, UnscoredStepError
from retrain.base.rollouts import Group, Prompt
from retrain.config.load import parse
from retrain.config.schema import DataSection
from retrain.plan.estimate.history import Refilling, read_run_times
from retrain.records.metrics import read_metrics
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.refill import AtOnce, InTurn, Refill
from tests.trainer.test_async_source import BOUND_S, sampled
from tests.trainer.test_trainer import SMALL, train

STEPS = {"training": {**SMALL["training"], "max_steps": 6, "save_every": 0}}


def rows(tmp_path: Path, **data: object) -> list[dict]:
    raw = {**SMALL, **STEPS, "data": {**SMALL.get("data", {}), **data}}
    return read_metrics(train(tmp_path / "r", raw).directory)


def test_a_refill_samples_further_groups_for_tied_ones(tmp_path: Path) -> None:
    for row in rows(tmp_path, refill="tied"):
        assert row["refill_sampled"] == row["refill_dropped"] <= 3 * row["batch_size"]
        assert row["refill_kept"] <= min(row["refill_sampled"], row["batch_size"])
        sampled = row["batch_size"] + row["refill_sampled"]
        with_signal = round((1 - row["zero_signal_group_fraction"]) * sampled)
        is_exhausted = row["refill_sampled"] == 3 * row["batch_size"]
        assert with_signal == row["batch_size"] or is_exhausted


def test_without_a_refill_rows_tell_nothing_of_one(tmp_path: Path) -> None:
    assert not [key for row in rows(tmp_path) for key in row if key.startswith(("refill_", "curriculum_"))]


def test_a_pool_is_compared_with_what_was_seen(tmp_path: Path) -> None:
    for row in rows(tmp_path, curriculum="pool", refill="tied"):
        assert 0 <= row["curriculum_seen"] <= 1
        bins = {key: value for key, value in row.items() if key.startswith("curriculum_prompts_")}
        assert sum(bins.values()) == row["batch_size"] + row["refill_sampled"]
        solved = [row[key.replace("prompts", "solved")] * n for key, n in bins.items()]
        assert np.sum(solved) == pytest.approx(row["curriculum_seen"] * sum(bins.values()))


class Scripted:
    """Scores groups by their prompts: the first `ties` of them tie."""

    def __init__(self, ties: int, right: list[float] | None = None) -> None:
        self.ties, self.right = ties, right

    def __call__(self, groups: list[Group], step: int, *, is_part: bool = False) -> ScoredBatch:
        rewards = [[1.0, 1.0] if group.prompt.id < self.ties else [0.25, 0.5] for group in groups]
        right = None if self.right is None else np.array([self.right] * len(groups))
        return ScoredBatch(groups, np.array(rewards), right=right)


class Timeless:
    """A meter without a clock."""

    def part(self, name: str) -> nullcontext[None]:
        return nullcontext()


def filled(sampling: InTurn | AtOnce, ties: int, count: int = 4, **table: object) -> tuple[Refill, list[int]]:
    refill = Refill(DataSection(**{"refill": "tied", **table}), Scripted(ties), Timeless())
    return refill, [group.prompt.id for group in refill.fill(sampling, count, 0)]


def in_order() -> InTurn:
    numbers = count()
    return InTurn(lambda size, shares: [group_of(next(numbers)) for _ in range(size)])


def group_of(number: int) -> Group:
    return sampled([Prompt(number, str(number), "")])[0]


@pytest.mark.parametrize(
    ("ties", "most", "trained_on"),
    [
        (0, 3, [0, 1, 2, 3]),
        (2, 3, [2, 3, 4, 5]),
        (5, 3, [5, 6, 7, 8]),
        (14, 3, [0, 1, 14, 15]),  # 16 at most, filled up with the first that tie
        (99, 3, [0, 1, 2, 3]),
        (6, 1, [0, 1, 6, 7]),
    ],
)
def test_groups_that_differ_are_trained_on_first(ties: int, most: int, trained_on: list[int]) -> None:
    refill, numbers = filled(in_order(), ties, refill_most=most)
    assert numbers == trained_on
    batch = refill.score([], 0)
    assert len(batch.everything.groups) == min(4 * (1 + most), 4 + ties)
    assert batch.everything.rewards.shape == (len(batch.everything.groups), 2)


def test_by_outcome_shaped_rewards_do_not_count() -> None:
    for right, further in (([0.0, 0.0], 12), ([1.0, 0.0], 0), ([1.0, math.nan], 12)):
        refill = Refill(DataSection(refill="outcome"), Scripted(0, right), Timeless())
        refill.fill(in_order(), 4, 0)
        assert len(refill.score([], 0).everything.groups) == 4 + further


def test_without_a_notion_of_right_an_outcome_is_a_tie() -> None:
    assert filled(in_order(), 2, refill="outcome")[1] == [2, 3, 4, 5]


def test_a_group_that_ties_in_its_reward_alone_teaches_where_parts_make_advantages() -> None:
    def score(groups: list[Group], step: int, **how: bool) -> ScoredBatch:
        part = np.array([[0.0, 1.0] if group.prompt.id % 2 else [0.5, 0.5] for group in groups])
        rewards = np.ones_like(part)
        return ScoredBatch(groups, rewards, parts={"right": part, "short": 1.0 - part, "unweighed": part})

    for parts, trained_on, without_signal in (
        (["right", "short"], [1, 3, 5, 7], 4 / 8),
        ([], [0, 1, 2, 3], 1.0),
    ):
        refill = Refill(DataSection(refill="tied"), score, Timeless(), parts)
        assert [group.prompt.id for group in refill.fill(in_order(), 4, 0)] == trained_on
        batch = refill.score([], 0)
        advantages = 1.0 * np.repeat(batch.untied[:, None], 2, axis=1)
        summary = batch.summary(advantages, step_time_s=1.0)
        assert summary.zero_signal_group_fraction == pytest.approx(without_signal)


def test_nothing_that_teaches_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    refill, _ = filled(in_order(), 99)
    refill.fill(in_order(), 4, 1)
    assert [record.getMessage().partition(" teaches")[0] for record in caplog.records] == [
        "step 1: none of 16 groups"
    ]


def test_further_groups_begin_while_slow_ones_finish() -> None:
    """The first prompt ends once one was begun in place of the second, which ties at once."""
    numbers, has_further = count(), threading.Event()

    def begin():
        number = next(numbers)
        if number == 4:
            has_further.set()

        def sample() -> Group:
            assert number or has_further.wait(BOUND_S)
            return group_of(number + 1)

        return sample

    with closing(AtOnce(lambda size, shares: [begin() for _ in range(size)], 4)) as sampling:
        refill, trained_on = filled(sampling, ties=3)  # numbers 0 and 1 tie, as prompts 1 and 2
    assert trained_on == [3, 4, 5, 6]
    assert [group.prompt.id for group in refill.score([], 0).everything.groups] == [1, 2, 3, 4, 5, 6]


def test_a_further_group_that_cannot_be_scored_costs_no_step() -> None:
    outage = UnscoredStepError("the judge is away")
    answers = iter([[[0.0, 1.0]] * 3 + [[1.0, 1.0]], *[[[math.nan] * 2]] * 12, [[math.nan] * 2] * 4])

    def score(groups: list[Group], step: int, *, is_part: bool = False) -> ScoredBatch:
        rewards = np.array(next(answers))
        return ScoredBatch(groups, rewards, failure=outage if np.isnan(rewards).all() else None)

    refill = Refill(DataSection(refill="tied", refill_most=3), score, Timeless())
    assert [group.prompt.id for group in refill.fill(in_order(), 4, 0)] == [0, 1, 2, 3]
    nothing = Refill(DataSection(refill="tied", refill_most=0), score, Timeless())
    with pytest.raises(UnscoredStepError, match="judge is away"):
        nothing.fill(in_order(), 4, 0)


def test_rows_of_a_step_tell_all_that_was_sampled(tmp_path: Path) -> None:
    files = train(tmp_path / "r", {**SMALL, **STEPS, "data": {**SMALL["data"], "refill": "tied"}})
    for row in read_metrics(files.directory):
        groups = row["batch_size"] + row["refill_sampled"]
        assert row["tokens_per_step"] <= groups * row["group_size"] * 4
        assert row["mean_reward"] * groups * row["group_size"] == pytest.approx(
            round(row["mean_reward"] * groups * row["group_size"])
        )


def test_a_forecast_knows_what_a_refill_samples(tmp_path: Path) -> None:
    times = read_run_times(train(tmp_path / "r", {**SMALL, **STEPS}).directory)
    assert times is not None
    assert times.refilling is not None
    assert times.refilling.batches == 1
    refilled = times.refilled_with(3)
    ratio = times.refilling.batches_with(3)
    assert 1 < ratio <= 4
    assert refilled.step_times_s[0] / times.step_times_s[0] == pytest.approx(
        1
        + (ratio - 1)
        * (times.parts.sampling_s + times.parts.scoring_s)
        / (times.parts.sampling_s + times.parts.scoring_s + times.parts.training_s)
    )
    assert times.refilled_with(0) is times
    assert Refilling(3, 2.5, (0.5, 0.75, 1.0)).batches_with(3) == pytest.approx((2 + 4 + 4) / 3)


def test_a_forecast_of_cost_counts_what_a_refill_samples(tmp_path: Path) -> None:
    prices = {"budget": {"prices": {"numpy": {"sample": 1.0}}}}
    times = read_run_times(train(tmp_path / "r", {**SMALL, **STEPS, **prices}).directory)
    assert times is not None
    assert times.refilling is not None
    ratio, before = times.refilling.batches_with(3), times.billed
    after = times.refilled_with(3).billed
    assert ratio > 1
    for step, refilled in zip(before.steps, after.steps, strict=True):
        for kind in ("prefill", "cached", "sample"):
            assert getattr(refilled, kind) == round(ratio * getattr(step, kind))
        assert refilled.train == step.train
    assert before.rest is not None
    assert after.rest is not None
    assert after.rest.train == before.rest.train
    assert after.rest.sample == pytest.approx(ratio * before.rest.sample, rel=0.2)  # a batch too many or few


def test_what_a_reward_says_against_a_refill_is_told(
    retrain: Callable[..., CompletedProcess[str]], campaign_file: Path, here: Path
) -> None:
    (here / "shaped.py").write_text("def score(completion, prompt): return float(len(completion))\n")
    for refill, reward, note in (
        ("tied", "weighted", 'data.refill = "outcome" replaces them'),
        ("outcome", "shaped.score", "does not say which completions are right"),
        ("outcome", "match", ""),
        ("none", "weighted", ""),
    ):
        params = "params.parts = {match = 1.0, partial = 0.5}" if reward == "weighted" else ""
        table = f'refill = "{refill}"\n[reward]\nreward = "{reward}"\n{params}\n'
        file = here / "refill.toml"
        file.write_text(
            campaign_file.read_text().replace('task = "successor"', f'task = "successor"\n{table}')
        )
        said = retrain("explain", file)
        assert said.returncode == 0, said.stderr
        notes = [line for line in said.stdout.splitlines() if "data.refill" in line]
        assert len(notes) == bool(note)
        assert note in "".join(notes)


def test_a_buffer_that_reads_groups_again_has_no_refill() -> None:
    limiter = {"max_staleness": 1, "buffer": "reservoir"}
    for refill in ("tied", "outcome"):
        with pytest.raises(ConfigError, match=r"\[data\]\.refill: got .* reads dropped groups again"):
            parse({"data": {"refill": refill}, "rate_limiter": limiter}, "c.toml")
    parse({"data": {"refill": "tied"}, "rate_limiter": {**limiter, "buffer": "fifo"}}, "c.toml")
