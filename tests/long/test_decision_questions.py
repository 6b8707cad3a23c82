"""`[decision] max_questions`: further questions are asked of finished runs before further seeds are run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, ConfigError
from retrain.campaign.run import reopen, start
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.plan.designs import further_questions
from retrain.plan.estimate.history import learn, read_run_times
from retrain.plan.estimate.wall_time import learned_for, workload_of
from retrain.plan.explain import Explanation, explain_plan
from retrain.plan.matrix import Plan
from retrain.plan.most_cost import most_cost
from retrain.plan.preflight import preflight
from retrain.records.decision import Questions, lines_of, read_looks
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts, read_done, worker_pids
from retrain.records.samples import read_outcomes
from retrain.results.report.compare import compare
from retrain.results.report.sides import choose
from retrain.results.status import survey
from tests.clocks import without_times
from tests.long.test_decision import decision_of, stopped_after
from tests.stopping import IN_TWO_WORKERS, INLINE, finish_inline, killed_at

OWN, ASKED = 3, 33  # questions of the evaluation, and those that its noise calls for here
FILE = f"""
[training]
batch_size = 2
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 0.01

[data]
task = "successor"
options = {{ held_out = 0.5 }}

[reward]
reward = "tests.reward_functions.spelled"

[[eval]]
name = "hard"
prompts = {OWN}
temperature = 1.0
every = 2

[decision]
metric = "eval_hard_reward"
max_seeds = 8
max_questions = 48

[budget.prices.numpy]
prefill = 0
cached = 0
sample = 2
train = 3

[campaign]
seeds = [1, 2]
max_steps = 2
retries = 20
pause_after = 0
launcher = "inline"

[[campaign.conditions]]
name = "plain"

[[campaign.conditions]]
name = "faster"
training.lr = 0.15
"""


@pytest.fixture
def file(here: Path) -> Path:
    path = here / "questions.toml"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign that nothing stopped; it is to be read."""
    directory = tmp_path_factory.mktemp("undisturbed")
    (directory / "questions.toml").write_text(FILE)
    log_dir = f"logging.log_dir='{directory / 'logs'}'"
    return start(directory / "questions.toml", [log_dir]).execute().directory


def test_a_forecast_counts_the_questions_that_may_be_asked_at_the_end(file: Path, undisturbed: Path) -> None:
    logs = undisturbed.parent

    def explained(most: int, logs: Path = logs) -> tuple[Plan, Explanation]:
        plan = plan_runs(load_config(file, [f"decision.max_questions={most}"]), file.name)
        history = learn(logs, plan.conditions)
        return plan, explain_plan(
            plan, preflight(plan, file.name), history, 1.0, file.name, learned_from=str(logs)
        )

    plan, explanation = explained(48)
    further, few = explanation.questions, explained(4)[1]
    assert few.questions is not None
    assert few.questions.expected == 4  # no more than may be asked
    assert further is not None
    assert (further.evaluation, further.asked, further.most) == ("hard", OWN, 48)
    assert further.expected is not None
    assert ASKED <= further.expected <= 48  # by 33 questions of eight seeds, where it was by 3 of six
    # six of eight seeds are asked anew
    assert further.added(ASKED, plan) == {"eval_hard_": pytest.approx(33 / 3 - 1 + 6 / 8)}
    assert further.added(OWN, plan) == {"eval_hard_": 0}
    assert explanation.wall_time is not None
    assert few.wall_time is not None
    assert explanation.wall_time.p50_s > few.wall_time.p50_s
    learned = learned_for(plan, learn(logs, plan.conditions), 1.0)
    assert learned is not None
    before, after = (workload_of(plan, replace(learned, further=each)) for each in ({}, {"eval_hard_": 2.0}))
    once_s = statistics.fmean(run.evals_s["eval_hard_"] for run in learned.history.runs)
    assert after.launching.closing_s - before.launching.closing_s == pytest.approx(2 * once_s)
    unknown = further_questions(plan, file.parent / "none")
    assert unknown is not None
    assert unknown.expected is None


