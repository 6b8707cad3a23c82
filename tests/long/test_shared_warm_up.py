"""A warm-up that runs of a campaign share: trained once per seed, and the others go on as if they had."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from retrain.base.locks import hold
from retrain.campaign.run import start
from retrain.config.digest import warm_up_digest
from retrain.config.load import load_config, parse
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import learn
from retrain.plan.estimate.money import cost_forecast
from retrain.plan.estimate.wall_time import learned_for, workload_of
from retrain.plan.most_cost import most_cost, reading_of
from retrain.plugins.tasks import successor
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import checkpoint, worker
from tests.clocks import without_times
from tests.long.test_warmup_on_numpy import Killed, KilledAtLook, StopAfter
from tests.semaphore_processes import wait_until
from tests.trainer.test_progress import phase_in
from tests.trainer.test_trainer import SMALL

FILE = """
[training]
max_steps = 3
batch_size = 3
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 5e-3
save_every = 2

[data]
task = "successor"

[warmup]
path = "rows.jsonl"
steps = 5
batch_size = 8
lr = 1e-2

[budget.prices.numpy]
train = 2

[campaign]
seeds = [0, 1]
launcher = "inline"

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "maxrl"

[[campaign.conditions]]
name = "longer"
warmup = { steps = 6 }
"""


@pytest.fixture
def file(here: Path) -> Path:
    task = successor.build(seed=0)
    rows = [json.dumps({"prompt": p.text, "completion": p.answer}) for p in task.train]
    (here / "rows.jsonl").write_text("\n".join(rows))
    (here / "c.toml").write_text(FILE)
    return here / "c.toml"


def rows(files: RunFiles) -> list[dict]:
    return without_times(read_metrics(files.directory))


def warm_up_rows(files: RunFiles) -> list[dict]:
    return [json.loads(line) for line in files.warmup.read_text().splitlines()]


def alone(campaign: CampaignFiles, run_id: str, directory: Path) -> RunFiles:
    """The same run in a directory of its own, where it shares nothing."""
    directory.mkdir()
    shutil.copyfile(campaign.run(run_id).run_toml, directory / "run.toml")
    assert worker.run(directory, threading.Event()) == 0
    return RunFiles(directory)


def shared(campaign: CampaignFiles, run_id: str) -> Path:
    return campaign.warm_ups / warm_up_digest(worker.read_run(campaign.run(run_id)))


def test_the_first_run_of_a_seed_trains_it_and_others_go_on_as_if_they_had(file: Path, here: Path) -> None:
    campaign = CampaignFiles(start(file).execute().directory)
    for seed in (0, 1):
        maker, taker = campaign.run(f"grpo_s{seed}"), campaign.run(f"maxrl_s{seed}")
        assert all("made_by" not in row and row["cost_usd"] > 0 for row in warm_up_rows(maker))
        taken = warm_up_rows(taker)
        assert {row["made_by"] for row in taken} == {f"grpo_s{seed}"}
        assert all("cost_usd" not in row and "step_time_s" not in row for row in taken)
        assert [row["loss"] for row in taken] == [row["loss"] for row in warm_up_rows(maker)]
        own = alone(campaign, f"maxrl_s{seed}", here / f"alone{seed}")
        assert rows(taker) == rows(own)
        costs = [(row["cost_usd"], row["trained_tokens"]) for row in read_metrics(taker.directory)]
        assert costs == [(row["cost_usd"], row["trained_tokens"]) for row in read_metrics(own.directory)]
        assert len(warm_up_rows(campaign.run(f"longer_s{seed}"))) == 6
    assert not campaign.warm_ups.exists()  # every run is done


@pytest.mark.parametrize("look", [3, 6])
def test_another_run_takes_over_from_a_maker_that_is_killed(file: Path, here: Path, look: int) -> None:
    campaign = CampaignFiles(start(file).directory)
    first, second = campaign.run("grpo_s0"), campaign.run("maxrl_s0")
    with pytest.raises(Killed):
        worker.run(first.directory, KilledAtLook(look))
    for files in (second, first):
        assert worker.run(files.directory, threading.Event()) == 0
    assert {row["made_by"] for row in warm_up_rows(first)} == {"maxrl_s0"}
    assert rows(first) == rows(alone(campaign, "grpo_s0", here / "alone"))


def test_a_maker_that_is_killed_after_it_shared_takes_its_own(
    file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign = CampaignFiles(start(file).directory)
    files = campaign.run("grpo_s0")
    save = checkpoint.save

    def killed(root: Path, *rest: object, **how: object) -> Path:
        if root == files.checkpoints and checkpoint.steps_of(shared(campaign, "grpo_s0")):
            raise Killed
        return save(root, *rest, **how)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed)
        with pytest.raises(Killed):
            worker.run(files.directory, threading.Event())
    assert worker.run(files.directory, threading.Event()) == 0
    assert [(row["step"], row["attempt"]) for row in warm_up_rows(files)] == [(n, 1) for n in range(1, 6)]
    assert rows(files) == rows(alone(campaign, "grpo_s0", here / "alone"))


@pytest.mark.parametrize("looks", range(4))
def test_a_run_that_is_stopped_as_it_takes_the_start_goes_on_as_one_that_was_not(
    file: Path, here: Path, looks: int
) -> None:
    campaign = CampaignFiles(start(file).directory)
    assert worker.run(campaign.run("grpo_s0").directory, threading.Event()) == 0
    files = campaign.run("maxrl_s0")
    assert worker.run(files.directory, StopAfter(looks)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    assert rows(files) == rows(alone(campaign, "maxrl_s0", here / "alone"))


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_while_it_waits_takes_the_start_later(
    file: Path, here: Path, ended_by: signal.Signals
) -> None:
    campaign = CampaignFiles(start(file).directory)
    files, folder = campaign.run("maxrl_s0"), shared(campaign, "maxrl_s0")
    folder.mkdir(parents=True)
    (folder / "maker.json").write_text('{"run": "grpo_s0"}')
    with hold(folder.with_suffix(".lock")):
        command = [sys.executable, "-m", "retrain.trainer.worker", str(files.directory)]
        with subprocess.Popen(command) as process:
            wait_until(lambda: phase_in(files) == "wait for the warm-up of grpo_s0")
            os.kill(process.pid, ended_by)
        assert process.returncode == (130 if ended_by == signal.SIGTERM else -signal.SIGKILL)
    for run_id in ("grpo_s0", "maxrl_s0"):
        assert worker.run(campaign.run(run_id).directory, threading.Event()) == 0
    assert {row["made_by"] for row in warm_up_rows(files)} == {"grpo_s0"}
    assert rows(files) == rows(alone(campaign, "maxrl_s0", here / "alone"))


def test_a_damaged_start_is_trained_again(file: Path) -> None:
    campaign = CampaignFiles(start(file).directory)
    assert worker.run(campaign.run("grpo_s0").directory, threading.Event()) == 0
    (shared(campaign, "grpo_s0") / "step-000000" / "policy.npz").write_bytes(b"")
    files = campaign.run("maxrl_s0")
    assert worker.run(files.directory, threading.Event()) == 0
    assert all("made_by" not in row for row in warm_up_rows(files))


def test_a_forecast_counts_each_start_once(file: Path) -> None:
    """As it was billed, for as many runs as are to train it, whoever trained it in earlier campaigns."""
    campaign = CampaignFiles(start(file).execute().directory)
    trained = [sum(row["trained_tokens"] for row in warm_up_rows(campaign.run(f"grpo_s{s}"))) for s in (0, 1)]
    file.write_text(FILE[: FILE.index('[[campaign.conditions]]\nname = "longer"')])

    def told(*overrides: str) -> tuple[int, float, float]:
        """Runs that train it, their part of the costs and of the time before a run's first step."""
        plan = plan_runs(load_config(file, list(overrides)), "c")
        history = learn(campaign.directory)
        history = replace(history, runs=tuple(r for r in history.runs if r.condition != "longer"))
        learned = learned_for(plan, history, 1.0)
        assert learned is not None
        without = [replace(r, warm_up_s=None, billed=replace(r.billed, warm_up=None)) for r in history.runs]
        other = replace(learned, history=replace(learned.history, runs=tuple(without), sources=()))
        usd = [cost_forecast(plan, each) for each in (learned, other)]
        assert usd[0] is not None
        assert usd[1] is not None
        before_s = [workload_of(plan, each).launching.startup_s for each in (learned, other)]
        return sum(plan.warm_ups.values()), usd[0].p50_usd - usd[1].p50_usd, before_s[0] - before_s[1]

    usd = 2e-6 * sum(trained) / 2
    taken_s = [sum(row["step_time_s"] for row in warm_up_rows(campaign.run(f"grpo_s{s}"))) for s in (0, 1)]
    seconds = sum(taken_s) / 2
    assert told() == (2, pytest.approx(2 * usd), pytest.approx(seconds / 2))  # one run after another
    together = told("campaign.launcher=local", "campaign.parallel=true", "campaign.max_workers=4")
    assert together == (2, pytest.approx(2 * usd), pytest.approx(seconds))  # half of them wait for the others
    assert told("campaign.seeds=[0, 1, 2]")[:2] == (3, pytest.approx(3 * usd))


