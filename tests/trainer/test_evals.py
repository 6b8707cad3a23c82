"""`[[eval]]`: evaluations of a run that are not its reward, and change nothing that they measure."""

from __future__ import annotations

import dataclasses
import json
import threading
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from benchmarks import signs
from retrain.base.errors import ConfigError
from retrain.cli.render.status import warnings
from retrain.config.load import parse
from retrain.config.resolve import as_tables, build
from retrain.config.schema import Config
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight
from retrain.records.files import record_of
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_row import RunEntry, read_run
from retrain.records.run_state import read_attempts, read_done
from retrain.records.samples import OutcomesWriter, read_outcomes
from retrain.results.report.gather import gather
from retrain.results.report.sides import Side
from retrain.results.report.signs import signs_of_cheating
from retrain.trainer import worker
from retrain.trainer.evaluation import WINDOW, Falling, standard_error
from tests.clocks import without_times
from tests.plugins import CALLS_LEFT, AsksToStop
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import SMALL, make_run, train

HARD = {
    "name": "hard",
    "task": "copy",
    "reward": "partial",
    "every": 2,
    "prompts": 4,
    "samples": 3,
    "temperature": 1.0,
}
SCORED = {"reward": "tests.reward_functions.at_random"}


def with_evals(*tables: dict, **sections: object) -> dict:
    training = {**SMALL["training"], "eval_at_start": False}
    return {**SMALL, "training": training, **sections, "eval": list(tables)}


def rows_of(files: RunFiles, name: str = "") -> list[dict]:
    """The rows' evaluations of this name, or all but evaluations."""

    def belongs(key: str) -> bool:
        return key.startswith(f"eval_{name}_") if name else not key.startswith("eval_")

    rows = without_times(read_metrics(files.directory))
    return [{key: value for key, value in row.items() if belongs(key)} for row in rows]


def outcomes(files: RunFiles, name: str = "hard") -> dict:
    return read_outcomes(files.evals / f"{name}.jsonl")


def test_a_run_takes_the_same_steps_with_and_without_evaluations(tmp_path: Path) -> None:
    bare = train(tmp_path / "bare")
    full = train(tmp_path / "full", with_evals(HARD, {"name": "same", "every": 1}))
    assert rows_of(full) == rows_of(bare)
    assert [bool(row) for row in rows_of(full, "hard")] == [False, True] * 3
    assert all(rows_of(full, "same"))


