"""The real tools: what a campaign logged is read back from their own files, also after kills and resumes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.campaign.run import run_campaign
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from tests import logger_plugins
from tests.extras.wandb_files import offline_runs, read

pytestmark = [pytest.mark.extras, pytest.mark.timeout(300)]
DATABASE = Path("new", "folder", "m.db")

CAMPAIGN = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
temperature = 1.0
save_every = 5
eval_at_start = false  # the reward counts the completions of steps

[data]
task = "successor"

[reward]
reward = "{own}.killed_when_logged"

[logging]
loggers = ["{own}.watched_wandb", "{own}.watched_tensorboard", "{own}.watched_mlflow"]
logger_params = {{ "{own}.watched_mlflow" = {{ tracking_uri = "{uri}" }} }}

[campaign]
name = "study"
seeds = [0, 1]
max_steps = 12
parallel = true
max_workers = 2

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"
"""
# Opens MLflow's logger for a run, and is killed at its second upgrade of the tables.
OPEN_MLFLOW = """
import os, sys
from pathlib import Path
from sqlalchemy import event
from sqlalchemy.engine import Engine
from retrain.plugins.loggers import LoggedRun, mlflow
upgrades = []
@event.listens_for(Engine, "before_cursor_execute")
def count(connection, cursor, statement, *rest):
    upgrades.extend([statement] * statement.startswith("UPDATE alembic_version"))
    if len(upgrades) == 2:
        os.kill(os.getpid(), 9)
run = LoggedRun("c", "r_s0", "r", 0, 1, 0, Path(), {}, "")
mlflow.open_here(run, tracking_uri=sys.argv[1], experiment="")
"""


@pytest.fixture(scope="module")
def environment():
    env = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "MLFLOW_"))}
    return env | {"WANDB_MODE": "offline", "WANDB_API_KEY": "0123456789" * 4, "MY_SECRET": "canary-4711"}


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, environment):
    """A campaign of two runs beside each other, which log to all three; the second is `killed`.

    Before them, another run was killed while MLflow made its tables.
    """
    here = tmp_path_factory.mktemp("here")
    uri = f"sqlite:///{here / DATABASE}"
    (here / "study.toml").write_text(CAMPAIGN.format(uri=uri, own=logger_plugins.__name__))
    died = subprocess.run([sys.executable, "-c", OPEN_MLFLOW, uri], env=environment, check=False)
    assert died.returncode == -signal.SIGKILL
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        for name in environment.keys() - os.environ.keys():
            patch.setenv(name, environment[name])
        patch.chdir(here)
        outcome = run_campaign(here / "study.toml")
        directory = outcome.directory.absolute()
    assert outcome.exit_code == 0
    return directory


@pytest.fixture(scope="module")
def killed(campaign):
    """A run that was killed after step 8, three steps after its checkpoint, and went on."""
    run = campaign / "runs" / "grpo_s1"
    assert [one.ending for one in read_attempts(run / "attempts.jsonl")] == ["infrastructure", "done"]
    return run


def rewards(run):
    return {row["step"]: pytest.approx(row["mean_reward"], rel=1e-6) for row in read_metrics(run)}


def test_wandb_has_campaign_condition_and_seed_and_every_step(campaign):
    run = campaign / "runs" / "grpo_s0"
    (file,) = offline_runs(run)
    told, history, axes = read(file)
    assert (told["group"], told["name"], told["project"]) == (campaign.name, "grpo_s0", "retrain")
    assert set(told["tags"]) == {"grpo", "seed 0"}
    assert axes["*"] == "step"
    assert {row["step"]: row["mean_reward"] for row in history} == rewards(run)


def test_a_resumed_run_goes_on_in_wandb_under_its_id_and_loses_no_step(killed):
    lives = [read(path) for path in offline_runs(killed)]
    assert len({told["id"] for told, _, _ in lives if told}) == 1
    assert lives[-1][2]["*"] == "step"  # our axis: W&B's own drops steps that it has seen
    assert [row["step"] for row in lives[-1][1]][-7:] == list(range(6, 13))
    latest = {row["step"]: row["mean_reward"] for _, history, _ in lives for row in history}
    assert latest == rewards(killed)


