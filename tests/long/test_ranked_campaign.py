"""A campaign whose run has two ranks: the rewards of one, and real kills of any rank."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from retrain.backends import local
from retrain.campaign import endings, supervise
from retrain.campaign.calibrate import Calibrator
from retrain.campaign.calibrate.benchmarks import Effort
from retrain.campaign.run import reopen, run_campaign
from retrain.plan.estimate.devices import device_splits
from retrain.plan.estimate.history import learn_from
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState, read_attempts
from tests.clocks import without_times
from tests.extras.test_rank_ends import assert_ended
from tests.extras.tiny_models import save_tiny_model
from tests.plugins.pure import let_have, rows_below

pytestmark = [pytest.mark.extras, pytest.mark.timeout(600)]  # each rank takes seconds to start
ROOT = Path(__file__).parents[2]
KILLS = 5
STEPS = 2 * KILLS + 1  # more than are taken until the last kill
CAMPAIGN = """
[model]
model = "{model}"
lora_rank = 4

[backend]
backend = "local"
options = {{ local_files_only = true, device = "cpu", devices = {devices}{more} }}

[training]
batch_size = 3
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 1e-3
save_every = 1
eval_every = 5

[data]
task = "successor"
eval_prompts = 8

[reward]
reward = "tests.plugins.pure.score"
params = {{ wait_s = 0.005 }}

[campaign]
seeds = [0]
max_steps = {steps}
launcher = "{launcher}"
retries = 100

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
"""
MEASURED = ("memory_fraction", "step_memory")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, warm_up_steps=80)


def run(
    directory: Path,
    model: str,
    devices: int,
    launcher: str = "inline",
    steps: int = STEPS,
    more: str = "",
    settings: Sequence[str] = (),
) -> Path:
    """Run a campaign of one run, with more options, to its end; return the run's directory."""
    directory.mkdir()
    file = directory / "c.toml"
    file.write_text(CAMPAIGN.format(model=model, devices=devices, launcher=launcher, steps=steps, more=more))
    outcome = run_campaign(file, [f"logging.log_dir={directory / 'logs'}", *settings])
    assert outcome.exit_code == 0, outcome
    (found,) = outcome.directory.glob("runs/*")
    return found


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in MEASURED}
        for row in without_times(read_metrics(run_dir))
    ]


def rewards_of(run_dir: Path) -> list[Mapping[str, Any]]:
    keys = ("mean_reward", "eval_reward", "tokens_per_step")
    return [{key: row.get(key) for key in keys} for row in read_metrics(run_dir)]


@pytest.fixture
def retried_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(supervise, "FIRST_RETRY_S", 0.05)
    monkeypatch.setattr(supervise, "LONGEST_RETRY_S", 0.1)