def test_a_forecast_counts_an_evaluation_with_further_questions_as_one_of_its_own_size(
    file: Path, undisturbed: Path
) -> None:
    """Six seeds were asked again, and the seventh once."""
    by_seed = {}
    for seed in range(1, 8):
        name = f"plain_s{seed}"
        run, result = (
            read_run_times(CampaignFiles(undisturbed).run(name).directory),
            result_of(undisturbed, name),
        )
        assert run is not None
        assert run.evals_s["eval_hard_"] == pytest.approx(result["eval_hard_time_s"] * OWN / ASKED)
        assert run.billed.rest is not None
        by_seed[seed] = (
            run.billed.rest.prefill,
            *(each.prefill for each in run.billed.evaluations["eval_hard_"]),
        )
    steps, evaluations = 2 * 2 * 3, OWN * 3  # a prompt has two or three characters
    assert all(steps - 4 <= rest <= steps for rest, *_ in by_seed.values()), by_seed
    assert {evaluation for _, *several in by_seed.values() for evaluation in several} == {evaluations}


def result_of(directory: Path, run: str) -> Mapping[str, Any]:
    done = read_done(CampaignFiles(directory).run(run).done)
    assert done is not None
    return done.result


def records_of(directory: Path) -> dict[str, object]:
    """Return all rows, results, questions' rewards and looks of a campaign, without what a clock decides."""
    files, records = CampaignFiles(directory), dict[str, object]()
    for run in sorted(path.name for path in (directory / "runs").iterdir()):
        if rows := read_metrics(files.run(run).directory):
            result = {key: value for key, value in result_of(directory, run).items() if key[:7] != "resumed"}
            outcomes = read_outcomes(files.run(run).evals / "hard.jsonl")
            records[run] = without_times([*rows, result]), outcomes
    return records | {"looks": read_looks(files.looks)}


def test_finished_runs_are_asked_further_questions_before_the_first_look(undisturbed: Path) -> None:
    looks = read_looks(CampaignFiles(undisturbed).looks)
    assert looks.questions == Questions("hard", ASKED, OWN, pytest.approx(0.92, abs=0.005))
    assert [look.asked for look in looks.rounds] == [{"faster": 6}, {"faster": 7}]
    lines = CampaignFiles(undisturbed).looks.read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert events == ["design", "questions", "round", "round"]
    for run, value in looks.values.items():
        assert result_of(undisturbed, run)["eval_hard_questions"] == ASKED
        assert result_of(undisturbed, run)["eval_hard_prompts"] == ASKED
        assert result_of(undisturbed, run)["eval_hard_reward"] == value
    attempts = {run: len(read_attempts(CampaignFiles(undisturbed).run(run).attempts)) for run in looks.values}
    assert attempts == {run: 1 if run.endswith("_s7") else 2 for run in looks.values}


def test_a_finished_run_takes_no_step_again_and_keeps_its_rows(undisturbed: Path, file: Path) -> None:
    lines = [line for line in FILE.splitlines() if not line.startswith("max_questions")]
    file.write_text("\n".join(lines).replace("seeds = [1, 2]", "seeds = [1, 2, 3, 4, 5, 6]"))
    twin = start(file).execute().directory
    for run in (f"{name}_s{seed}" for name in ("plain", "faster") for seed in range(1, 7)):
        rows, its = (read_metrics(CampaignFiles(path).run(run).directory) for path in (undisturbed, twin))
        assert without_times(rows) == without_times(its)
        assert all(row["attempt"] == 1 for row in rows)
        assert result_of(twin, run)["eval_hard_prompts"] == its[-1]["eval_hard_prompts"] == OWN


def test_a_run_that_begins_later_asks_them_at_its_end_and_takes_the_same_steps(
    undisturbed: Path, file: Path
) -> None:
    file.write_text(FILE.replace("max_questions = 48", "").replace("[1, 2]", "[1, 2, 3, 4, 5, 6, 7]"))
    twin, run = start(file).execute().directory, "faster_s7"
    rows, its = (read_metrics(CampaignFiles(path).run(run).directory) for path in (undisturbed, twin))
    assert (rows[-1].pop("eval_hard_questions"), rows[-1]["eval_hard_prompts"]) == (ASKED, ASKED)
    of_training = (without_times(side) for side in (rows, its))
    mine, other = (
        [{k: v for k, v in row.items() if not k.startswith("eval_hard")} for row in side]
        for side in of_training
    )
    assert mine == other