def test_an_evaluation_is_the_same_beside_others(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", with_evals(HARD))
    among = train(tmp_path / "among", with_evals({**HARD, "name": "other"}, HARD))
    assert outcomes(alone) == outcomes(among)
    assert outcomes(alone) != outcomes(among, "other")  # each samples for itself


def test_each_question_is_kept_and_counts_once(tmp_path: Path) -> None:
    files = train(tmp_path / "r", with_evals({**HARD, **SCORED}))
    found = outcomes(files)
    assert {step: len(questions) for step, questions in found.items()} == {2: 4, 4: 4, 6: 4}
    rates = np.mean(np.array(list(found[6].values())) >= 1, axis=1)
    row = read_metrics(files.directory)[-1]
    assert row["eval_hard_correct_rate"] == pytest.approx(np.mean(rates))
    assert row["eval_hard_correct_rate_se"] == pytest.approx(np.std(rates, ddof=1) / 2)
    rewards = np.mean(np.array(list(found[6].values())), axis=1)
    assert row["eval_hard_reward_se"] == pytest.approx(np.std(rewards, ddof=1) / 2)
    assert row["eval_hard_pass_at_3"] == pytest.approx(np.mean(rates > 0))
    assert row["eval_hard_prompts"] == 4


def test_standard_errors_are_over_questions() -> None:
    assert standard_error(np.array([0.0, 1.0, 1.0, 0.0])) == pytest.approx((1 / 3) ** 0.5 / 2)
    assert standard_error(np.array([1.0])) is None


def test_a_run_stopped_half_way_evaluates_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    raw = with_evals(HARD, {"name": "end", "prompts": 3})
    raw["training"] = {**raw["training"], "save_every": 3}
    whole, broken = train(tmp_path / "whole", raw), make_run(tmp_path / "broken", raw)
    assert worker.run(broken.directory, StopAfterStep(broken, step=3)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    assert [outcomes(broken, name) for name in ("hard", "end")] == [
        outcomes(whole, name) for name in ("hard", "end")
    ]
    assert rows_of(broken, "hard") == rows_of(whole, "hard")


@pytest.mark.parametrize("every", [0, 3])
def test_the_last_policy_is_evaluated_once(tmp_path: Path, every: int) -> None:
    files = train(tmp_path / "r", with_evals({**HARD, **SCORED, "every": every}))
    done, lines = read_done(files.done), (files.evals / "hard.jsonl").read_text().splitlines()
    assert done is not None
    assert done.result["eval_hard_prompts"] == 4
    assert len(lines) == 4 * (1 if every == 0 else 2)


GUESSING = {"task": "tests.plugins.held_out_secrets"}
TURNS = {"max_turns": 3, "turn_reward": "sum"}
ASKED = {"every": 3, "samples": 100, "temperature": 1.0}


def test_episodes_are_played_in_the_run_s_environment_or_in_another(tmp_path: Path) -> None:
    game = {"data": GUESSING, "environment": {"environment": "guess", **TURNS}}
    own = {"name": "own", **ASKED}
    scored = {"name": "scored", "reward": "match", **ASKED}
    single = {"name": "single", "environment": "single_turn", "reward": "match", **ASKED}
    files = train(tmp_path / "game", with_evals(own, scored, single, **game))
    bare = train(tmp_path / "bare", with_evals(**game))
    assert rows_of(files) == rows_of(bare)
    other = {"data": GUESSING, "environment": {"environment": "single_turn", **TURNS}}
    alone = train(tmp_path / "alone", with_evals({**own, "environment": "guess"}, **other))
    rewards = {name: rewards_of(files, name) for name in ("own", "scored", "single")}
    assert rewards["own"] - {0.0, 1.0}  # a game is worth something before its end
    assert rewards["scored"] == rewards["single"] == {0.0, 1.0}  # the evaluation's own reward
    assert rewards_of(alone, "own") - {0.0, 1.0}
    assert not any("turns_mean" in row for row in rows_of(alone))  # the run itself has none


def test_a_stop_reaches_episodes_of_an_environment_of_an_evaluation_s_own(tmp_path: Path) -> None:
    own = {"name": "own", "every": 3, "environment": "tests.plugins.AsksToStop"}
    raw = with_evals(own, data=GUESSING)
    whole, stopped = train(tmp_path / "whole", raw), make_run(tmp_path / "stopped", raw)
    AsksToStop.STOP.clear()
    assert worker.run(stopped.directory, AsksToStop.STOP) == 130
    assert [len(rows_of(stopped)), rows_of(stopped, "own")[-1]] == [3, {}]
    assert worker.run(stopped.directory, threading.Event()) == 0
    assert rows_of(stopped, "own") == rows_of(whole, "own")


def rewards_of(files: RunFiles, name: str) -> set[float | None]:
    found = outcomes(files, name)
    return {reward for step in found.values() for rewards in step.values() for reward in rewards}


def test_an_environment_that_an_evaluation_names_is_checked_with_the_run() -> None:
    tools = {"name": "b", "environment": "tools", "environment_options": {"tools": ["tests.plugins.doubled"]}}
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(with_evals(tools), "c.toml")), "c.toml")
    assert '[[eval]] "b".environment: has functions, which a policy sees only if' in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ("tools", {"calls": "python", "call_limit_s": 1e6}, " [environment_options].call_limit_s: got 1e+06"),
        ("harness", {"run": "json.dumps"}, " [environment_options].run: 'json.dumps' is ("),
        ("types.SimpleNamespace", {}, ".environment: 'types.SimpleNamespace' returned a SimpleNamespace"),
    ],
)
def test_what_is_wrong_with_an_evaluation_s_environment_is_told_at_its_own_key(
    environment: str, options: dict[str, Any], said: str
) -> None:
    own = {"name": "b", "environment": environment, "environment_options": options}
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(with_evals(own), "c.toml")), "c.toml")
    assert str(caught.value).startswith(f'c.toml [[eval]] "b"{said}')


