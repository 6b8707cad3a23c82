"""`[campaign.sweep]`: the conditions that come of it, their names, and every mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.config.load import load_config
from retrain.config.resolve import label_of
from retrain.plan.build import plan_runs
from retrain.plan.matrix import Plan
from tests.explained import explained

SMALL = """
[training]
max_steps = 2
batch_size = 2
group_size = 4
max_tokens = 4
[campaign]
seeds = [0, 1]
[campaign.sweep]
"""
SEARCH = "campaign.search.rungs=[1]"


def planned(tmp_path: Path, text: str, *overrides: str) -> Plan:
    file = tmp_path / "c.toml"
    file.write_text(text)
    return plan_runs(load_config(file, overrides), "c.toml")


def problems(tmp_path: Path, text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, text, *overrides)
    return caught.value.problems


def test_lists_multiply_with_each_other_and_with_the_conditions(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        SMALL
        + """
        "training.lr" = [1e-5, 4e-5]
        algorithm.transform_params.beta = [0.1, 0.2]
        [[campaign.conditions]]
        advantage_mode = "grpo"
        algorithm.transform_mode = "gtpo"
        [[campaign.conditions]]
        name = "mine"
        algorithm.transform_mode = "gtpo"
        """,
    )
    assert plan.conditions == (
        "grpo+gtpo lr=1e-5 beta=0.1",
        "grpo+gtpo lr=1e-5 beta=0.2",
        "grpo+gtpo lr=4e-5 beta=0.1",
        "grpo+gtpo lr=4e-5 beta=0.2",
        "mine lr=1e-5 beta=0.1",
        "mine lr=1e-5 beta=0.2",
        "mine lr=4e-5 beta=0.1",
        "mine lr=4e-5 beta=0.2",
    )
    assert [run.run_id for run in plan.runs[:2]] == [
        "grpo+gtpo-lr-1e-5-beta-0.1_s0",
        "grpo+gtpo-lr-1e-5-beta-0.2_s0",
    ]
    last = plan.runs[-1].config
    assert (last.training.lr, last.algorithm.transform_params, last.training.seed) == (4e-5, {"beta": 0.2}, 1)


def test_a_point_is_the_same_run_as_a_condition_that_says_so(tmp_path: Path) -> None:
    swept = planned(tmp_path, SMALL + '"training.lr" = [1e-5, 4e-5]')
    written = planned(
        tmp_path,
        SMALL.replace("[campaign.sweep]", "")
        + """
        [[campaign.conditions]]
        name = "maxrl lr=1e-5"
        training.lr = 1e-5
        [[campaign.conditions]]
        name = "maxrl lr=4e-5"
        training.lr = 4e-5
        """,
    )
    assert swept.runs == written.runs


def test_plugins_that_are_swept_name_the_condition(tmp_path: Path) -> None:
    plan = planned(tmp_path, SMALL + 'algorithm.advantage_mode = ["grpo", "rloo"]\ntraining.lr = [1e-5]')
    assert plan.conditions == ("grpo lr=1e-5", "rloo lr=1e-5")


def test_names_show_as_much_of_a_key_and_a_value_as_distinguishes_them(tmp_path: Path) -> None:
    model = "org/a-model-with-a-rather-long-name"
    text = f'training.lr = [1e-5]\nwarmup.lr = [2e-5]\nmodel.model = ["{model}"]\ntraining.mask = [true]'
    plan = planned(tmp_path, SMALL + text.replace("training.mask", "algorithm.mask_truncated"))
    name = "maxrl training.lr=1e-5 warmup.lr=2e-5 model=a-model-with-a-rather-long-name mask_truncated=true"
    assert plan.conditions == (label_of(name),)  # longer than views show: the label of it


def test_ranges_are_drawn_together_and_fill_each_range(tmp_path: Path) -> None:
    text = """
    training.temperature = { log_uniform = [0.25, 4.0], samples = 16 }
    algorithm.entropy = { uniform = [0.0, 1.0] }
    training.batch_size = { uniform = [1, 16], samples = 16 }
    """.replace("algorithm.entropy", "training.entropy_bonus")
    runs = planned(tmp_path, SMALL + text).first_runs.values()
    settings = [run.config.training for run in runs]
    assert len(settings) == 16
    octaves = sorted(math.floor(2 * math.log2(one.temperature)) for one in settings)
    assert octaves == [*sorted([*range(-4, 4)] * 2)]  # of 16 points two in each eighth of the range
    assert sorted(math.floor(16 * one.entropy_bonus) for one in settings) == [*range(16)]
    assert sorted(one.batch_size for one in settings) == [*range(1, 17)]
    assert all(
        f"temperature={one.temperature}" in run.condition for one, run in zip(settings, runs, strict=True)
    )


def test_more_samples_begin_with_the_same_points_and_a_seed_draws_others(tmp_path: Path) -> None:
    text = SMALL + "training.lr = { log_uniform = [1e-5, 1e-3], samples = %d }\n"
    four, eight = (planned(tmp_path, text % count).conditions for count in (4, 8))
    assert eight[:4] == four
    assert not set(four) & set(planned(tmp_path, text % 4 + "seed = 1\n").conditions)


def test_set_replaces_what_is_swept_and_what_is_not(tmp_path: Path) -> None:
    text = (
        SMALL + '"training.lr" = [1e-5, 4e-5]\ntraining.temperature = { uniform = [0.5, 1.0], samples = 2 }'
    )
    overrides = [
        "campaign.sweep.training.lr=[1e-4]",
        "campaign.sweep.training.temperature.samples=3",
        "training.batch_size=4",
    ]
    plan = planned(tmp_path, text, *overrides)
    assert len(plan.conditions) == 3
    assert {run.config.training.lr for run in plan.runs} == {1e-4}
    assert {run.config.training.batch_size for run in plan.runs} == {4}
    assert problems(tmp_path, text, "training.lr=1e-4") == (
        "--set training.lr: has no effect, because [campaign.sweep] gives its values; "
        "set campaign.sweep.training.lr",
    )


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[]", "got []; needs at least one value"),
        ("1e-4", "got 0.0001; needs a list, or { uniform = [low, high], samples = n }"),
        ("[[1e-4]]", "got [0.0001]; needs numbers, strings, or true and false"),
        ("[inf]", "got inf; needs numbers, strings, or true and false"),
        ("[1, 1.0]", "lists 1 2 times, which would repeat the same runs; list it once"),
        ('["a"]', 'got "a"; needs a number'),
        ("[-1.0]", "got -1.0; needs more than 0"),
        ("{ uniform = [2, 1], samples = 2 }", "uniform: got [2, 1]; needs low below high"),
        ("{ uniform = [1, 1], samples = 2 }", "uniform: got [1, 1]; needs low below high"),
        ("{ uniform = [1], samples = 2 }", "uniform: got [1]; needs [low, high], two numbers"),
        ("{ uniform = [1, inf], samples = 2 }", "uniform: got [1, inf]; needs [low, high], two numbers"),
        ("{ log_uniform = [0, 1], samples = 2 }", "log_uniform: got [0, 1]; needs bounds above 0"),
        ("{ uniform = [0, 1], samples = 0 }", "samples: got 0; needs a whole number from 1"),
        ("{ uniform = [0, 1], samples = 2.0 }", "samples: got 2.0; needs a whole number"),
        ("{ uniform = [0, 1] }", "needs samples, how many points are drawn"),
        ("{ unifrm = [0, 1], samples = 2 }", "unknown key \"unifrm\"; did you mean 'uniform'?"),
        ("{ samples = 2 }", "needs one of uniform = [low, high] and log_uniform = [low, high]"),
        ("[1]\n'training.lr' = [2]", "is given twice, with and without quotes; keep one"),
        (
            "{ uniform = [0, 1], samples = 3 }\ntraining.temperature = { uniform = [1, 2], samples = 2 }",
            "ranges are drawn together, but samples are 3 and 2; give all the same number",
        ),
    ],
)
def test_a_wrong_value_is_told_before_anything_starts(value: str, problem: str, tmp_path: Path) -> None:
    found = [one.split('": ', 1)[1] for one in problems(tmp_path, f"{SMALL}training.lr = {value}")]
    assert found[0].startswith(problem)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("training.lrr = [1e-4]", "\"training.lrr\": unknown key; did you mean 'lr'?"),
        ("trainin.lr = [1]", '"trainin.lr": needs section.key, such as training.lr; did you mean'),
        ("lr = [1]", "lr: needs section.key, such as training.lr; sections: "),
        ("logging.log_dir = ['a']", '"logging.log_dir": is the same for all runs of a campaign'),
        ("training.seed = [1, 2]", '"training.seed": every condition runs with every seed'),
        ("seed = -1\ntraining.lr = [1]", "seed: got -1; needs a whole number from 0 on"),
        (
            "training.batch_size = { uniform = [1, 4], samples = 5 }",
            '"training.batch_size": of 5 samples 1 would repeat others',
        ),
    ],
)
def test_a_wrong_key_is_told_before_anything_starts(line: str, problem: str, tmp_path: Path) -> None:
    assert problems(tmp_path, SMALL + line)[0].startswith(f"c.toml [campaign.sweep].{problem}")


def test_more_runs_than_are_planned_in_seconds_are_refused(tmp_path: Path) -> None:
    lr = {"campaign.sweep.training.lr": "{ uniform = [1e-4, 1e-2], samples = 1000 }"}
    expected = "[campaign].sweep: would be 14,000 runs; at most 10,000 can be planned"
    found = problems(tmp_path, SMALL, *(f"{key}={value}" for key, value in lr.items()), SEARCH)
    assert expected in found[0]  # 2 seeds, and 12 that may decide


def test_values_that_end_alike_are_told_in_full(tmp_path: Path) -> None:
    models = ["one-maker/a-model-with-a-long-name", "another-maker/a-model-with-a-long-name"]
    plan = planned(tmp_path, SMALL, f"campaign.sweep.model.model={models}")
    assert plan.conditions == tuple(f"maxrl model={model}" for model in models)
    (found,) = problems(tmp_path, SMALL, 'campaign.sweep.model.model=["a b", "a-b"]')
    assert found == (
        "c.toml [campaign].sweep: 'maxrl-model-a-b' is the label of 2 conditions; "
        "let values differ in more than case and punctuation"
    )


@pytest.mark.parametrize("key", ["training.lr.low", "data.params.x"])
def test_a_key_below_no_table_is_told_where_it_is_swept(key: str, tmp_path: Path) -> None:
    assert problems(tmp_path, f"{SMALL}{key} = [1, 2]")[0].startswith(f'c.toml [campaign.sweep]."{key}": ')


def test_a_million_runs_are_refused_with_their_number(tmp_path: Path) -> None:
    text = """
    training.lr = { uniform = [0.1, 1.0], samples = 100_000 }
    training.batch_size = [1, 2, 3, 4, 5, 6]
    """
    expected = "c.toml [campaign].sweep: would be 1,200,000 runs; at most 10,000 can be planned"
    assert problems(tmp_path, SMALL + text)[0].startswith(expected)


def test_too_many_runs_without_a_sweep_are_too_many_conditions_or_seeds(tmp_path: Path) -> None:
    text, seeds = SMALL.replace("[campaign.sweep]", ""), f"campaign.seeds={list(range(10_001))}"
    refused = "c.toml [campaign]: would be 10,001 runs; at most 10,000 can be planned: "
    assert problems(tmp_path, text, seeds) == (f"{refused}use fewer conditions or seeds",)
    most = problems(tmp_path, text, "decision.metric=mean_reward", "decision.max_seeds=10_001")
    assert f"{refused}use fewer conditions or seeds, or a smaller decision.max_seeds" in most


def test_a_key_that_a_condition_sets_cannot_be_swept(tmp_path: Path) -> None:
    text = (
        SMALL
        + """
    algorithm.advantage_mode = ["grpo"]
    training.lr = [1e-5]
    [[campaign.conditions]]
    name = "b"
    advantage_mode = "rloo"
    training.lr = 1e-4
    """
    )
    assert problems(tmp_path, text) == (
        'c.toml [campaign.sweep]."algorithm.advantage_mode": condition "b" sets it; '
        "a key is either swept or set by conditions",
        'c.toml [campaign.sweep]."training.lr": condition "b" sets it; '
        "a key is either swept or set by conditions",
    )


def test_a_mistake_of_a_condition_is_told_once_and_where_it_is(tmp_path: Path) -> None:
    text = SMALL + "training.lr = [1e-5, 1e-4]\n[[campaign.conditions]]\ntraining.batch_sise = 4"
    assert problems(tmp_path, text) == (
        "c.toml [[campaign.conditions]] #1 [training].batch_sise: unknown key; did you mean 'batch_size'?",
    )


def test_explain_lists_every_run_without_repeating_what_its_name_tells(tmp_path: Path) -> None:
    text = SMALL + "training.lr = [1e-5, 4e-5]\nalgorithm.loss_mode = ['ppo', 'cispo']"
    found = explained(planned(tmp_path, text), None)
    assert (found.total_runs, len(found.conditions)) == (8, 4)
    assert found.conditions[3].condition == "maxrl lr=4e-5 loss_mode=cispo"
    assert all(one.differs == () for one in found.conditions)