def test_the_first_questions_are_those_of_the_evaluation(undisturbed: Path) -> None:
    outcomes = [
        read_outcomes(CampaignFiles(undisturbed).run(run).evals / "hard.jsonl")[step]
        for run, step in (("plain_s1", 0), ("plain_s1", 2), ("plain_s7", 2))
    ]
    before, again, later = map(list, outcomes)
    assert (before, len(again), later) == (again[:OWN], ASKED, again)


def test_status_says_what_is_asked_of_how_many_runs(undisturbed: Path, file: Path) -> None:
    said = "hard asks 33 questions instead of 3: the choice of 3 was 92% of the noise of a seed's difference"
    assert said in lines_of(decision_of(undisturbed))
    stopped = stopped_after(file, 15)
    assert stopped.exit_code == EXIT_INTERRUPTED
    assert f"{said}; 9 finished runs still to ask" in lines_of(decision_of(stopped.directory))
    assert survey(stopped.directory)[0].state == "interrupted"


def test_a_comparison_tells_no_gain_over_other_questions(undisturbed: Path) -> None:
    metric, own = compare(*choose([str(undisturbed)]), ["eval_hard_reward", "eval_reward"]).metrics
    assert [side.gain for side in metric.sides] == [None, None]
    assert None not in [side.gain for side in own.sides]


@pytest.mark.parametrize("runs", [5, 12, 13, 20, 24, 25])
def test_a_stopped_campaign_asks_the_same_and_comes_to_the_same_verdicts(
    undisturbed: Path, file: Path, runs: int
) -> None:
    stopped = stopped_after(file, runs).directory
    CampaignFiles(stopped).manifest.unlink()
    assert reopen(stopped).execute().exit_code == EXIT_DONE
    assert records_of(stopped) == records_of(undisturbed)
    assert decision_of(stopped) == decision_of(undisturbed)


def attempts_begun(directory: Path, count: int) -> bool:
    lines = (path.read_text().count('"begin"') for path in directory.glob("logs/*/runs/*/attempts.jsonl"))
    return sum(lines) >= count


def test_kills_while_asking_change_no_row_no_result_and_no_verdict(
    undisturbed: Path, file: Path, here: Path
) -> None:
    file.write_text(FILE.replace(INLINE, IN_TWO_WORKERS))
    directory = killed_at((7, 15, 20, 27, 31), attempts_begun, file, here / "killed")
    finish_inline(directory)
    assert records_of(directory) == records_of(undisturbed)
    assert decision_of(directory) == decision_of(undisturbed)


def test_killed_workers_ask_again(undisturbed: Path, file: Path, here: Path) -> None:
    file.write_text(FILE.replace(INLINE, IN_TWO_WORKERS))
    orchestrator = subprocess.Popen(
        [sys.executable, "-m", "retrain", "run", str(file)], stderr=subprocess.DEVNULL
    )
    killed, until = set[int](), time.monotonic() + 300
    while orchestrator.poll() is None and time.monotonic() < until:
        if len(killed) < 5 and attempts_begun(here, 13):
            for pid in set().union(*(worker_pids(runs) for runs in here.glob("logs/*/runs"))) - killed:
                with contextlib.suppress(ProcessLookupError):  # it may just have ended
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(0.005)
    (directory,) = (here / "logs").iterdir()
    assert (orchestrator.wait(), len(killed) >= 3) == (EXIT_DONE, True)
    assert records_of(directory) == records_of(undisturbed)
    assert decision_of(directory) == decision_of(undisturbed)


def test_seeds_that_the_user_adds_are_asked_as_many(undisturbed: Path, file: Path) -> None:
    directory = start(file).execute().directory
    assert reopen(directory, more_seeds=1).execute().exit_code == EXIT_DONE
    assert result_of(directory, "plain_s9")["eval_hard_questions"] == ASKED
    assert decision_of(directory).conditions == decision_of(undisturbed).conditions


def test_a_design_without_them_asks_the_evaluations_own_again(file: Path) -> None:
    directory = start(file).execute().directory
    toml = CampaignFiles(directory).campaign_toml
    toml.write_text(toml.read_text().replace("max_questions = 48", ""))
    with pytest.raises(ConfigError, match=r"decision.max_questions: 48 -> None"):
        reopen(directory)
    assert reopen(directory, accept_config_change=True).execute().exit_code == EXIT_DONE
    assert "eval_hard_questions" not in result_of(directory, "plain_s1")
    assert decision_of(directory).questions is None