def test_a_step_that_is_repeated_replaces_its_outcomes(tmp_path: Path) -> None:
    for attempt, steps in ((1, (2, 4)), (2, (2,))):
        writer = OutcomesWriter(tmp_path / "evals", attempt)
        for step in steps:
            writer.append("hard", step, {7: [float(attempt), None]})
        writer.close()
    path = tmp_path / "evals" / "hard.jsonl"
    with path.open("a") as file:
        file.write('{"step": 4, "attempt": 2, "question": 7, "rewa')
    assert read_outcomes(path) == {2: {7: [2.0, None]}}


def test_a_resolved_config_with_evaluations_survives_toml() -> None:
    config = plan_runs(parse(with_evals({**HARD, "options": {"length": 2}}), "c")).runs[0].config
    again = build(Config, tomllib.loads(tomli_w.dumps(as_tables(config))))
    assert again == config
    assert parse(as_tables(config), "run.toml").eval == config.eval


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"name": "No"}, '[[eval]] #1.name: got "No"; needs lower-case letters'),
        ({"name": ""}, '[[eval]] #1.name: got ""'),
        ({"nane": "a"}, "[[eval]] #1.nane: unknown key; did you mean 'name'?"),
        ({"every": -1}, "[[eval]] #1.every: got -1; needs at least 0"),
        ({"samples": 2}, "[[eval]] #1.samples: got 2, which would all be the same"),
        ({"temperature": 1e-300}, "[[eval]] #1.temperature: got 1e-300; needs 0, the likeliest token, or"),
        ({"max_tokens": 5}, "[[eval]] #1.max_tokens: got 5; needs at most training.max_tokens = 4"),
        ({"task": "cpoy"}, "[[eval]] #1.task: 'cpoy' is not a known task; did you mean 'copy'?"),
        ({"options": {"length": 2}}, "[[eval]] #1.options: has no effect; set task"),
        ({"task": "copy", "options": {"lenght": 2}}, "[[eval]] #1 [options].lenght: unknown parameter"),
        ({"params": {"power": 2}}, "[[eval]] #1.params: has no effect; set reward"),
        ({"environment_options": {"a": 1}}, "[[eval]] #1.environment_options: has no effect; set env"),
        ({"environment": "gues"}, "[[eval]] #1.environment: 'gues' is not a known environment; did you"),
        (
            {"environment": "guess", "environment_options": {"a": 1}},
            "[[eval]] #1 [environment_options].a: un",
        ),
        ({"reward": "partial", "params": {"power": "x"}}, "[[eval]] #1 [params].power: got 'x'"),
    ],
)
def test_each_problem_says_where_what_and_how_to_fix(table: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(with_evals({"name": "hard", **table}), "c.toml")
    assert f"c.toml {says}" in str(caught.value)


def test_no_evaluation_samples_more_tokens_than_a_condition() -> None:
    conditions = [{"name": "long"}, {"name": "short", "training": {"max_tokens": 2}}]
    file = with_evals({"name": "hard", "max_tokens": 3}, campaign={"seeds": [0], "conditions": conditions})
    with pytest.raises(
        ConfigError, match=r"got 3; needs at most training\.max_tokens = 2, the least of the cond"
    ):
        parse(file, "c.toml")
    file["campaign"]["conditions"][1]["training"]["max_tokens"] = 3
    parse(file, "c.toml")


def test_two_evaluations_of_one_name_and_a_single_bracket_are_refused() -> None:
    with pytest.raises(ConfigError, match='"hard" names 2 evaluations'):
        parse(with_evals(HARD, HARD), "c.toml")
    with pytest.raises(ConfigError, match=r"\[\[eval\]\]: got a single table; write \[\[eval\]\] in double"):
        parse({**SMALL, "eval": {"name": "hard"}}, "c.toml")


def test_evaluations_without_prompts_or_with_strange_ones_are_refused_before_anything_starts() -> None:
    nothing = {"name": "a", "task": "tests.plugins.nothing_held_out"}
    strange = {"name": "b", "task": "tests.plugins.umlauts"}
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(with_evals(nothing, strange), "c.toml")), "c.toml")
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        "c.toml [[eval]] \"a\".task: 'tests.plugins.nothing_held_out' holds out no prompts"
    )
    assert second.startswith("c.toml [[eval]] \"b\".task: prompt 0 holds 'ä', which is not in the alphabet")