@pytest.fixture(scope="module")
def undisturbed(model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs on one and on two ranks, with notes of who scored."""
    directory = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOTES", str(directory / "notes"))
        return {devices: run(directory / str(devices), model, devices) for devices in (1, 2)}


def test_rewards_do_not_depend_on_the_number_of_ranks(undisturbed, model, tmp_path):
    """The last of four has no prompt of a step's three."""
    on_four = run(tmp_path / "four", model, 4)
    assert rewards_of(undisturbed[1]) == rewards_of(undisturbed[2]) == rewards_of(on_four)
    assert len({row["mean_reward"] for row in rewards_of(undisturbed[1])}) > 2


def test_ranks_score_unless_they_sample_meanwhile(undisturbed, model, tmp_path, monkeypatch):
    ahead = tmp_path / "notes"
    monkeypatch.setenv("NOTES", str(ahead))
    run(tmp_path / "run", model, 2, steps=3, settings=["rate_limiter.max_staleness=1"])
    notes = undisturbed[2].parents[4] / "notes"
    assert [len({*file.read_text().split()}) for file in (notes, ahead)] == [2, 1]


def test_a_reward_is_closed_on_each_rank_that_opened_it(model, tmp_path):
    notes = tmp_path / "notes"
    reward = ["reward.reward=tests.plugins.helped.score", f'reward.params={{notes="{notes}"}}']
    run(tmp_path / "run", model, 2, steps=1, settings=reward)
    processes = [int(pid) for pid in notes.read_text().split()]
    assert len(processes) == 2
    assert not any(map(psutil.pid_exists, processes))


class Killer(threading.Thread):
    """Kills ranks of the workers of this process, each time after another step; the fifth one hangs.

    Until then, runs whose reward has its `params` take at most one step more.
    """

    def __init__(self, directory: Path, kills: int = KILLS) -> None:
        super().__init__(daemon=True)
        self.logs, self.gate, self.kills = directory / "logs", directory.with_suffix(".gate"), kills
        self.params = f'reward.params={{wait_s=0.005, logs="{self.logs}", gate="{self.gate}"}}'
        self.killed, self.hangs = list[int](), threading.Event()
        self.is_over = False
        let_have(self.gate, 1)

    def run(self) -> None:
        chance, seen = random.Random(5), 0
        while len(self.killed) < self.kills and not self.is_over:
            time.sleep(0.01)
            rows, ranks = rows_below(self.logs), ranks_of_worker()
            if rows <= seen or len(ranks) < 2:
                continue
            let_have(self.gate, rows + 1)
            time.sleep(chance.uniform(0.0, 0.05))  # anywhere in the next step
            # each of the two, whatever is drawn
            number = chance.randrange(2) if len(self.killed) > 1 else len(self.killed)
            if len(self.killed) + 1 < KILLS:
                ranks[number].kill()
            else:
                ranks[1].suspend()
                self.hangs.set()
            self.killed.append(number)
            assert_ended(ranks)
            self.hangs.clear()
            seen = rows_below(self.logs)
            let_have(self.gate, seen + 1 if len(self.killed) < self.kills else 1000)


def test_a_plan_weighs_one_run_on_two_devices_against_two_runs(undisturbed, model, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "cpu_capacity", lambda: 4.0)
    file = tmp_path / "c.toml"
    file.write_text(CAMPAIGN.format(model=model, devices=2, launcher="local", steps=STEPS, more=""))
    more = ["campaign.seeds=[0,1]", f"logging.log_dir={tmp_path}"]
    calibrator = Calibrator(file, more, Effort())
    history = learn_from([run_dir.parents[1] for run_dir in undisturbed.values()])
    found = device_splits(calibrator.plan, history, 4.0, None, lambda _: None)
    assert (found.there, found.kind, found.measured) == (4, "core", (1, 2))
    assert (found.planned.runs, found.planned.devices, found.more_runs.runs) == (1, 2, 2)
    assert found.best.runs == 2  # of one or of two devices
    assert found.best.p50_s < found.planned.p50_s
    names = [benchmark.name for benchmark in calibrator.benchmarks(tmp_path)]
    assert names[:4] == ["pilot", "devices-1", "devices-2", "workers-1"]  # a step has three prompts
    for benchmark in list(calibrator.benchmarks(tmp_path))[1:3]:
        table = benchmark.tables["backend"]["options"]
        assert (table["devices"], table["device"]) == (int(benchmark.name[-1]), "cpu")


def ranks_of_worker() -> list[psutil.Process]:
    """Return the processes of the worker that runs, rank 0 first."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it ends just now, or nobody has waited for it
            others = [each for each in child.children() if "rank_process" in " ".join(each.cmdline())]
            if others and "retrain.trainer.worker" in child.cmdline():
                return [child, *others]
    return []


def test_kills_of_any_rank_or_one_that_hangs_cost_a_retry_and_nothing_else(
    tmp_path, model, undisturbed, retried_soon, monkeypatch
):
    class Impatient(endings.Patience):
        """Has a `stall_timeout` of seconds while a rank hangs; on a busy machine a start takes longer."""

        def ended_by(self, now_s: float) -> RunState | None:
            self._stall_s = 3.0
            if not killer.hangs.is_set():
                self._moved_at_s = now_s
            return super().ended_by(now_s)

    monkeypatch.setattr(supervise, "Patience", Impatient)
    monkeypatch.setattr(supervise, "GRACE_S", 1.0)
    killer = Killer(tmp_path / "killed")
    killer.start()
    killed = run(tmp_path / "killed", model, 2, "local", settings=[killer.params])
    killer.is_over = True
    assert {*killer.killed} == {0, 1}
    assert len(killer.killed) == KILLS
    attempts = read_attempts(killed / "attempts.jsonl")
    assert len(attempts) == KILLS + 1
    assert attempts[-2].ending == "stalled"
    assert any("rank 1 (process" in attempt.message for attempt in attempts)
    assert rows_of(killed) == rows_of(undisturbed[2])


def continued_on_one(run_dir: Path, more: str, steps: int) -> Path:
    """Continue a finished run with more steps on one rank."""
    campaign = run_dir.parents[1]
    file, changed = campaign / "campaign.toml", "devices = 1" + more
    text = re.sub(r"max_steps = \d+", f"max_steps = {steps}", file.read_text())
    file.write_text(re.sub("devices = 2[^}]*", changed + " ", text))
    outcome = reopen(campaign, accept_config_change=True).execute()
    assert outcome.exit_code == 0
    return run_dir


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, model, undisturbed):
    half = continued_on_one(run(tmp_path / "half", model, 2, steps=5), "", STEPS)
    assert rewards_of(half) == rewards_of(undisturbed[1])


def test_a_run_of_all_weights_in_pieces_survives_a_kill_and_goes_on_with_whole_ones(
    tmp_path, model, retried_soon
):
    all_weights, pieces = ", lora = false", ", lora = false, shard = true"
    one = run(tmp_path / "one", model, 1, steps=6, more=all_weights)
    cut = run(tmp_path / "cut", model, 2, steps=4, more=pieces)
    killer = Killer(tmp_path / "killed", 1)
    killer.start()
    killed = run(tmp_path / "killed", model, 2, "local", steps=4, more=pieces, settings=[killer.params])
    killer.is_over = True
    assert len(read_attempts(killed / "attempts.jsonl")) == 2
    assert rows_of(killed) == rows_of(cut)
    assert rewards_of(continued_on_one(cut, all_weights, 6)) == rewards_of(one)