def test_the_most_that_a_plan_costs_has_each_start_once(file: Path) -> None:
    plan = plan_runs(load_config(file))
    task = successor.build(seed=0)
    readings = {
        condition: reading_of(run.config, task.train, task.held_out[:0], ())
        for condition, run in plan.first_runs.items()
    }
    cost = most_cost(plan, readings)
    longest = max(len(line) for line in (file.parent / "rows.jsonl").read_bytes().splitlines(keepends=True))
    warm_ups = 2 * (5 + 6) * 8 * longest * 2e-6  # two starts of each seed
    assert cost.campaign_usd - 6 * 3 * cost.step_usd == pytest.approx(warm_ups)


def digest(**changed: object) -> str:
    raw = {**SMALL, "warmup": {"steps": 5, "path": "rows.jsonl"}}
    for section, values in changed.items():
        raw[section] = {**raw.get(section, {}), **values}
    return warm_up_digest(plan_runs(parse(raw, "c", try_plugins=False)).runs[0].config)


@pytest.mark.parametrize(
    "changed",
    [
        {"algorithm": {"advantage_mode": "grpo"}},
        {"algorithm": {"kl_coef": 0.1}},
        {"training": {"max_steps": 9, "batch_size": 2}},
        {"data": {"refill": "tied"}},
        {"training": {"lr": 1.0}, "warmup": {"lr": 5e-3}},
    ],
)
def test_conditions_that_learn_otherwise_later_share_it(file: Path, changed: dict) -> None:
    assert digest(**changed) == digest(warmup=changed.get("warmup", {}))


@pytest.mark.parametrize(
    "changed",
    [
        {"training": {"seed": 6}},
        {"training": {"lr": 1.0}},
        {"training": {"max_grad_norm": 0.5}},
        {"warmup": {"steps": 4}},
        {"data": {"options": {"digits": 1}}},
        {"backend": {"options": {"hidden": 8}}},
    ],
)
def test_what_changes_the_policy_after_it_is_not_shared(file: Path, changed: dict) -> None:
    assert digest(**changed) != digest()
