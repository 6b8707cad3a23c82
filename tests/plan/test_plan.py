"""Plans: which runs a file asks for, and how long they take."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.errors import ConfigError
from retrain.config.load import parse
from retrain.config.resolve import label_of
from retrain.plan.build import plan_runs
from retrain.plan.explain import explain_plan
from retrain.plan.matrix import Origin
from retrain.plan.notes import warnings_of
from retrain.plan.preflight import preflight
from retrain.records.run_row import row_of
from retrain.records.text import plain

TWO_BY_TWO = {
    "campaign": {
        "seeds": [3, 4],
        "max_steps": 10,
        "conditions": [{"name": "A b"}, {"advantage_mode": "grpo", "transform_mode": "gtpo"}],
    }
}


def test_runs_are_conditions_times_seeds_with_all_conditions_of_a_seed_first() -> None:
    plan = plan_runs(parse(TWO_BY_TWO, "c"), "c.toml")
    assert [run.run_id for run in plan.runs] == ["a-b_s3", "grpo+gtpo_s3", "a-b_s4", "grpo+gtpo_s4"]
    assert plan.total_steps == 40
    assert {run.config.training.max_steps for run in plan.runs} == {10}


def test_a_condition_keeps_its_own_name_beside_its_runs_safe_ids() -> None:
    names = ["Контроль", "强化学习 max", "Grpo Baseline"]
    runs = plan_runs(
        parse({"campaign": {"seeds": [7], "conditions": [{"name": n} for n in names]}}, "c")
    ).runs
    assert [run.condition for run in runs] == names
    assert [run.config.run.condition for run in runs] == names
    assert all(run.run_id == f"{label_of(run.condition)}_s7" for run in runs)
    assert [run.title for run in runs] == ["Контроль_s7", "强化学习 max_s7", "grpo-baseline_s7"]


@pytest.mark.parametrize("name", ["grpo lr=0.001", "Grpo", "Контроль"])
def test_messages_and_tables_call_a_run_the_same(name: str) -> None:
    (run,) = plan_runs(parse({"campaign": {"seeds": [7], "conditions": [{"name": name}]}}, "c")).runs
    assert row_of(run.planned, {"state": "done"}).name == run.title


@given(st.lists(st.text(max_size=90), min_size=1, max_size=6))
def test_shown_names_hide_nothing_and_are_as_distinct_as_labels(names: list[str]) -> None:
    raw = {"campaign": {"seeds": [0], "conditions": [{"name": f"{name}."} for name in names]}}
    try:
        plan = plan_runs(parse(raw, "c"))
    except ConfigError:
        return
    assert len(plan.conditions) == len(plan.runs)
    assert all(name == plain(name, 64) != "" for name in plan.conditions)


def test_paths_of_a_run_hold_wherever_it_is_repeated(here: Path) -> None:
    rows = [f'{{"prompt": "{n}=", "answer": "{n}", "completion": "{n}"}}\n' for n in range(9)]
    (here / "rows.jsonl").write_text("".join(rows))
    raw = {
        "data": {"task": "jsonl", "options": {"path": "rows.jsonl"}},
        "warmup": {"steps": 1, "path": "rows.jsonl"},
        "backend": {"throttle_dir": "permits"},
    }
    config = plan_runs(parse(raw, "c")).runs[0].config
    paths = [config.data.options["path"], config.warmup.path, config.backend.throttle_dir]
    assert paths == [str(here / "rows.jsonl")] * 2 + [str(here / "permits")]


def test_a_condition_may_take_its_own_number_of_steps() -> None:
    raw = {
        "campaign": {
            "seeds": [0],
            "max_steps": 10,
            "conditions": [{"name": "a", "training": {"max_steps": 7}}],
        }
    }
    assert plan_runs(parse(raw, "c")).runs[0].max_steps == 7


def test_conditions_with_the_same_label_are_refused() -> None:
    raw = {"campaign": {"seeds": [0], "conditions": [{"name": "A b"}, {"name": "a B"}]}}
    with pytest.raises(ConfigError, match="is the label of 2 conditions; let names differ in more than case"):
        plan_runs(parse(raw, "c"))


@pytest.mark.parametrize(
    "names",
    [
        ("caf\u00e9", "cafe\u0301"),  # one character, or two
        ("x\u00b2", "x2"),  # a superscript
        ("a\u200bb", "ab"),  # an invisible one
    ],
)
def test_conditions_that_look_alike_are_refused(names: tuple[str, str]) -> None:
    raw = {"campaign": {"seeds": [0], "conditions": [{"name": name} for name in names]}}
    with pytest.raises(ConfigError, match=r"\[campaign\]\.conditions: the names .* look alike"):
        plan_runs(parse(raw, "c"))


@pytest.mark.parametrize("name", ["gr\u10e0o", "p\u0440o", "lr-\ua4f3k", "d\u0585g"])
def test_a_name_that_mixes_scripts_in_a_word_is_refused(name: str) -> None:
    raw = {"campaign": {"seeds": [0], "conditions": [{"name": name}, {"name": "other"}]}}
    with pytest.raises(ConfigError, match=r"conditions: '.*' mixes .* and .* letters"):
        plan_runs(parse(raw, "c"))


def test_names_in_other_letters_that_look_different_are_accepted() -> None:
    names = [
        "\u03b2=1",
        "beta=1",
        "\u6a21\u578b",
        "\u30e2\u30c7\u30eb",
        "PPO\u65b9\u5f0f",
        "\u30e2\u30c7\u30ebA",
        "\u0394lr",
        "LR-\u043c\u043e\u0434\u0435\u043b\u044c",
        "\u043c\u043e\u0434\u0435\u043b\u044c",
    ]
    raw = {"campaign": {"seeds": [0], "conditions": [{"name": name} for name in names]}}
    assert len(plan_runs(parse(raw, "c")).runs) == len(names)


def test_a_file_without_campaign_is_one_run_with_a_drawn_seed() -> None:
    first, second = plan_runs(parse({}, "c")), plan_runs(parse({}, "c"))
    assert first.is_single_run
    assert first.runs[0].seed != second.runs[0].seed
    assert first.runs[0].config.training.seed == first.runs[0].seed


@given(st.text(max_size=300))
def test_any_name_gives_a_label_that_is_safe_in_a_file_name(name: str) -> None:
    label = label_of(name)
    assert 1 <= len(label) <= 40
    assert set(label) <= set("abcdefghijklmnopqrstuvwxyz0123456789+._-")
    assert label[0] not in "."


def test_shortened_labels_stay_apart() -> None:
    assert label_of("x" * 60 + "a") != label_of("x" * 60 + "b")
    assert label_of("学习") != label_of("强化")


def test_the_run_id_fits_its_limit() -> None:
    raw = {"campaign": {"seeds": [2**32 - 1], "conditions": [{"name": "x" * 200}]}}
    assert len(plan_runs(parse(raw, "c")).runs[0].run_id) <= 64


def test_workers_are_one_unless_parallel() -> None:
    assert plan_runs(parse(TWO_BY_TWO, "c")).workers == 1
    parallel = {"campaign": {**TWO_BY_TWO["campaign"], "parallel": True}}
    assert plan_runs(parse(parallel, "c")).workers == 4


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"data": {"options": {"length": -3}}}, "[data.options].length: got -3"),
        ({"backend": {"options": {"hiden": 8}}}, "[backend.options].hiden"),
        (
            {"algorithm": {"loss_params": {"clip_low": -1.0}}},
            "clip_low: got -1.0; needs a number from 0 to 1",
        ),
        (
            {"reward": {"reward": "partial", "params": {"power": 0}}},
            "got 0; needs a finite number above 0",
        ),
        (
            {"algorithm": {"transform_mode": "gtpo", "transform_params": {"beta": -1.0}}},
            "[algorithm.transform_params]",
        ),
    ],
)
def test_values_that_only_plugins_can_judge_are_refused_before_anything_starts(raw: dict, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw, "c.toml")
    assert says in str(caught.value)


@pytest.mark.parametrize("other", [9, "auto"])
def test_conditions_cannot_disagree_on_the_permits_of_one_semaphore(other: object) -> None:
    conditions = [{"name": "a"}, {"name": "b", "backend": {"max_concurrent": other}}]
    with pytest.raises(ConfigError, match="permits of one semaphore"):
        parse({"campaign": {"seeds": [0], "conditions": conditions}}, "c")


def test_the_explanation_warns_of_idle_token_room() -> None:
    plan = plan_runs(parse(TWO_BY_TWO, "c"), "c.toml")
    warnings = "\n".join(explain_plan(plan, preflight(plan, "c"), None, 2.0, "c.toml").warnings)
    assert "max_tokens = 10240" in warnings


def test_problems_of_every_kind_come_together() -> None:
    raw = {
        "training": {"lr": -1},
        "data": {"options": {"length": -3}},
        "backend": {"options": {"hidden": -1}},
        "campaign": {"seeds": [0], "conditions": [{"name": "a"}, {"name": "A"}]},
    }
    with pytest.raises(ConfigError) as caught:
        parse(raw, "c.toml")
    assert len(caught.value.problems) == 4
    assert all(problem.startswith("c.toml [") for problem in caught.value.problems)


@pytest.mark.parametrize(("latency_s", "is_warned"), [(0.0, True), (0.2, False)])
def test_workers_that_wait_for_a_rehearsed_api_share_no_cores(latency_s: float, is_warned: bool) -> None:
    raw = {
        "backend": {"options": {"api_latency_s": latency_s}},
        "campaign": {"seeds": [0, 1, 2], "parallel": True},
    }
    plan = plan_runs(parse(raw, "c"), "c.toml")
    found = explain_plan(plan, preflight(plan, "c"), None, 2.0, "c.toml")
    parallelism = next(one for one in found.checklist if one.question == "parallelism within limits")
    assert (parallelism.state == "warn") == is_warned


def test_a_run_says_whether_the_file_the_user_or_a_sampler_gave_it() -> None:
    conditions = [{"name": "a"}, {"name": "b"}]
    config = parse({"campaign": {"seeds": [0], "conditions": conditions}}, "c.toml")
    added = plan_runs(config, "c.toml", added_seeds=1)
    assert [run.origin for run in added.runs] == [Origin.GIVEN] * 2 + [Origin.ADDED] * 2
    assert (added.planned_seeds, added.added_seeds) == ((0,), (1,))
    proposed = plan_runs(config, "c.toml", proposed=1)
    assert [(run.condition, run.origin.value) for run in proposed.runs] == [("a", "given"), ("b", "proposed")]


def test_conditions_share_every_section_that_they_do_not_override() -> None:
    conditions = [{"name": "a"}, {"name": "b", "training": {"lr": 1e-3}}]
    a, b = plan_runs(parse({"campaign": {"seeds": [0], "conditions": conditions}}, "c")).runs
    shared = {name for name in vars(a.config) if getattr(a.config, name) is getattr(b.config, name)}
    assert vars(a.config).keys() - shared == {"training", "run"}


def test_conditions_that_see_different_prompts_are_told_how_to_compare_them() -> None:
    others = [{"name": "pool", "data": {"curriculum": "pool"}}, {"name": "shuffle"}]
    for conditions, is_told in ((others, True), (others[1:], False)):
        plan = plan_runs(parse({"campaign": {"seeds": [0], "conditions": conditions}}, "c"))
        assert any("retrain compare --per tokens" in note for note in warnings_of(plan, {})) == is_told
