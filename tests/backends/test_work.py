"""What a phase of a step costs, against arithmetic done by hand."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from retrain.backends import Optimization, Sampling
from retrain.backends.metering import ModelCosts, SamplingWork, Work, WorkMeter
from retrain.base.rollouts import Loss
from retrain.config.schema import BackPressureSection
from retrain.plugins.losses import ppo
from retrain.records.row_parts import columns
from retrain.trainer.step_meter import classify, roofline
from tests.backends.test_numpy_backend import ALPHABET, PROMPTS, policy, samples_of

LLM = ModelCosts(body=1000, head=200, weight_bytes=2, kv_bytes_per_token=8)


def test_prefill_runs_the_body_over_every_prompt_token_and_writes_their_cache():
    work = LLM.prefill([3, 5], passes=1, time_s=0.5)
    assert work == Work(tokens=8, flops=2 * 1000 * 8, bytes_moved=2 * 1000 + 8 * 8, time_s=0.5)


def test_decoding_reads_the_weights_once_per_pass_and_the_cache_as_it_grows():
    work = LLM.decode(np.array([3, 5]), np.array([1, 4]), 2.0)

    body_runs, logits = 3, 5  # of the longer completion's first three tokens; of every token
    cached = (5 + 1) + (5 + 2) + (5 + 3)  # read by its second, third and fourth
    moved = 2 * (3 * 1000 + 4 * 200) + 8 * cached
    assert work == Work(5, 2 * (1000 * body_runs + 200 * logits), moved, 2.0)


@pytest.mark.parametrize(("frozen", "per_weight"), [(False, 6), (True, 4)])
def test_training_takes_two_thirds_of_the_work_where_most_weights_are_frozen(frozen, per_weight):
    costs = ModelCosts(body=1000, head=200, weight_bytes=2, frozen=frozen)
    work = costs.train(tokens=20, drawn=12, passes=3, parts=3)
    assert work == Work(20, per_weight * (1000 * 20 + 200 * 12), 2 * 2 * 3 * 1200, 0.0)


def test_a_reference_runs_forward_once_more():
    alone = ModelCosts(1000, 200, 2).train(20, 12, passes=1)
    beside = ModelCosts(1000, 200, 2).train(20, 12, passes=1, reference=True)
    assert beside.flops - alone.flops == 2 * (1000 * 20 + 200 * 12)
    assert beside.bytes_moved - alone.bytes_moved == 2 * 1200


def test_the_optimizer_passes_seven_times_over_what_it_trains():
    assert ModelCosts(1000, 200, 2, trained_bytes=40).optimize() == Work(bytes_moved=280.0)


def test_a_meter_loses_nothing_to_threads():
    meter, one = WorkMeter(), Work(1, 2.0, 3.0, 4.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: meter.add(one, one), range(400)))
    assert meter.take() == SamplingWork(*[Work(400, 800.0, 1200.0, 1600.0)] * 2)
    assert meter.take() == SamplingWork(Work(), Work())


def test_the_numpy_policy_counts_what_it_ran():
    backend = policy(embedding=4, hidden=16)
    recurrent, output = 16 * 48, 16 * (len(ALPHABET) + 1)

    groups = backend.sample(PROMPTS, Sampling(4, 6, 1.0))
    work = backend.take_sampling_work()

    lengths = [len(rollout.tokens) for group in groups for rollout in group.rollouts]
    characters, longest_prompt = 3 + 0 + 6, 6
    assert work.prefill.tokens == characters
    assert work.prefill.flops == 2 * recurrent * characters
    assert work.prefill.bytes_moved == 4 * recurrent * longest_prompt  # once per position
    assert work.decode.flops == 2 * (recurrent * (sum(lengths) - 12) + output * sum(lengths))
    assert work.decode.bytes_moved == 4 * (recurrent * (max(lengths) - 1) + output * max(lengths))
    assert min(work.prefill.time_s, work.decode.time_s) > 0


def test_an_update_of_the_numpy_policy_runs_each_prompt_of_a_part_once():
    backend = policy(embedding=4, hidden=16)
    samples = samples_of(backend.sample(PROMPTS, Sampling(4, 6, 1.0)))

    work = backend.update(samples, Loss("ppo", ppo.evaluate), Optimization(lr=0.01)).work

    drawn = sum(len(sample.rollout.tokens) for sample in samples)
    run = 9 + drawn - len(samples)  # nine characters of prompts; last tokens lead nowhere
    assert work is not None
    assert (work.tokens, work.flops) == (run, 6 * (16 * 48 * run + 16 * 12 * drawn))
    assert work.time_s > 0


def test_a_policy_that_poses_as_an_api_knows_nothing_of_its_hardware():
    backend = policy(api_latency_s=0.001)
    samples = samples_of(backend.sample(PROMPTS, Sampling(2, 6, 1.0)))
    assert backend.take_sampling_work() == SamplingWork(Work(), Work())
    assert backend.update(samples, Loss("ppo", ppo.evaluate), Optimization(lr=0.01)).work is None


def test_every_phase_gets_its_own_bound_and_utilisations():
    table = BackPressureSection(peak_gflops=100.0, peak_bw_gb_s=10.0)
    prefill = Work(flops=60e9, bytes_moved=1e9, time_s=1.0)  # 60 % of 100 GFLOP/s, 10 % of 10 GB/s
    decode = Work(flops=10e9, bytes_moved=16e9, time_s=2.0)  # 5 % and 80 %
    train = Work(flops=20e9, bytes_moved=2e9, time_s=1.0)  # 20 % and 20 %

    row = columns(roofline(table, SamplingWork(prefill, decode), train))

    assert row == {
        "roofline_prefill": "compute_bound",
        "mfu_prefill": pytest.approx(0.6),
        "mbu_prefill": pytest.approx(0.1),
        "roofline_decode": "memory_bound",
        "mfu_decode": pytest.approx(0.05),
        "mbu_decode": pytest.approx(0.8),
        "roofline_train": "overhead_bound",
        "mfu_train": pytest.approx(0.2),
        "mbu_train": pytest.approx(0.2),
    }


def test_a_phase_without_work_is_unknown_and_its_keys_stay():
    row = columns(roofline(BackPressureSection(peak_gflops=1.0, peak_bw_gb_s=1.0), None, None))
    assert set(row.values()) == {"unknown", None}
    assert len(row) == 9


def test_without_peaks_a_row_says_nothing_of_hardware():
    assert roofline(BackPressureSection(), SamplingWork(Work(), Work()), Work()) is None


@pytest.mark.parametrize(
    ("flops", "moved", "peak_gflops", "bound"),
    [
        (0.9e12, 20e9, 1000.0, "compute_bound"),
        (0.2e12, 80e9, 1000.0, "memory_bound"),
        (0.2e12, 20e9, 1000.0, "overhead_bound"),
        (0.9e12, 80e9, 0.0, "unknown"),
    ],
)
def test_the_larger_share_of_the_roof_names_the_bound(flops, moved, peak_gflops, bound):
    table = BackPressureSection(peak_gflops=peak_gflops, peak_bw_gb_s=100.0)
    assert classify(table, Work(1, flops, moved, 1.0)).bound == bound


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Work(1, 1.0, 1.0, math.nan), "time_s: got nan"),
        (Work(1, -1.0, 1.0, 1.0), "flops: got -1.0"),
        (Work(1, 1.0, math.inf, 1.0), "bytes_moved: got inf"),
    ],
)
def test_impossible_amounts_are_refused_by_name(work, message):
    with pytest.raises(ValueError, match=message):
        classify(BackPressureSection(peak_gflops=1.0), work)