def test_explain_warns_of_an_evaluation_that_asks_what_is_trained_on() -> None:
    data = {"task": "sort", "options": {"length": 1}}
    tables = {"name": "same"}, {"name": "other", "task": "sort", "options": {"length": 1, "held_out": 0.9}}
    warned = preflight(plan_runs(parse(with_evals(*tables, data=data), "c.toml")), "c.toml").warnings
    assert [line.partition(" of its")[0] for line in warned] == ['[[eval]] "other": 8']


def falling_after(scores: list[list[float]], rewards: list[float]) -> str:
    watched = Falling()
    for step, (found, reward) in enumerate(zip(scores, rewards, strict=True), start=1):
        for _ in range(WINDOW):
            watched.trained(reward)
        watched.evaluated("hard", step, dict(enumerate(found)), looks=len(scores))
        watched = record_of(
            Falling, json.loads(json.dumps(dataclasses.asdict(watched)))
        )  # as a checkpoint does
    return watched.watch().falling


def test_an_evaluation_that_falls_while_the_reward_rises_is_named() -> None:
    right, wrong = [1.0] * 20, [1.0] * 8 + [0.0] * 12
    assert (
        falling_after([right, wrong], [0.2, 0.4])
        == "hard fell from a reward of 1.00 at step 1 to 0.40 at step 2"
    )
    assert falling_after([right, wrong], [0.4, 0.2]) == ""  # both fall
    assert falling_after([right, wrong, right], [0.2, 0.4, 0.6]) == ""  # it recovered
    assert falling_after([right, [*right[:-1], 0.0]], [0.2, 0.4]) == ""  # one question is chance


def test_a_fall_of_few_questions_may_be_chance_where_that_of_many_is_none() -> None:
    """By five standard errors of three questions in one of fifty, with two degrees of freedom."""
    right, fell = [1.0, 0.75, 1.0], [0.5, 0.5, 0.5]
    assert falling_after([right, fell], [0.2, 0.4]) == ""
    assert falling_after([right * 4, fell * 4], [0.2, 0.4]) != ""


def test_chance_names_few_runs_at_any_of_their_evaluations() -> None:
    """64 questions, each as likely to be right at all 20: a limit for one look names one run in seven."""
    draws, named = np.random.default_rng(0), 0
    for chances in draws.beta(1.2, 0.8, (100, 64)):
        watched, seen = Falling(), set()
        for look in range(1, 21):
            watched.trained(float(look))
            right = draws.binomial(1, chances).astype(float)
            watched.evaluated("hard", look, dict(enumerate(right)), looks=20)
            seen.add(watched.watch().falling)
        named += seen != {""}
    assert named <= 8


def test_an_evaluation_that_wanders_while_the_reward_does_not_rise_is_rarely_named() -> None:
    named = 0
    for run in range(40):
        rng = np.random.default_rng(run)
        reward, level = signs.noise(rng, 0.9, 0.05), signs.noise(rng, 0.9, 0.1)
        named += signs.is_fall_named(rng, reward, level)
    assert named <= 2