def scalars(run, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_shows_every_step_once(campaign, killed):
    for run in (campaign / "runs" / "grpo_s0", killed):
        seen = scalars(run, "mean_reward")
        assert [step for step, _ in seen] == list(range(1, 13))
        assert dict(seen) == rewards(run)


def database_of(campaign):
    return campaign.parents[1] / DATABASE


def history_of(campaign, run_id, key):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database_of(campaign)}")
    experiments = [e.experiment_id for e in client.search_experiments()]
    runs = client.search_runs(experiments, filter_string=f"attributes.run_name = '{run_id}'")
    assert len(runs) == 1
    return runs[0], client.get_metric_history(runs[0].info.run_id, key)


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")
def test_mlflow_has_tags_parameters_and_every_step_of_parallel_runs(campaign):
    for seed in (0, 1):
        run, history = history_of(campaign, f"grpo_s{seed}", "mean_reward")
        tags = {"campaign": campaign.name, "condition": "grpo", "seed": str(seed)}
        assert tags.items() <= run.data.tags.items()
        assert run.data.params["training.batch_size"] == "2"
        assert run.info.status == "FINISHED"
        assert {one.step: one.value for one in history} == rewards(campaign / "runs" / f"grpo_s{seed}")


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")
@pytest.mark.parametrize("key", ["mean_reward", "step_time_s", "loss"])
def test_mlflow_draws_each_step_once_although_some_were_taken_twice(campaign, killed, key):
    run, history = history_of(campaign, killed.name, key)
    assert run.data.tags["attempt"] == "2"
    assert sorted(one.step for one in history) == list(range(1, 13))


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")
def test_mlflow_takes_settings_whatever_their_keys_are_called(campaign):
    from retrain.plugins.loggers import LoggedRun, mlflow

    uri, settings = (
        f"sqlite:///{database_of(campaign)}",
        {"parts": {"a//b (all)!": 1, "küche": 2, "k" * 300: 3}},
    )
    run = LoggedRun("odd keys", "r_s0", "r", 0, 1, 0, campaign / "runs" / "odd", settings, "", campaign)
    logger = mlflow.open_here(run, tracking_uri=uri, experiment="")
    kept = logger.client.get_run(logger.id).data.params
    assert kept == {"parts.a__b _all__": "1", "parts.küche": "2", f"parts.{'k' * 244}": "3"}


@pytest.mark.filterwarnings("ignore:.*loader strategy is deprecated")
def test_a_call_to_mlflow_that_fails_half_way_repeats_no_step_in_the_campaigns_own_file(campaign, tmp_path):
    from retrain.plugins.loggers import LoggedRun, mlflow

    file = database_of(campaign)
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name, f"{file.name}.lock"]
    shutil.copy(file, tmp_path / "mlflow.db")  # to make tables takes seconds
    run = LoggedRun("c", "r_s0", "r", 0, 1, 0, tmp_path / "runs" / "r_s0", {}, "", tmp_path)
    logger = mlflow.open_here(run, tracking_uri="", experiment="")
    before = (tmp_path / "mlflow.db").stat().st_mtime_ns

    real, calls = logger.client.log_batch, []

    def fail_second(*args, **kwargs):
        calls.append(len(kwargs["metrics"]))
        if len(calls) == 2:
            raise ConnectionError
        real(*args, **kwargs)

    logger.client.log_batch = fail_second
    rows = [{"step": step, "step_time_s": 0.1 * step, "loss": 1.0} for step in range(1, 1251)]
    with pytest.raises(ConnectionError):
        logger.rows(rows)
    logger.rows(rows)
    assert calls == [1000, 1000, 1000, 500]
    history = logger.client.get_metric_history(logger.id, "loss")
    assert [one.step for one in history] == list(range(1, 1251))
    assert (tmp_path / "mlflow.db").stat().st_mtime_ns > before


def test_no_key_is_written_anywhere(campaign):
    for path in campaign.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert b"0123456789" * 4 not in data, path
            assert b"canary-4711" not in data, path