def test_data_that_hold_out_fewer_by_then_fail_the_runs_and_decide_nothing(file: Path) -> None:
    stopped = CampaignFiles(stopped_after(file, 13).directory)
    stopped.looks.write_text(stopped.looks.read_text().replace(f'"count": {ASKED}', '"count": 51'))
    assert reopen(stopped.directory).execute().exit_code == EXIT_RUN_FAILED
    message = read_attempts(stopped.run("plain_s2").attempts)[-1].message
    assert "all runs are asked 51 questions of [[eval]] 'hard', and its task holds out 50 now" in message
    found = decision_of(stopped.directory)
    assert (found.ended, found.conditions[0].verdict) == ("failed", "undecided")


def test_the_highest_cost_counts_them_and_the_bill_has_them(undisturbed: Path, file: Path) -> None:
    plans = [plan_runs(load_config(file, ["decision.max_questions=48"]), file.name)]
    without = file.read_text().replace("max_questions = 48\n", "").replace("[1, 2]", "[1, 2, 3, 4, 5, 6]")
    (file.parent / "without.toml").write_text(without)
    plans.append(plan_runs(load_config(file.parent / "without.toml"), file.name))
    most = [most_cost(plan, preflight(plan, "c").readings) for plan in plans]
    assert most[0] is not None
    assert most[1] is not None
    assert most[0].campaign_usd - most[1].campaign_usd == pytest.approx(16 * 48 * 4 * 2e-6)
    bills = [
        survey(start(path).execute().directory)[0].cost_usd for path in (file, file.parent / "without.toml")
    ]
    assert bills[0] is not None
    assert bills[1] is not None
    assert most[0].campaign_usd >= bills[0] > bills[1]


def test_where_questions_are_little_of_the_noise_no_run_is_asked_more(file: Path) -> None:
    file.write_text(FILE.replace("lr = 0.15", "lr = 0.3"))
    directory = start(file).execute().directory
    questions = read_looks(CampaignFiles(directory).looks).questions
    assert questions == Questions("hard", OWN, OWN, pytest.approx(0.33, abs=0.005))
    said = "hard goes on with 3 questions: the choice of 3 was 33% of the noise of a seed's difference"
    assert said in lines_of(decision_of(directory))
    for run in (f"{name}_s{seed}" for name in ("plain", "faster") for seed in range(1, 7)):
        assert len(read_attempts(CampaignFiles(directory).run(run).attempts)) == 1
        assert "eval_hard_questions" not in result_of(directory, run)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_questions = 48": "max_questions = 1"}, r"max_questions.*got 1"),
        (
            {"max_questions = 48": "max_questions = 3"},
            r"max_questions.*got 3; .*'hard' asks 3 prompts already",
        ),
        ({"max_questions = 48": "max_questions = 51"}, r"got 51; .*'hard' has 50 held-out prompts; lower it"),
        ({"max_seeds = 8": "max_seeds = 5"}, r"got 48; 6 seeds tell how many.*max_seeds is 5; raise it"),
        ({"max_seeds = 8": "rungs = [1, 2]"}, r"got 48; .*run's end only: remove it, or rungs"),
        ({"max_seeds = 8": 'over = "whole"'}, r"got 48; .*run's end only: remove it, or over"),
        ({"max_seeds = 8": 'per = "tokens"\nover = [0, 9]'}, r"got 48; .*run's end only: remove it, or per"),
        ({"eval_hard_reward": "mean_reward"}, r"got 48; \"mean_reward\" is of no \[\[eval\]\]"),
        ({"eval_hard_reward": "eval_correct_rate"}, r"got 48; \"eval_correct_rate\" is of no \[\[eval\]\]"),
        (
            {
                "temperature = 1.0\nevery": "temperature = 1.0\nsamples = 2\nevery",
                "eval_hard_reward": "eval_hard_pass_at_2",
            },
            r"got 48; \"eval_hard_pass_at_2\" is of no",
        ),
        (
            {'launcher = "inline"': 'launcher = "inline"\n[campaign.search]\nrungs = [1]'},
            r"got 48; a search asks no further",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused(file: Path, changes: Mapping[str, str], problem: str) -> None:
    text = FILE
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        preflight(plan_runs(load_config(file), file.name), file.name)