def test_a_fall_from_the_start_is_seen_where_the_start_is_evaluated(tmp_path: Path) -> None:
    at_first = {"name": "hard", "reward": "tests.reward_functions.worse_and_worse", "every": 5}
    rising = {"reward": {"reward": "tests.reward_functions.better_and_better"}}
    unseen = train(tmp_path / "unseen", with_evals(at_first, **rising))
    seen = train(tmp_path / "seen", with_evals({**at_first, "at_start": True}, **rising))
    assert rows_of(seen) == rows_of(unseen)
    assert read_metrics(unseen.directory)[-1]["eval_falling"] == ""
    says = "hard fell from a reward of 0.80 at step 0 to 0.20 at step 5"
    assert read_metrics(seen.directory)[-1]["eval_falling"] == says
    assert outcomes(seen).keys() - outcomes(unseen).keys() == {0}


def test_a_falling_evaluation_is_shown_by_status_and_report(tmp_path: Path) -> None:
    raw = with_evals({"name": "hard", "reward": "tests.reward_functions.worse_and_worse", "every": 2})
    raw["reward"] = {"reward": "tests.reward_functions.better_and_better"}
    files = train(tmp_path / "r", raw)
    says = "hard fell from a reward of 0.80 at step 2 to 0.20 at step 6"
    assert [row["eval_falling"] for row in read_metrics(files.directory)][::5] == ["", says]
    row = read_run(RunEntry("r", "a", 0, 6), files).row
    assert row.eval_falling == says
    assert "but " + says in "".join(str(line) for line in warnings([row]))
    run = dataclasses.replace(gather(files.directory).runs[0])
    assert [sign for sign in signs_of_cheating([Side("a", (run,))]) if says in sign]


@pytest.mark.parametrize("step", [2, 6])
def test_no_evaluation_begins_after_a_stop_and_the_next_attempt_makes_it(tmp_path: Path, step: int) -> None:
    """A job that a cluster ends soon would lose the step, and those since its last checkpoint, to it."""
    raw = with_evals(HARD, reward={"reward": "tests.plugins.asks_to_stop"})
    whole, stopped = train(tmp_path / "whole", raw), make_run(tmp_path / "stopped", raw)
    AsksToStop.STOP.clear()
    CALLS_LEFT.extend([None] * 12 * step)  # until the end of the step
    assert worker.run(stopped.directory, AsksToStop.STOP) == 130
    assert [len(rows_of(stopped)), rows_of(stopped, "hard")[-1]] == [step, {}]
    assert "left to the next attempt; a checkpoint was saved" in read_attempts(stopped.attempts)[-1].message
    assert worker.run(stopped.directory, threading.Event()) == 0
    assert rows_of(stopped, "hard") == rows_of(whole, "hard")
    assert outcomes(stopped) == outcomes(whole)


@pytest.mark.parametrize("step", [2, 6])
def test_a_stop_during_an_evaluation_leaves_the_others_to_the_next_attempt(tmp_path: Path, step: int) -> None:
    first = {**HARD, "name": "first", "reward": "tests.plugins.asks_to_stop"}
    raw = with_evals(first, HARD)
    whole, stopped = train(tmp_path / "whole", raw), make_run(tmp_path / "stopped", raw)
    AsksToStop.STOP.clear()
    CALLS_LEFT.extend([None] * 12 * (step // 2))  # until the end of the step's first evaluation
    assert worker.run(stopped.directory, AsksToStop.STOP) == 130
    assert (step in outcomes(stopped, "first"), step in outcomes(stopped)) == (True, False)
    lines = (stopped.evals / "first.jsonl").read_text()
    assert worker.run(stopped.directory, threading.Event()) == 0
    assert (stopped.evals / "first.jsonl").read_text().startswith(lines)
    assert len(outcomes(stopped, "first")) * 4 == (stopped.evals / "first.jsonl").read_text().count("\n")
    for name in ("first", "hard"):
        assert rows_of(stopped, name) == rows_of(whole, name)
        assert outcomes(stopped, name) == outcomes(whole, name)
