"""Several optimizer steps on one batch: what each is given, what the row says, and that a run resumes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling, UpdateStats
from retrain.backends.metering import Work
from retrain.backends.numpy import NumpyOptions
from retrain.backends.numpy.policy import NumpyBackend
from retrain.base.errors import BackendMemoryError, ConfigError, InfrastructureError
from retrain.base.rollouts import Group, Loss, Prompt, TrainingSample
from retrain.config.load import parse
from retrain.config.schema import Config, TrainingSection
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.wall_time import learned_for
from retrain.plugins.losses import ppo
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from retrain.trainer.batch import BoundAlgorithm, ScoredBatch
from retrain.trainer.control import Control, StepSize
from retrain.trainer.updates import Updates, combined, minibatches_of
from tests.backends.test_numpy_backend import ALPHABET, PROMPTS, SAMPLING, policy, samples_of
from tests.clocks import without_times
from tests.explained import SMOKE, plan_of
from tests.recorded import record_campaign
from tests.trainer.test_trainer import make_run, train, with_

PPO = Loss("ppo", ppo.evaluate)
SEVERAL = with_("training", batch_size=4, updates_per_batch=2, minibatches=3)


def batch(groups: int = 6) -> list[TrainingSample]:
    return samples_of(policy().sample(PROMPTS * (groups // 3), SAMPLING))


def test_a_pass_trains_on_every_group_once_and_whole() -> None:
    samples = batch(6)
    parts = minibatches_of(samples, 4, [1, 2, 3])
    assert sorted(len({s.group for s in part}) for part in parts) == [1, 1, 2, 2]
    groups = [{s.group for s in part} for part in parts]
    assert sum(map(len, groups)) == len(set.union(*groups)) == 6
    assert sorted(id(s.rollout) for part in parts for s in part) == sorted(id(s.rollout) for s in samples)


def test_the_mean_of_the_minibatches_losses_is_that_of_the_batch() -> None:
    samples = [replace(s, entropy_weight=0.3) for s in batch(6)]
    parts = minibatches_of(samples, 4, [1, 2, 3])
    for weight in ("token_weight", "bonus_weight"):
        means = sum(getattr(s, weight) * s.advantages.sum() for part in parts for s in part) / len(parts)
        assert means == pytest.approx(sum(getattr(s, weight) * s.advantages.sum() for s in samples))


@pytest.mark.parametrize("unit", ["token", "sequence", "constant"])
def test_a_minibatch_is_weighed_as_trl_weighs_one_of_its_steps_per_generation(unit: str) -> None:
    """TRL 1.16 divides by the generated tokens over the steps (`dapo`), or by a step's rollouts."""
    groups = policy().sample(PROMPTS * 2, SAMPLING)
    batch = ScoredBatch(groups, np.tile([1.0, 0.0, 0.0, 0.5], (6, 1)))
    raw = {"training": {"max_tokens": 9}, "algorithm": {"loss_normalization": unit}}
    algorithm = BoundAlgorithm(parse(raw, "c"), lambda groups, step: batch)
    samples = algorithm.transform(batch, algorithm.estimate(batch), 0.0)
    steps, generated = 3, sum(len(rollout.tokens) for rollout in batch.rollouts)
    for part in minibatches_of(samples, steps, [7]):
        assert len(part) == 2 * 4
        for sample in part:
            length = len(sample.rollout.tokens)
            weights = {"token": steps / generated, "sequence": 1 / (8 * length), "constant": 1 / (8 * 9)}
            assert sample.token_weight == pytest.approx(weights[unit])


def test_passes_have_orders_of_their_own_that_a_seed_repeats() -> None:
    samples = batch(6)

    def order(*seed: int) -> list[int]:
        return [s.group for part in minibatches_of(samples, 3, seed) for s in part]

    assert order(1, 1) == order(1, 1)
    assert len({tuple(order(1, number)) for number in range(5)}) > 1


def test_one_minibatch_is_the_batch_itself() -> None:
    samples = batch(3)
    assert minibatches_of(samples, 1, [0]) == [samples]
    alone = [s for s in samples if s.group == 2]
    assert minibatches_of(alone, 4, [0]) == [alone]  # with its weights: the other groups tied


class Recorder(NumpyBackend):
    """A backend that keeps what its updates were given; some of them do not fit in memory."""

    def __init__(self, too_large: dict[int, int] | None = None) -> None:
        super().__init__(BackendSpec(seed=0, alphabet=ALPHABET), NumpyOptions(hidden=16))  # as `policy()`
        self.calls: list[tuple[Sequence[TrainingSample], Optimization]] = []
        self._least_parts = too_large or {}  # by number of the update

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        if optimization.micro_batches < self._least_parts.get(len(self.calls), 1):
            raise BackendMemoryError("too large")
        self.calls.append((samples, optimization))
        return super().update(samples, loss, optimization)


