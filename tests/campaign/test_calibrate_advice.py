"""Advice: the benchmarks made from a file, and what follows from their figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.campaign.calibrate import advice, benchmarks, check_target, schema_line, to_toml
from retrain.campaign.calibrate.advice import Memory
from retrain.campaign.calibrate.benchmarks import (
    BatchFound,
    BenchmarkResult,
    Effort,
    Lengths,
    StepSplit,
    WorkerThroughput,
    worker_throughput,
)
from retrain.campaign.calibrate.conclude import Evidence, crowding_between
from retrain.config.load import parse
from retrain.config.reference import DIRECTIVE
from retrain.config.schema import RateLimiterSection
from retrain.plan.build import plan_runs
from retrain.plan.notes import warnings_of
from retrain.records.layout import RunFiles
from tests.recorded import record_run

TABLES = {
    "training": {"batch_size": 4, "group_size": 4, "max_tokens": 4, "temperature": 1.0, "lr": 5e-3},
    "data": {"task": "successor"},
    "warmup": {"path": "rows.jsonl", "steps": 5},
    "logging": {"log_dir": "logs", "loggers": ["tests.logger_plugins.recording"]},
    "campaign": {
        "name": "study",
        "seeds": [7, 8, 9],
        "max_steps": 100,
        "parallel": True,
        "max_workers": 2,
        "retries": 3,
        "conditions": [{"name": "one", "advantage_mode": "grpo"}, {"name": "two", "advantage_mode": "maxrl"}],
    },
}
LOGS = Path("somewhere")
MAX = "training.max_tokens"
SPEEDING_UP = {1: 600.0, 2: 320.0, 4: 160.0}
CUT = Lengths("one", 100, 0.10, 50, 100, 100, late_hit_fraction=0.10, has_signal=True)
SPLIT = [StepSplit("one", 20, 1.0, 1.0, 0.6, 0.1, 0.3, 0.0)]


def plan_of(backend: Mapping[str, object] | None = None, **campaign: object):
    tables = {**TABLES, "campaign": {**TABLES["campaign"], **campaign}}
    tables |= {"backend": backend} if backend else {}
    return plan_runs(parse({k: v for k, v in tables.items() if k != "warmup"}, "c.toml"), "c.toml")


def workers(*rates: float) -> list[WorkerThroughput]:
    return [WorkerThroughput(1 << n, rate, (1 << n) / rate) for n, rate in enumerate(rates)]


def test_a_pilot_runs_every_condition_for_a_few_steps_elsewhere() -> None:
    benchmark = benchmarks.pilot(TABLES, Effort(seeds=2, steps=25), 2, LOGS)
    assert (benchmark.runs, benchmark.steps) == (4, 25)
    assert benchmark.tables["campaign"]["seeds"] == [7, 8]
    assert (benchmark.tables["campaign"]["max_steps"], benchmark.tables["campaign"]["retries"]) == (25, 0)
    assert benchmark.tables["logging"] == {"log_dir": "somewhere"}
    assert benchmark.tables["warmup"] == {}
    assert "name" not in benchmark.tables["campaign"]
    assert TABLES["campaign"]["max_steps"] == 100  # the user's tables are left alone


def test_workers_are_tried_side_by_side_on_one_condition() -> None:
    benchmark = benchmarks.concurrent(TABLES, 1, 4, 10, LOGS)
    assert benchmark.tables["campaign"]["conditions"] == [{"name": "two"}]
    assert benchmark.tables["algorithm"]["advantage_mode"] == "maxrl"
    assert benchmark.tables["campaign"]["seeds"] == [0, 1, 2, 3]
    assert benchmark.tables["campaign"]["max_workers"] == 4


def test_benchmarks_are_short_whatever_conditions_set_themselves() -> None:
    own = {
        "training": {"max_steps": 5000, "batch_size": 128, "save_every": 1},
        "rate_limiter": {"watermark": 9},
    }
    pressed = {"backpressure": {"enabled": False, "max_batch_size": 256}}
    long = {"name": "long", "advantage_mode": "rloo", **own, **pressed, "warmup": TABLES["warmup"]}
    tables = {**TABLES, "campaign": {**TABLES["campaign"], "conditions": [long, {"name": "two"}]}}
    made = [
        benchmarks.pilot(tables, Effort(), 2, LOGS),
        benchmarks.concurrent(tables, 0, 2, 30, LOGS),
        benchmarks.seeking_batch(tables, 0, 30, LOGS),
        benchmarks.unlimited(tables, 0, 30, LOGS),
    ]
    pilot, beside, batch, unlimited = [
        plan_runs(parse(benchmark.tables, "c.toml")).runs for benchmark in made
    ]
    assert {run.max_steps for runs in (pilot, beside, batch, unlimited) for run in runs} == {30}
    assert {run.config.warmup.steps for run in (*pilot, *beside)} == {0}
    assert {run.config.training.batch_size for run in (*beside, *batch, *unlimited)} == {128}
    assert {run.config.algorithm.advantage_mode for run in beside} == {"rloo"}
    assert beside[0].config.training.save_every == 0
    assert batch[0].config.backpressure.enabled
    assert unlimited[0].config.rate_limiter.watermark == 9


@given(
    configured=st.integers(1, 200),
    cores=st.floats(0.5, 128),
    runs=st.integers(1, 500),
    most=st.integers(1, 64),
)
def test_numbers_of_workers_begin_with_one_and_never_exceed_runs(configured, cores, runs, most) -> None:
    counts = benchmarks.worker_counts(configured, cores, runs, most)
    assert counts == sorted(set(counts))
    assert counts[0] == 1
    assert counts[-1] <= min(runs, most)


def test_completions_that_are_cut_off_ask_for_more_tokens() -> None:
    found = advice.max_tokens(MAX, CUT, SPLIT)
    assert found.value == 200
    assert (
        "up to 20% more tokens, a step up to 12% more time" in found.why
    )  # 0.1 x 100 / 50, of 60 % sampling


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"has_signal": False}, "no completion was rewarded"),
        ({"enough": 12}, "no answer needs more than 12"),
        ({"late_hit_fraction": 0.01}, "only 1.0% in the last third of the steps"),
        ({"longest": 60}, "none had so many tokens: episodes ran out of turns"),
    ],
)
def test_rambling_is_no_cause_for_more_tokens(found: dict, why: str) -> None:
    advised = advice.max_tokens(MAX, replace(CUT, **found), SPLIT)
    assert not advised.is_change
    assert why in advised.why


def test_an_answer_that_does_not_fit_is_a_cause_for_more_tokens() -> None:
    assert advice.max_tokens(MAX, replace(CUT, enough=101), SPLIT).value == 200


def test_a_limit_that_nothing_comes_near_is_lowered_with_room() -> None:
    assert (
        advice.max_tokens(MAX, Lengths("one", 1024, 0.0, 50, 90, 100, 0.0, True), SPLIT).value == 128
    )  # 125, in steps of 64


def test_a_limit_that_fits_stays() -> None:
    assert not advice.max_tokens(MAX, Lengths("one", 128, 0.01, 50, 90, 128, 0.01, True), SPLIT).is_change


def test_the_shortest_campaign_is_advised_with_what_fewer_workers_would_cost() -> None:
    makespans_s = {1: 600.0, 2: 320.0, 3: 300.0, 4: 270.0, 5: 250.0, 6: 251.0, 8: 500.0}
    (found,) = advice.max_workers(plan_of(), workers(100, 190, 195, 120), Memory(0, 0), makespans_s)
    assert (found.now, found.value) == (2, 5)
    assert "with 4 it would take 4 min 30 s, 8% longer" in found.why


def test_the_time_with_the_workers_of_now_is_told_once() -> None:
    (found,) = advice.max_workers(plan_of(), workers(100, 190, 195), Memory(0, 0), {2: 72.0, 3: 67.0})
    assert (found.now, found.value) == (2, 3)
    assert found.why.startswith("the campaign takes 1 min 7 s with 3, 1 min 12 s with 2")
    assert found.why.count("1 min 12 s") == 1


def test_workers_whose_throughput_falls_are_kept_where_fewer_would_end_later() -> None:
    # six runs: four at a time take two waves, six take one, although they do a little less together
    measured = [
        WorkerThroughput(1, 304, 0.22),
        WorkerThroughput(4, 709, 0.41),
        WorkerThroughput(6, 671, 0.61),
    ]
    six = plan_of(max_workers=6)
    (found,) = advice.max_workers(six, measured, Memory(0, 0), {1: 80.0, 4: 50.0, 6: 39.0})
    assert not found.is_change
    assert "with 6 workers a step takes 2.8 times as long: more workers would not help" in found.why


def test_fewer_workers_are_advised_where_all_slow_down_together() -> None:
    six = plan_of(max_workers=6)
    (found,) = advice.max_workers(six, workers(100, 190, 195), Memory(0, 0), {2: 40.0, 4: 41.0, 6: 60.0})
    assert (found.now, found.value) == (6, 2)
    assert "the campaign takes 40 s with 2, 1 min with 6" in found.why


def test_a_forecast_does_not_count_waits_for_permits_twice() -> None:
    waiting = [WorkerThroughput(1, 100, 1.0), WorkerThroughput(4, 200, 2.0, permit_wait_fraction=0.5)]
    assert crowding_between(waiting, 0.0).of(4) == pytest.approx(1.0)  # they waited for permits alone
    busy = [replace(m, permit_wait_fraction=0.0) for m in waiting]
    assert crowding_between(busy, 0.0).of(4) == pytest.approx(2.0)
    assert crowding_between(busy, 0.0).of(8) == pytest.approx(2.0)  # each on a machine of its own
    assert crowding_between(busy, 2.0).of(8) == pytest.approx(4.0)


def test_the_condition_that_is_cut_off_most_decides_for_all() -> None:
    long, cut = replace(CUT, hit_fraction=0.0, p95=120, longest=160), replace(CUT, condition="cut")
    assert advice.worst_of([long, cut]) == replace(cut, p95=120, longest=160)


def test_a_condition_that_only_rambles_does_not_decide_for_one_that_needs_room() -> None:
    rambles = replace(CUT, condition="rambles", hit_fraction=0.9, has_signal=False)
    assert advice.worst_of([rambles, CUT]).condition == "one"


@pytest.mark.parametrize("buffer", ["fifo", "firo"])
def test_a_buffer_that_reads_each_sample_once_keeps_its_pace(buffer: str) -> None:
    limiter = RateLimiterSection(max_staleness=1, buffer=buffer)
    assert not advice.limiter_speed(limiter, 4, 0.95).is_change


def test_a_reservoir_is_given_the_pace_of_an_unlimited_run() -> None:
    limiter = RateLimiterSection(max_staleness=1, buffer="reservoir")
    assert advice.limiter_speed(limiter, 4, 2.5).value == 2.5


def test_a_batch_size_is_not_advised_where_the_law_and_the_steps_disagree() -> None:
    found = BatchFound(("warmup", "retrograde", "optimal"), 22.0, 16, 2, "found")  # 22 rollouts are 5 prompts
    advised = advice.batch_size(4, found, follows=True)
    assert not advised.is_change
    assert "16 concurrent rollouts are not too many: p* = 22" in advised.why


def test_a_smaller_batch_is_advised_without_an_optimum_only_where_memory_ran_out() -> None:
    seen = BatchFound(("warmup", "retrograde"), None, 128, 5, "out of memory at 128")
    assert advice.batch_size(16, seen, follows=False).value == 5
    guessed = advice.batch_size(16, replace(seen, reason="probing 5"), follows=False)
    assert (guessed.is_change, "inconclusive" in guessed.why) == (False, True)


def test_too_many_rollouts_at_a_time_are_said_to_be() -> None:
    advised = advice.batch_size(16, BatchFound(("warmup", "retrograde"), 32.0, 128, 4, ""), follows=False)
    assert advised.value == 4
    assert "128 concurrent rollouts are too many: p* = 32" in advised.why


@pytest.mark.parametrize(("of_four", "is_useless"), [(220.0, False), (150.0, True)])
def test_more_workers_are_said_to_be_useless_only_where_they_are(of_four: float, is_useless: bool) -> None:
    measured = [WorkerThroughput(1, 100, 0.010), WorkerThroughput(2, 150, 0.014)]
    measured.append(WorkerThroughput(4, of_four, 0.020))
    two = plan_of(max_workers=2)
    (advised,) = advice.max_workers(two, measured, Memory(0, 0), {1: 80.0, 2: 50.0})
    assert not advised.is_change
    assert ("more workers would not help" in advised.why) == is_useless


def test_workers_are_not_more_than_memory_holds() -> None:
    (found,) = advice.max_workers(plan_of(), workers(100, 190, 350), Memory(10, 30), SPEEDING_UP)
    assert found.value == 2
    assert "free memory fits 2" in found.why


def test_a_serial_campaign_is_told_to_run_in_parallel() -> None:
    serial = plan_of(parallel=False)
    found = list(advice.max_workers(serial, workers(100, 190), Memory(0, 0), {1: 600.0, 2: 320.0}))
    assert [(a.key, a.value) for a in found] == [("campaign.max_workers", 2), ("campaign.parallel", True)]


def test_the_law_across_workers_is_fitted_to_enough_of_them() -> None:
    def law(p: int) -> float:
        return 100 * p / (1 + 0.05 * (p - 1) + 0.01 * p * (p - 1))

    measured = [WorkerThroughput(n, law(n), n / law(n)) for n in (1, 2, 4, 8, 16)]
    fit = advice.scaling_of(measured)
    assert fit is not None
    assert fit.p_star == pytest.approx((0.95 / 0.01) ** 0.5, rel=1e-3)
    assert advice.scaling_of(measured[:3]) is None


def test_long_waits_for_permits_ask_for_adapting_ones() -> None:
    plan = plan_of(backend={"options": {"api_latency_s": 0.1}})
    (found,) = advice.max_concurrent(plan, 0.5, is_remote=True)
    assert found.value == "auto"
    assert "50% of a step was waiting" in found.why
    assert list(advice.max_concurrent(plan_of(), 0.5, is_remote=False)) == []


def test_a_number_is_advised_where_runs_have_shown_that_no_call_is_reported() -> None:
    plan = plan_of(backend={"max_concurrent": "auto", "options": {"api_latency_s": 0.1}})
    (found,) = advice.max_concurrent(plan, 0.5, is_remote=True, is_unreported=True)
    assert found.value == 8


@pytest.mark.parametrize(
    ("configured", "waited", "number"), [(4, 0.5, 8), ("auto", 0.5, 8), ("auto", 0.05, 4), (4, 0.05, 4)]
)
def test_a_backend_that_reports_no_calls_is_advised_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, configured: int | str, waited: float, number: int
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    code = (
        'from retrain import find_plugin\n\ndef connect(spec): return find_plugin("backends", "numpy")(spec)'
    )
    (tmp_path / "unreported_api.py").write_text(code)
    plan = plan_of(backend={"backend": "unreported_api.connect", "max_concurrent": configured})
    assert not plan.permits_adapt
    stays = [note for note in warnings_of(plan, {}) if '"auto" stays at 4 permits' in note]
    assert len(stays) == (configured == "auto")
    (found,) = advice.max_concurrent(plan, waited, is_remote=True)
    assert found.value == number


@pytest.mark.parametrize(
    ("workers", "throttle_dir", "is_advised"), [(4, "", False), (5, "", True), (4, "d", True)]
)
def test_permits_for_every_worker_cannot_be_what_is_waited_for(tmp_path, workers, throttle_dir, is_advised):
    backend = {"options": {"api_latency_s": 0.1}, "max_concurrent": 4, "throttle_dir": throttle_dir}
    tables = {
        "backend": backend,
        "logging": {"log_dir": str(tmp_path)},
        "campaign": {"seeds": list(range(8)), "parallel": True, "max_workers": workers},
    }
    plan = plan_runs(parse(tables, "c.toml", try_plugins=False), "c.toml")
    busy = {"sample_time_s": 0.9, "permit_wait_s": 0.5, "permit_held_s": 0.2}
    files = RunFiles(tmp_path / "run")
    record_run(files, plan.runs[0], [1.0] * 12, closing_s=0.1, **busy)
    done = {"pilot": BenchmarkResult(plan, tmp_path, (files.directory,), 12.0, 0)}
    kept, _ = Evidence(plan, tables, {}, done, 2.0, lambda _: plan).advised()
    assert ("backend.max_concurrent" in [one.key for one in kept]) == is_advised


def test_calls_of_a_single_worker_that_share_permits_wait(tmp_path: Path) -> None:
    backend = {"options": {"api_latency_s": 0.1}, "max_concurrent": 2}
    tables = {"backend": backend, "logging": {"log_dir": str(tmp_path)}, "campaign": {"seeds": [0]}}
    plan = plan_runs(parse(tables, "c.toml", try_plugins=False), "c.toml")
    shared = {
        "sample_time_s": 2.0,
        "permit_wait_s": 1.0,
        "permit_held_s": 3.0,
        "tokens_per_step": 9,
    }  # three calls of 1 s
    files = RunFiles(tmp_path / "run")
    record_run(files, plan.runs[0], [2.0] * 12, closing_s=0.1, **shared)
    measured = worker_throughput(BenchmarkResult(plan, tmp_path, (files.directory,), 24.0, 0))
    assert measured is not None
    assert measured.permit_wait_fraction == pytest.approx(0.25)  # of 2 s, 0.5 s on each permit


def test_first_calls_are_spread_over_a_step_where_an_api_is_shared() -> None:
    (remote,) = advice.stagger(plan_of(), SPLIT, is_remote=True, workers=4)
    (local,) = advice.stagger(plan_of(stagger_seconds=3.0), SPLIT, is_remote=False, workers=4)
    assert (remote.value, local.value) == (0.25, 0.0)


def test_a_batch_size_is_written_only_where_back_pressure_decides_anyway() -> None:
    found = BatchFound(("warmup", "optimal"), 400.0, 64, 24, "found")
    mine, free = advice.batch_size(4, found, follows=False), advice.batch_size(4, found, follows=True)
    assert (mine.is_written, free.is_written) == (False, True)
    assert "batch_size" not in to_toml({"training": {}}, [mine], "c.toml")


@pytest.mark.parametrize("first", [DIRECTIVE, "# my own"])
def test_a_calibrated_file_keeps_the_line_for_editors_and_may_be_replaced(first: str, tmp_path: Path) -> None:
    source, target = tmp_path / "c.toml", tmp_path / "c.calibrated.toml"
    source.write_text(f"{first}\n[training]\nmax_tokens = 4\n")
    text = to_toml({"training": {"max_tokens": 4}}, [], "c.toml", schema=schema_line(source))
    target.write_text(text, encoding="utf-8")
    assert text.startswith(DIRECTIVE) == (first == DIRECTIVE)
    check_target(target, source)


def test_what_a_calibration_took_beyond_what_it_announced_is_said_after_it(
    retrain: Callable, campaign_file: Path
) -> None:
    # each benchmark of workers goes on for its seconds, however few steps were announced
    done = retrain("calibrate", campaign_file, "--steps", "4", "--probe-seconds", "0.5", "--budget", "2m")
    said, shown = (re.sub(r"\s+", " ", text) for text in (done.stderr, done.stdout))
    (announced,) = re.findall(r"(\d+) steps or more", said)
    (taken,) = re.findall(rf"took [^;]* and (\d+) steps \({announced} were announced\), \d+% of the", shown)
    assert int(taken) > int(announced)


def test_what_a_calibration_takes_beside_the_campaign_is_said_before_it_starts(
    retrain: Callable, campaign_file: Path
) -> None:
    said = retrain("calibrate", campaign_file, "--steps", "4", "--budget", "1s").stderr
    assert re.search(r"\d+ steps or more, \d+% of the campaign's 16\n", said)
    assert re.search(r"\nand 1\d s or more for \d benchmarks of workers, however short steps are\n", said)
    assert said.index("steps or more") < said.index("pilot: each condition")
