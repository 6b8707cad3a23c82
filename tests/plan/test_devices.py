"""More devices for each run, or more runs at a time: by the pace of earlier runs on other numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import local
from retrain.cli.explain import device_ways
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.devices import DeviceSplit, DeviceSplits, device_splits
from retrain.plan.estimate.history import History, learn
from retrain.plan.estimate.wall_time import learned_for, wall_time
from retrain.plan.matrix import Plan
from tests.explained import line_of
from tests.recorded import record_campaign

STEPS, NOISE = 100, 0.005
SIGMA, KAPPA = 0.1, 0.02
MORE = 0.13  # the slowest of some runs, which may differ by 8 %: how much they do was not measured


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "gpu_nodes", lambda: ["nvidia0"])
    monkeypatch.setattr(local, "gpu_count", lambda: 8)


def plan_of(
    logs: Path, devices: int | str, runs: int = 1, at_a_time: int = 1, batch: int = 16, **campaign: object
) -> Plan:
    parallel = {"parallel": at_a_time > 1, "max_workers": at_a_time}
    raw = {
        "model": {"model": "some/model"},
        "training": {"batch_size": batch},
        "backend": {"backend": "local", "options": {"devices": devices}},
        "logging": {"log_dir": str(logs)},
        "campaign": {"seeds": list(range(runs)), "max_steps": STEPS, **parallel, **campaign},
    }
    return plan_runs(parse(raw, "c.toml", try_plugins=False), "c.toml")


def step_s(devices: int) -> float:
    """Of the law, 1 s on one device."""
    return (1 + SIGMA * (devices - 1) + KAPPA * devices * (devices - 1)) / devices


def measured(logs: Path, counts: Sequence[int]) -> History:
    noise = np.random.default_rng(0)
    for count in counts:
        times = step_s(count) * np.exp(NOISE * noise.standard_normal(STEPS))
        plan = plan_of(logs, count)
        record_campaign(plan, f"c-20250131T12000{count}Z-0a1b", step_times_s={"maxrl": times.tolist()})
    return learn(logs)


def splits_of(plan: Plan, history: History, free: int | None = None) -> DeviceSplits | None:
    learned = learned_for(plan, history, 8.0)
    assert learned is not None
    return device_splits(plan, history, 8.0, wall_time(plan, learned, 8.0).p50_s, lambda _: free)


def seconds(split: DeviceSplit | None) -> float:
    assert split is not None
    return split.p50_s


def test_eight_runs_at_a_time_are_better_than_four_on_two_devices_each(tmp_path: Path) -> None:
    history = measured(tmp_path, [1, 2, 4])
    found = splits_of(plan_of(tmp_path, 2, runs=8, at_a_time=4), history)
    assert found is not None
    assert (found.planned.runs, found.planned.devices) == (4, 2)
    assert (found.best.runs, found.best.devices) == (8, 1)
    assert seconds(found.planned) == pytest.approx(2 * STEPS * step_s(2), rel=MORE)  # two waves
    assert seconds(found.best) == pytest.approx(STEPS * step_s(1), rel=MORE)
    assert (found.sigma, found.kappa) == (pytest.approx(SIGMA, abs=0.02), pytest.approx(KAPPA, abs=0.01))
    assert found.more_devices is found.more_runs is None  # none is free
    (label, ways), (_, by) = device_ways(found)
    assert label == "8 GPUs"
    assert "4 runs x 2 GPUs: " in ways
    assert ways.endswith("better [campaign.max_workers = 8, backend.options.devices = 1]")
    assert by.startswith("measured on 1, 2, 4; law over ranks: sigma 0.")


def test_few_runs_are_better_on_more_devices_up_to_where_the_law_turns(tmp_path: Path) -> None:
    history = measured(tmp_path, [1, 2, 3, 4])
    found = splits_of(plan_of(tmp_path, 1, runs=2, at_a_time=2), history)
    assert found is not None
    assert (found.best.runs, found.best.devices) == (2, 4)
    assert found.best.is_measured
    assert (found.more_devices.runs, found.more_devices.devices) == (2, 2)
    alone = splits_of(plan_of(tmp_path, 4), history)
    assert alone is not None
    # at 8 devices, twice those measured: 1.35 of one device's time against 4 devices' 1.54 / 4
    assert (alone.best.runs, alone.best.devices, alone.best.is_measured) == (1, 8, False)
    assert seconds(alone.best) == pytest.approx(STEPS * step_s(8), rel=0.1)
    assert (alone.more_devices.devices, alone.more_devices.is_measured) == (5, False)


@pytest.mark.parametrize("measured_on", [1, 2])
def test_runs_that_take_more_cores_than_there_are_end_no_sooner(
    tmp_path: Path, monkeypatch, measured_on
) -> None:
    monkeypatch.setattr(local, "gpu_nodes", list)
    monkeypatch.setattr(local, "cpu_capacity", lambda: 4.0)
    history = measured(tmp_path, [measured_on])
    took_s = []
    for at_a_time in (2, 4):
        plan = plan_of(tmp_path, 2, runs=4, at_a_time=at_a_time)
        took_s.append(wall_time(plan, learned_for(plan, history, 4.0), 4.0).p50_s)
    assert took_s == pytest.approx([2 * STEPS * step_s(measured_on)] * 2, rel=MORE)
    assert plan.room(4.0) == 2


def test_one_more_run_at_a_time_is_weighed_where_devices_are_free(tmp_path: Path) -> None:
    found = splits_of(plan_of(tmp_path, 2, runs=6, at_a_time=2), measured(tmp_path, [1, 2]))
    assert found is not None
    assert (found.more_runs.runs, found.more_runs.devices) == (3, 2)
    assert seconds(found.more_runs) == pytest.approx(2 * STEPS * step_s(2), rel=MORE)
    assert (found.best.runs, found.best.devices) == (6, 1)
    assert found.sigma is None  # of two numbers, no law is known
    assert found.more_devices is None


def test_a_step_is_not_cut_over_more_devices_than_it_has_prompts(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    for count in (1, 2, 3):
        times = step_s(count) * np.exp(NOISE * noise.standard_normal(STEPS))
        plan = plan_of(tmp_path, count, batch=3)
        record_campaign(plan, f"c-20250131T12000{count}Z-0a1b", step_times_s={"maxrl": times.tolist()})
    found = splits_of(plan_of(tmp_path, 3, batch=3), learn(tmp_path))
    assert found is not None
    assert found.best.devices == 3


def test_nothing_is_said_where_nobody_asked_or_nothing_can_be_shared(tmp_path: Path, monkeypatch) -> None:
    history = measured(tmp_path, [1])
    assert splits_of(plan_of(tmp_path, 1), history) is None
    found = splits_of(plan_of(tmp_path, 2), history)
    assert found is not None
    assert (found.planned, found.best, found.measured) == (None, None, (1,))
    ((_, ways), (_, by)) = device_ways(found)
    assert by == "measured on 1"
    assert ways == "no other number was measured; `retrain calibrate` measures more"
    monkeypatch.setattr(local, "gpu_count", lambda: 1)
    assert splits_of(plan_of(tmp_path, 1), history) is None


def test_what_does_not_fit_in_memory_is_no_way(tmp_path: Path, monkeypatch) -> None:
    from retrain.backends import MemoryEstimate
    from retrain.plan.estimate import devices

    def memory(config) -> MemoryEstimate:
        return MemoryEstimate("cuda", {"weights": 100 // config.backend.options["devices"]}, 0, 0, 0)

    monkeypatch.setattr(devices, "memory_of", memory)
    history, plan = measured(tmp_path, [1, 2, 4]), plan_of(tmp_path, 2, runs=8, at_a_time=4)
    assert splits_of(plan, history, free=60).best.devices == 2
    assert splits_of(plan, history, free=100).best.devices == 1


def test_a_cluster_has_the_devices_that_the_campaign_asks_it_for(tmp_path: Path) -> None:
    history = measured(tmp_path, [1, 2])
    found = splits_of(plan_of(tmp_path, 2, runs=8, at_a_time=3, launcher="slurm"), history)
    assert found is not None
    assert (found.there, found.kind) == (6, "device")
    assert found.best == found.planned  # three waves of .57 s a step, against two of 1 s


def test_more_devices_than_there_are_is_a_warning_of_the_checklist(tmp_path: Path, monkeypatch) -> None:
    from retrain.plan import explain
    from retrain.plan.preflight import Checked

    def line(at_a_time: int, devices: int = 3):
        plan = plan_of(tmp_path, devices, runs=4, at_a_time=at_a_time)
        found = explain.explain_plan(plan, Checked({}, {}, (), {}), None, 8.0, "c.toml")
        return line_of(found, "parallelism within limits")

    assert (line(2).state, line(2).answer) == ("pass", "2 at a time x 3 GPUs, of 8")
    assert line(3).state == "warn"
    assert line(3).command == "retrain explain c.toml --set campaign.max_workers=2"
    assert line(1, devices=9).command == "retrain explain c.toml --set backend.options.devices=8"