def taken(backend: NumpyBackend, samples: Sequence[TrainingSample], **training: int) -> UpdateStats:
    config = Config(
        training=TrainingSection(seed=3, batch_size=6, group_size=4, temperature=1.0, lr=0.05, **training)
    )
    size = replace(Control(config, 100).next_size(None), wants_moments=True)
    return Updates(config, backend, PPO).take(samples, size, 1)


def test_each_pass_takes_a_step_on_every_minibatch() -> None:
    backend, samples = Recorder(), batch(6)
    taken(backend, samples, updates_per_batch=2, minibatches=3)
    assert [len({s.group for s in part}) for part, _ in backend.calls] == [2] * 6
    for number in (0, 3):
        seen = [s.group for part, _ in backend.calls[number : number + 3] for s in part]
        assert sorted(set(seen)) == list(range(6))
    assert [how.is_last for _, how in backend.calls] == [False] * 5 + [True]
    assert [how.wants_moments for _, how in backend.calls] == [True] + [False] * 5


def test_the_clip_of_ppo_cuts_only_once_the_policy_has_moved() -> None:
    samples = batch(6)
    once, often = taken(policy(), samples), taken(policy(), samples, updates_per_batch=6)
    assert once.clip_fraction == 0.0
    assert once.approx_kl == pytest.approx(0.0, abs=1e-6)
    assert often.clip_fraction > 0.05
    assert often.approx_kl is not None
    assert often.approx_kl > 0.005


def test_a_later_step_that_does_not_fit_is_taken_in_smaller_parts() -> None:
    backend, samples = Recorder({1: 3}), batch(6)
    taken(backend, samples, updates_per_batch=3)
    assert [how.micro_batches for _, how in backend.calls] == [1, 4, 1]


@pytest.mark.parametrize(("number", "error"), [(0, BackendMemoryError), (1, InfrastructureError)])
def test_only_a_first_step_that_does_not_fit_lets_the_batch_be_sampled_again(
    number: int, error: type[Exception]
) -> None:
    with pytest.raises(InfrastructureError) as raised:
        taken(Recorder({number: 99}), batch(6), updates_per_batch=2)
    assert type(raised.value) is error


def test_statistics_of_updates_are_means_over_their_tokens() -> None:
    first = UpdateStats(1.0, 2.0, 3.0, 0.0, approx_kl=0.0, memory_fraction=0.5, work=Work(1, 2.0, 3.0, 4.0))
    second = replace(first, loss=2.0, grad_norm=4.0, clip_fraction=0.4, approx_kl=0.8, memory_fraction=0.7)
    found = combined([first, second], [30, 10])
    assert (found.loss, found.grad_norm) == (1.5, 3.0)
    assert (found.entropy, found.clip_fraction, found.approx_kl) == pytest.approx((3.0, 0.1, 0.2))
    assert (found.memory_fraction, found.work) == (0.7, Work(2, 4.0, 6.0, 8.0))
    assert combined([first, replace(second, approx_kl=None)], [1, 1]).approx_kl is None


def test_a_step_is_a_batch_however_many_updates_it_takes(tmp_path: Path) -> None:
    raw = {**SEVERAL, "algorithm": {"kl_coef": 0.01}}  # groups that tie are trained on as well
    raw["training"] = {**raw["training"], "lr_schedule": "linear"}
    rows = read_metrics(train(tmp_path / "several", raw).directory)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert {row["updates"] for row in rows} == {6}
    assert max(row["approx_kl"] for row in rows) > 0
    assert all(row["update_entropy"] > 0 for row in rows)
    lr = raw["training"]["lr"]
    assert [row["lr"] for row in rows] == pytest.approx([lr * (6 - done) / 6 for done in range(6)])


def test_a_step_without_signal_takes_no_update(tmp_path: Path) -> None:
    constant = {**SEVERAL, "reward": {"reward": "tests.plugins.always_right"}}
    rows = read_metrics(train(tmp_path / "r", constant).directory)
    assert {(row["updates"], row["loss"], row["clip_fraction"]) for row in rows} == {(0, 0.0, 0.0)}


def test_a_reward_of_trls_signature_learns_how_many_batches_were_trained_on(tmp_path: Path) -> None:
    raw = {**SEVERAL, "reward": {"reward": "tests.reward_functions.late_as_in_trl"}}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert [int(6 * row["mean_reward"]) for row in rows] == [0, 1, 2, 3, 4, 5]  # below 0.11 by tokens


