"""Controllers inside a run: one order, and every row says what each did and why."""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.config.flow import flow_settings
from retrain.control.rules.scaling import schedule_factor
from retrain.plugins.tasks import successor
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_progress
from retrain.trainer import worker
from tests.clocks import without_times
from tests.semaphore_processes import wait_until
from tests.trainer.test_trainer import SMALL, StopAfterStep, make_run, train, weights, with_


def loaded(level: str, **keys: object) -> dict:
    """A throttle under no load, kept from being less restrictive than a level."""
    return {"enabled": True, "min_level": level, "load_fn": "tests.plugins.idle", **keys}


def on(**sections: dict) -> dict:
    return {**SMALL, **sections}


def test_the_first_step_uses_the_configured_batch_and_later_ones_what_back_pressure_says(
    tmp_path: Path,
) -> None:
    raw = on(backpressure={"enabled": True, "max_batch_size": 12})
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert rows[0]["batch_size"] == 3
    assert [r["batch_size"] for r in rows[1:]] == [r["bp_batch_size"] for r in rows[:-1]]
    assert all(r["bp_action"] in ("hold", "throttle", "increase") and r["bp_reason"] for r in rows)


def test_microbatch_control_keeps_the_optimizers_batch(tmp_path: Path) -> None:
    raw = on(
        backpressure={"enabled": True, "control": "microbatch", "max_batch_size": 3, "min_batch_size": 1}
    )
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert {r["batch_size"] for r in rows} == {3}


def test_microbatch_control_recommends_only_what_the_batch_can_be_cut_into(tmp_path: Path) -> None:
    raw = on(backpressure={"enabled": True, "control": "microbatch", "min_batch_size": 5})
    raw["training"] = {**raw["training"], "batch_size": 16, "max_steps": 30}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert {r["batch_size"] for r in rows} == {16}
    assert [r["prompts_at_a_time"] for r in rows[1:]] == [r["bp_batch_size"] for r in rows[:-1]]
    assert {r["prompts_at_a_time"] for r in rows} <= {16, 8, 6}  # in 1, 2 or 3 parts


def test_steps_without_an_update_do_not_train_the_fit(tmp_path: Path) -> None:
    raw = on(
        backpressure={"enabled": True, "max_batch_size": 12}, reward={"reward": "tests.plugins.always_right"}
    )
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert {r["bp_batch_size"] for r in rows} == {3}
    assert {r["bp_throughput"] for r in rows} == {0.0}
    assert all(r["bp_reason"].startswith("not counted: no group carried a signal") for r in rows)


