"""`retrain status` as tables: what many runs have in common is said once."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from retrain.cli.render.status import MOST_MESSAGES, show, time_left
from retrain.records.decision import ConditionDecision, Decision, ending_of, verdict_of
from retrain.records.run_row import RunRow
from retrain.records.windows import Window
from retrain.results.status import CampaignStatus
from tests.cli.test_watch_frame import campaign_of, run_of


def shown(runs: list[RunRow], width: int = 200) -> str:
    return printed(campaign_of(runs, state="failed").status, width)


def printed(status: CampaignStatus, width: int = 200) -> str:
    out = io.StringIO()
    show(status, Console(file=out, width=width, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("condition", ["grpo", "advantage=grpo lr=0.00004 batch=64"])
@pytest.mark.parametrize(("width", "also"), [(32, ""), (40, "9/10"), (56, "0.25")])
def test_a_narrow_terminal_shows_each_runs_mean_reward(condition: str, width: int, also: str) -> None:
    figures = {"reward_first": 0.01, "reward_mean": 0.98, "eval_reward": 0.25, "phase": "train", "step": 9}
    runs = [run_of(condition, seed=s, state="running", max_steps=10, **figures) for s in (0, 1)]
    lines = [line for line in shown(runs, width).splitlines() if " running " in line and "_s" in line]
    assert [line.partition("   ")[0][-3:] for line in lines] == ["_s0", "_s1"]
    assert [" 0.98 " in line and (also in line or condition != "grpo") for line in lines] == [True, True]


def test_a_narrow_terminal_shows_each_conditions_mean_reward() -> None:
    runs = [run_of("a" * 50, seed=s, state="done", reward_mean=0.25 * s) for s in range(1, 4)]
    [line] = [line for line in shown(runs, 40).splitlines() if "0.500 ± " in line]
    assert "a…a" in line
    assert "0.500 ± 0.250" in line


def test_a_reward_says_over_how_many_steps_it_is() -> None:
    figures = {"reward_first": 0.0, "reward_mean": 0.5, "reward_steps": 10}
    runs = [run_of("grpo", seed=s, state="done", **figures) for s in (0, 1)]
    assert "reward: mean over the last 10 steps" in shown(runs, 40)
    assert "reward: " not in shown(runs[:1], 200)  # its header says so
    assert "reward: mean over the last 10 steps" in shown(runs[:1], 40)
    assert "reward, step 1 -> last 10 " in shown(runs[:1], 200)
    assert " - -> 0.50 " in shown([replace(runs[0], reward_first=None)], 200)  # its first step had no score
    longer = replace(runs[0], reward_steps=40)
    assert "reward, step 1 -> last 10 to 40 " in shown([*runs, longer], 200)


def test_of_many_conditions_those_left_out_are_counted() -> None:
    runs = [run_of(f"c{number}", state="done") for number in range(200)]
    lines = shown(runs).splitlines()
    assert len(lines) < 40
    assert "  ... and 170 more conditions; --json lists all" in lines


def test_means_over_different_seeds_say_of_which_they_are() -> None:
    ran = {"a": range(5), "b": range(3)}
    runs = [run_of(name, seed=s, state="done", reward_mean=0.5) for name, seeds in ran.items() for s in seeds]
    assert [row.reward_of for row in campaign_of(runs).status.conditions] == [
        "5 seeds: 0, 1, 2, 3, 4",
        "3 seeds: 0, 1, 2",
    ]
    status = replace(campaign_of(runs).status, decision=decision_of(ConditionDecision("b", "worse", 3)))
    assert "these means are of different seeds" in printed(status)
    same = [run for run in runs if run.seed in ran["b"]]
    assert {row.reward_of for row in campaign_of(same).status.conditions} == {""}


def test_long_names_are_cut_before_failures_are_left_out() -> None:
    runs = [run_of("a" * 40, seed=s, state="failed") for s in range(3)]
    table = shown(runs, 80).partition("condition")[2]
    assert "failed" in table.splitlines()[0]


def test_runs_that_failed_alike_share_a_line() -> None:
    lost = [run_of(seed=s, state="infrastructure", message="connection refused") for s in range(500)]
    told = shown([*lost, run_of("maxrl", state="failed", message="no such task")]).splitlines()
    assert [line for line in told if "refused" in line] == [
        "grpo_s0, grpo_s1, grpo_s2 and 497 more infrastructure: connection refused"
    ]
    assert "maxrl_s0 failed: no such task" in told


def test_the_verdicts_of_a_decision_are_the_last_lines() -> None:
    verdicts = tuple(ConditionDecision(name, "better", 4, 0.5, variance_removed=0.1) for name in ("b", "c"))
    found = Decision("mean_reward", "a", 0.05, 8, 12, 4, "decided", conditions=verdicts)
    runs = [run_of("a", state="done", message="wandb lacks 3 rows"), run_of("b", state="done")]
    status = campaign_of(runs, state="done").status
    *_, before, first, last = printed(replace(status, decision=found)).splitlines()
    assert before == "each comparison has its verdict, so no seeds are added: 4 runs saved of 16"
    assert [first[:15], last[:15]] == ["b: better than ", "c: better than "]


def decision_of(*conditions: ConditionDecision, ended: str = "") -> Decision:
    return Decision("mean_reward", "a", 0.05, 8, 12, 4, ended, conditions=conditions)


def test_a_verdict_has_an_interval_with_its_level_also_where_the_seeds_are_too_few_for_the_looks() -> None:
    few = ConditionDecision("b", "no_difference", 3, -0.009, alone_low=-0.028, alone_high=0.009)
    assert verdict_of(few, decision_of(few)) == (
        "b: no difference from a found in mean_reward after 3 seeds: difference -0.009 (95 % interval -0.028 "
        "to +0.009, which does not allow for the looks: too few seeds for one that does); further seeds, at "
        "most 8 in all, would probably show no difference"
    )
    touching = ConditionDecision("b", "undecided", 8, -0.02, -0.049, 8.84e-14)
    assert "(95 % interval -0.049 to 0.000)" in verdict_of(touching, decision_of(touching))
    found = ConditionDecision("b", "better", 7, 0.138, 0.046, 0.23)
    assert verdict_of(found, decision_of(found)) == (
        "b: better than a in mean_reward after 7 seeds: difference +0.138 (95 % interval +0.046 to +0.230), "
        "found early, which overestimates differences"
    )


def test_a_condition_whose_first_seeds_have_not_all_come_is_not_looked_at_yet() -> None:
    first = ConditionDecision("b", "continue", 0)
    assert verdict_of(first, decision_of(first)) == (
        "b: still compared with a in mean_reward; not looked at yet"
    )
    promoted = replace(first, rung=200.0)
    rungs = replace(decision_of(promoted), window=Window("steps", 0), rungs=(100.0, 200.0))
    assert verdict_of(promoted, rungs) == (
        "b: still compared with a in mean_reward over steps 1 to 200; not looked at yet"
    )


def test_equal_values_have_no_interval_but_are_called_the_same() -> None:
    same = ConditionDecision("b", "no_difference", 4, 0.0, alone_low=0.0, alone_high=0.0)
    assert "difference 0.000 (the same value with each seed); further" in verdict_of(same, decision_of(same))


def test_a_difference_that_matters_is_named_only_where_the_file_says_which_does() -> None:
    wide, narrow = (ConditionDecision("b", "no_difference", 6, 0.01, -end, end) for end in (0.05, 0.02))
    matters = "a difference of 0.03, the smallest that matters"

    def last_words(of: ConditionDecision, smallest: float | None = None) -> str:
        return verdict_of(of, replace(decision_of(of), smallest_difference=smallest)).split("; ")[-1]

    assert last_words(wide) == "further seeds, at most 8 in all, would probably show no difference"
    assert last_words(wide, 0.03) == f"further seeds, at most 8 in all, would probably show no {matters[2:]}"
    assert last_words(narrow, 0.03) == f"{matters}, is excluded"
    assert last_words(replace(narrow, seeds=8), 0.03) == f"{matters}, is excluded"


def test_seeds_are_said_to_be_added_only_for_what_is_open() -> None:
    lost, still = ConditionDecision("b", "undecided", 3), ConditionDecision("c", "continue", 3)
    added = "seeds are added until a verdict is found, at most 8 of each condition"
    assert ending_of(decision_of(still)) == added
    assert ending_of(decision_of(lost, still)) == added.replace("added", "added for c")


def test_messages_that_all_differ_are_counted() -> None:
    runs = [run_of(seed=s, state="failed", message=f"line {s}") for s in range(MOST_MESSAGES + 7)]
    told = shown(runs)
    assert told.count("failed: line") == MOST_MESSAGES
    assert "and 7 other messages: --json has them all" in told


def test_a_finished_run_says_what_its_loggers_lack() -> None:
    assert "grpo_s0 done: wandb lacks 3 rows" in shown([run_of(state="done", message="wandb lacks 3 rows")])
    assert "done:" not in shown([run_of(state="done")])


def test_a_run_whose_completions_lack_scores_is_named_with_the_first_reason() -> None:
    told = shown([run_of(unscored_fraction=0.3125, unscored_reason="judge.py:9: UnscoredError: 503")])
    assert "grpo_s0: 31.2 % of completions have no score; the first: judge.py:9: UnscoredError: 503" in told


@pytest.mark.parametrize(
    ("budget_usd", "said"),
    [
        (None, "about 1 min 40 s left (P90 3 min 20 s)"),
        (20.0, "about 1 min 40 s left (P90 3 min 20 s)"),
        (12.0, "about 1 min 40 s left (P90 3 min 20 s), but the budget ends it in about 20 s"),
        (9.0, "about 1 min 40 s left (P90 3 min 20 s), but the budget ends it in about 0 s"),
    ],
)
def test_the_time_left_says_when_a_budget_ends_the_campaign_sooner(
    budget_usd: float | None, said: str
) -> None:
    half = campaign_of([run_of()]).status  # of 10 steps, in 100 s
    assert time_left(replace(half, cost_usd=10.0, budget_usd=budget_usd)) == said


def test_a_run_that_goes_on_has_no_message() -> None:
    assert "of an earlier attempt" not in shown([run_of(message="of an earlier attempt")])


def test_a_line_for_each_engine_that_runs_sample_on() -> None:
    shared, other = "http://127.0.0.1:8000", "http://127.0.0.1:9000"
    runs = [run_of(seed=s, engine="3 running, 0 waiting", engine_server=shared) for s in range(4)]
    told = shown([*runs, run_of("maxrl", engine="1 running, 5 waiting", engine_server=other)]).splitlines()
    assert [line for line in told if line.startswith("engine")] == [
        f"engine: 3 running, 0 waiting; {shared}",
        f"engine: 1 running, 5 waiting; {other}",
    ]