class Dying(NumpyBackend):
    """Fails once, in the middle of a batch."""

    updates = 0
    flag: Path

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        self.updates += 1
        if self.updates == 21 and not self.flag.exists():
            self.flag.touch()
            raise InfrastructureError("the machine was lost")
        return super().update(samples, loss, optimization)


def connect_dying(spec: BackendSpec, *, flag: str) -> NumpyBackend:
    backend = Dying(spec, NumpyOptions())
    backend.flag = Path(flag)
    return backend


def test_a_run_that_ends_between_two_updates_of_a_batch_resumes_to_the_same_rows(tmp_path: Path) -> None:
    raw = {**SEVERAL, "algorithm": {"kl_coef": 0.01}}
    rows = read_metrics(train(tmp_path / "whole", raw).directory)
    raw |= {"backend": {"backend": f"{__name__}.connect_dying", "options": {"flag": str(tmp_path / "flag")}}}
    files = make_run(tmp_path / "broken", raw)
    assert worker.run(files.directory, threading.Event()) == 75
    assert len(read_metrics(files.directory)) == 3  # the fourth batch was under way
    assert worker.run(files.directory, threading.Event()) == 0
    assert without_times(read_metrics(files.directory)) == without_times(rows)


def test_staleness_and_pace_count_batches(tmp_path: Path) -> None:
    limits = {"max_staleness": 1, "rate_limit_speed_batch_per_sim": 1, "nb_time_steps": 4}
    rows = read_metrics(train(tmp_path / "r", {**SEVERAL, "rate_limiter": limits}).directory)
    assert max(row["rate_sample_age_max"] for row in rows) <= 1
    assert [row["rate_batches"] for row in rows] == [1, 2, 3, 4, 5, 6]


def sized(**tables: dict[str, object]) -> StepSize:
    training = {"batch_size": 8, "minibatches": 2, "updates_per_batch": 3, **tables.pop("training", {})}
    return Control(parse({"training": training, **tables}, "c"), 100).next_size(None)


def test_micro_batches_are_parts_of_a_minibatch() -> None:
    pressed = {"enabled": True, "control": "microbatch"}
    assert (sized(backpressure=pressed).at_a_time, sized(backpressure=pressed).parts) == (8, 1)
    assert sized(scaling={"rule": "adascale"}).parts == 4
    assert sized(scaling={"rule": "adascale"}, training={"minibatches": 4}).parts == 2


def test_learning_rate_rules_count_batches() -> None:
    many, one = sized(scaling={"rule": "legw"}), sized(scaling={"rule": "legw"}, training={"minibatches": 1})
    assert (many.scaling.gain, many.lr_factor) == (one.scaling.gain, one.lr_factor)


def test_more_minibatches_than_prompts_are_refused() -> None:
    with pytest.raises(ConfigError, match="minibatches: got 9; needs at most batch_size = 8"):
        sized(training={"minibatches": 9})


def test_a_forecast_knows_that_more_passes_train_longer(tmp_path: Path) -> None:
    once = plan_of(tmp_path, training=SMOKE)
    fields = {"sample_time_s": 6.0, "train_time_s": 4.0}
    record_campaign(once, "c-20250131T120000Z-0a1b", closing_s=0.0, **fields)
    history = learn(tmp_path)

    def step_s(passes: int) -> float:
        plan = plan_of(tmp_path, training={**SMOKE, "updates_per_batch": passes})
        found = learned_for(plan, history, cores=64.0)
        assert found is not None
        return found.conditions["a"].mean_step_time_s

    assert step_s(3) == pytest.approx(step_s(1) * (0.6 + 3 * 0.4))


class Blind(NumpyBackend):
    """Samples as a server does that tells log-probabilities only."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        groups = super().sample(prompts, sampling)
        untold = {"mean_entropy": float("nan")}
        return [replace(g, rollouts=tuple(replace(r, **untold) for r in g.rollouts)) for g in groups]


def connect_blind(spec: BackendSpec) -> NumpyBackend:
    return Blind(spec, NumpyOptions())


def test_the_entropy_is_null_if_neither_sampler_nor_update_tells_it(tmp_path: Path) -> None:
    raw = {**with_("training", max_steps=20, batch_size=1, group_size=2), "reward": {"reward": "partial"}}
    raw["backend"] = {"backend": f"{__name__}.connect_blind"}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert {(row["updates"], row["entropy"] is None) for row in rows} == {(0, True), (1, False)}