def test_back_pressure_survives_a_resume(tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", on(backpressure={"enabled": True, "max_batch_size": 12}))
    assert worker.run(files.directory, StopAfterStep(files, step=3)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    rows = read_metrics(files.directory)
    assert rows[3]["batch_size"] == rows[2]["bp_batch_size"]


def test_a_batch_outside_back_pressures_bounds_is_refused() -> None:
    from retrain.config.load import parse

    with pytest.raises(ConfigError, match=r"training\.batch_size = 100"):
        parse({"training": {"batch_size": 100}, "backpressure": {"enabled": True}}, "c")


def test_a_reduced_level_accumulates_and_keeps_the_result(tmp_path: Path) -> None:
    plain = read_metrics(train(tmp_path / "plain").directory)
    reduced = read_metrics(train(tmp_path / "low", on(throttle=loaded("reduced"))).directory)
    assert {(r["throttle_level"], r["throttle_load"]) for r in reduced} == {("reduced", 0.0)}
    assert [r["batch_size"] for r in reduced] == [r["batch_size"] for r in plain]


def test_batch_control_makes_the_batch_smaller(tmp_path: Path) -> None:
    raw = on(throttle=loaded("minimal", control="batch"))
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert {r["batch_size"] for r in rows} == {1}
    assert all(r["throttle_reason"] for r in rows)


def loads_in_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOAD_FILE", str(path))
    path.write_text("0.7")
    return path


@pytest.mark.parametrize("later", ["0.56", "0.1"])  # within the margin of its boundary; calm, not for long
def test_a_resumed_run_holds_the_level_that_an_undisturbed_one_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    load = loads_in_a_file(tmp_path / "load", monkeypatch)
    raw = on(throttle={"enabled": True, "load_fn": "tests.plugins.loads_from_a_file", "control": "batch"})
    whole, broken = train(tmp_path / "whole", raw), make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAfterStep(broken, step=3)) == 130
    load.write_text(later)
    assert worker.run(broken.directory, threading.Event()) == 0
    columns = ("step", "throttle_level", "batch_size", "mean_reward", "loss")
    undisturbed, resumed = (
        [[row[key] for key in columns] for row in read_metrics(files.directory)] for files in (whole, broken)
    )
    assert resumed == undisturbed
    assert {row[1] for row in resumed} == {"minimal"}


def is_paused(files: RunFiles, since: str = "", why: str = "") -> bool:
    seen = read_progress(files.status)
    return seen is not None and seen.phase.startswith(f"paused{since}") and seen.phase.endswith(why)


def test_a_saturated_machine_is_named_with_the_load_and_the_time_that_it_held_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.trainer.control.POLL_S", 0.05)
    load = loads_in_a_file(tmp_path / "load", monkeypatch)
    load.write_text("1.3")
    raw = on(throttle={"enabled": True, "load_fn": "tests.plugins.loads_from_a_file"})
    files, stop = make_run(tmp_path / "r", raw), threading.Event()
    thread = threading.Thread(target=lambda: worker.run(files.directory, stop))
    thread.start()
    why = ": load 1.30, saturated from 0.85: custom 1.30"
    wait_until(lambda: is_paused(files, " for ", why) or not thread.is_alive())
    load.write_text("0.1")
    thread.join()
    first, *others = (row["throttle_wait_s"] for row in read_metrics(files.directory))
    assert first >= 1.0
    assert set(others) == {0.0}


def test_a_paused_run_waits_visibly_and_can_be_stopped(tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", on(throttle=loaded("paused")))
    stop = threading.Event()
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(worker.run(files.directory, stop)))
    thread.start()
    wait_until(lambda: is_paused(files) or not thread.is_alive())
    assert thread.is_alive()
    stop.set()
    thread.join()
    assert ended == [130]
    assert read_metrics(files.directory) == []


def test_sampling_beside_training_holds_the_ratio_and_bounds_the_age(tmp_path: Path) -> None:
    raw = on(rate_limiter={"max_staleness": 1, "rate_limit_speed_batch_per_sim": 1.0})
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(r["rate_sample_age_max"] <= 1 for r in rows)
    assert 6 <= rows[-1]["rate_ratio"] * 6 <= 7 + 1e-9  # at most one unit ahead of the pace
    assert rows[-1]["rate_batches_per_unit"] is not None


def test_sampling_beside_training_goes_on_after_a_stop(tmp_path: Path) -> None:
    files = make_run(tmp_path / "r", on(rate_limiter={"max_staleness": 2}))
    assert worker.run(files.directory, StopAfterStep(files, step=3)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    assert [r["step"] for r in read_metrics(files.directory)] == [1, 2, 3, 4, 5, 6]


def test_several_workers_train_on_each_prompt_once_though_the_run_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    raw = on(
        rate_limiter={"max_staleness": 3, "workers": 4, "nb_time_steps": 1},
        backend={"options": {"api_latency_s": 0.001}},
        reward={"reward": "tests.plugins.noted"},
    )
    files = make_run(tmp_path / "r", raw)
    for step in (2, 4):
        assert worker.run(files.directory, StopAfterStep(files, step=step)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    train_ids = {str(prompt.id) for prompt in successor.build(seed=0).train}
    scored = Counter(line for line in (tmp_path / "notes").read_text().split() if line in train_ids)
    assert len(scored) == 6 * 3
    assert set(scored.values()) == {4}  # its group of rollouts, once


def test_no_staleness_is_the_plain_loop_bit_for_bit(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain")
    limited = train(tmp_path / "limited", on(rate_limiter={"rate_limit_speed_batch_per_sim": 1.0}))
    assert weights(plain) == weights(limited)


def test_settings_that_could_deadlock_are_refused_before_anything_starts(tmp_path: Path) -> None:
    from retrain.config.load import parse

    raw = on(rate_limiter={"max_staleness": 1, "watermark": 100, "capacity": 10}, model={"lora_rank": 0})
    with pytest.raises(ConfigError) as refused:
        parse(raw, "c.toml")
    assert "c.toml [rate_limiter].watermark: got 100; the buffer holds at most capacity = 10" in str(
        refused.value
    )
    assert "c.toml [model].lora_rank" in str(refused.value)  # together with all other problems


@pytest.mark.parametrize("buffer", ["fifo", "firo"])
@pytest.mark.parametrize("unit", [1, 2, 5])
def test_the_speed_that_a_refusal_names_is_accepted_and_exact(buffer: str, unit: int) -> None:
    from retrain.config.load import parse

    limiter = {"max_staleness": 1, "nb_time_steps": unit, "buffer": buffer}
    with pytest.raises(ConfigError) as refused:
        parse(on(rate_limiter=limiter | {"rate_limit_speed_batch_per_sim": 0.1}), "c.toml")
    named = re.search(r"so it needs (\S+) ", str(refused.value))
    assert named is not None
    speed = float(named[1])
    settings = flow_settings(
        parse(on(rate_limiter=limiter | {"rate_limit_speed_batch_per_sim": speed}), "c.toml")
    )
    assert settings is not None
    assert settings.samples_per_batch == 3


@pytest.mark.parametrize(
    ("limiter", "where"),
    [
        (
            {"rate_limit_speed_batch_per_sim": 0.5},
            "[rate_limiter].rate_limit_speed_batch_per_sim: got 0.5; a fifo buffer reads each sample once, "
            "so it needs 1 (nb_time_steps = 3 / training.batch_size = 3), or 0 for no pace; "
            '[rate_limiter].buffer = "reservoir" takes larger values',
        ),
        ({"nb_time_steps": 7}, "[rate_limiter].nb_time_steps: got 7; with max_staleness = 1"),
        ({"threshold": 2}, "[rate_limiter].threshold: got 2; only the firo buffer has one"),
    ],
)
def test_what_could_deadlock_is_named_by_its_key_in_the_condition_that_says_it(
    limiter: dict, where: str
) -> None:
    from retrain.config.load import parse

    raw = on(
        rate_limiter={"max_staleness": 1},
        campaign={"conditions": [{"name": "fine"}, {"name": "stuck", "rate_limiter": limiter}]},
    )
    with pytest.raises(ConfigError, match=re.escape(f'c.toml [[campaign.conditions]] "stuck" {where}')):
        parse(raw, "c.toml")


def test_the_learning_rate_follows_the_batch(tmp_path: Path) -> None:
    raw = on(scaling={"rule": "linear"}, throttle=loaded("reduced", control="batch"))
    raw["training"] = {**raw["training"], "batch_size": 4}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert all(r["lr_factor"] == r["batch_size"] / 4 for r in rows)
    assert all(r["lr"] == pytest.approx(5e-3 * r["lr_factor"]) for r in rows)


def test_a_resumed_run_with_adascale_equals_an_undisturbed_one(tmp_path: Path) -> None:
    raw = on(scaling={"rule": "adascale"})
    raw["training"] = {**raw["training"], "lr_schedule": "cosine"}
    whole = train(tmp_path / "whole", raw)
    broken = make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAfterStep(broken, step=3)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert without_times(read_metrics(broken.directory)) == without_times(read_metrics(whole.directory))
    assert weights(broken) == weights(whole)


SINGLE = {
    **SMALL["training"],
    "batch_size": 1,
    "max_steps": 16,
    "group_size": 16,
    "save_every": 1,
}


def single(optimizer: str) -> dict:
    """One prompt a step, scored in part so that nearly every group is informative."""
    return on(
        training=SINGLE,
        scaling={"rule": "adascale"},
        backend={"options": {"optimizer": optimizer}},
        data={"task": "copy"},
        reward={"reward": "partial"},
    )


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_batch_of_one_prompt_learns_its_noise_scale_from_steps_in_a_row(
    tmp_path: Path, optimizer: str
) -> None:
    rows = read_metrics(train(tmp_path / "r", single(optimizer)).directory)
    assert rows[0]["scaling_noise_scale"] is None
    assert "noise scale not yet known" in rows[0]["scaling_reason"]
    assert "prompts" in rows[-1]["scaling_reason"]


def test_a_resumed_run_of_lone_gradients_equals_an_undisturbed_one(tmp_path: Path) -> None:
    raw = single("sgd")
    whole, broken = train(tmp_path / "whole", raw), make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAfterStep(broken, step=7)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert without_times(read_metrics(broken.directory)) == without_times(read_metrics(whole.directory))


def test_schedules_rise_and_fall_over_progress() -> None:
    assert [schedule_factor("constant", p, 10, warmup=2) for p in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert [schedule_factor("linear", p, 10) for p in (0, 5, 10, 99)] == [1.0, 0.5, 0.0, 0.0]
    assert schedule_factor("cosine", 5, 10) == pytest.approx(0.5)


def test_a_cosine_run_ends_with_a_small_learning_rate(tmp_path: Path) -> None:
    raw = {
        **with_("training", lr_schedule="cosine"),
        "data": {"task": "copy"},
        "reward": {"reward": "partial"},
    }
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert rows[0]["lr"] == 5e-3
    assert rows[-1]["lr"] < 2e-3


def test_goodput_without_a_measured_noise_scale_is_throughput_and_says_so(tmp_path: Path) -> None:
    raw = on(
        backpressure={"enabled": True, "objective": "goodput", "max_batch_size": 8},
        reward={"reward": "tests.plugins.always_right"},
    )
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert all("noise-scale samples so far" in r["bp_reason"] for r in rows)
    assert not any("expected goodput" in r["bp_reason"] for r in rows)
    assert {r["scaling_noise_scale"] for r in rows} == {None}
    assert {r["scaling_progress"] for r in rows} == {0.0}


def test_back_pressure_and_sampling_beside_training_work_together(tmp_path: Path) -> None:
    raw = on(
        backpressure={"enabled": True, "max_batch_size": 12},
        rate_limiter={"max_staleness": 2, "rate_limit_speed_batch_per_sim": 1.0},
    )
    raw["training"] = {**raw["training"], "max_steps": 15}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert [r["step"] for r in rows] == list(range(1, 16))


def test_hints_of_a_remote_backend_are_unknown(tmp_path: Path) -> None:
    raw = on(backpressure={"enabled": True, "max_batch_size": 4, "peak_gflops": 10.0, "peak_bw_gb_s": 10.0})
    here_rows = read_metrics(train(tmp_path / "here", raw).directory)
    raw["backend"] = {"options": {"api_latency_s": 0.001}}
    remote_rows = read_metrics(train(tmp_path / "remote", raw).directory)
    phases = ("prefill", "decode", "train")
    assert {r[f"roofline_{phase}"] for r in remote_rows for phase in phases} == {"unknown"}
    assert {r[f"mfu_{phase}"] for r in remote_rows for phase in phases} == {None}
    trained = [r for r in here_rows if r["zero_signal_group_fraction"] < 1.0]
    assert "unknown" not in {r[f"roofline_{phase}"] for r in trained for phase in phases}
    assert all(r[f"mfu_{phase}"] > 0.0 for r in trained for phase in phases)
