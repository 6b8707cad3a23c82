"""What earlier campaigns tell of windows, rungs and seeds."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest

from retrain.base.errors import EXIT_CONFIG, EXIT_DONE
from retrain.config.load import load_config
from retrain.config.schema import DecisionSection
from retrain.control.rules.sequential import SequentialComparison
from retrain.plan.build import plan_runs
from retrain.plan.designs import (
    Candidate,
    DesignForecast,
    Designs,
    Outcomes,
    findable,
    interval_of_spread,
    plan_designs,
    question_spreads,
    with_questions,
)
from retrain.plan.expected_seeds import Most, comparisons_simulated, expected_seeds
from retrain.plan.past import START, Past, PastRun, past_runs
from retrain.plan.question_noise import paired_gains, question_means, question_noise
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs
from retrain.records.manifest import read_manifest, write_manifest
from retrain.records.samples import OutcomesWriter
from retrain.records.windows import Window
from tests.simulated import Simulated, flat, write_campaign

STEPS = 40
FILE = f"""
[data]
task = "sort"

[decision]
metric = "mean_reward"  # what decides
smallest_difference = 0.1  # of the last steps
max_seeds = 10

[campaign]
seeds = [0, 1, 2]
max_steps = {STEPS}

[[campaign.conditions]]
name = "grpo"

[[campaign.conditions]]
name = "maxrl"
"""
Retrain = Callable[..., CompletedProcess[str]]


@pytest.fixture
def file(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose plan simulates few campaigns: most histories differ much or not at all."""
    monkeypatch.setattr("retrain.plan.expected_seeds.SIMULATED", 40)
    path = here / "study.toml"
    path.write_text(FILE)
    return path


def history(logs: Path, seeds: int, *, early: float = 0.02, agree: bool = True) -> np.ndarray:
    """Write a campaign whose pairs differ in the first half, and ten times as much in the second; gives it.

    The second half agrees with the first, or is independent of it.
    Rewards rise from 0 to 0.3 after two steps, and to 0.5 after half of them.
    """
    rng, runs = np.random.default_rng(1), {}
    off = rng.normal(0, (early, 0.2), (seeds, 2)) + 0.05
    if agree:
        off[:, 1] = 0.05 + 10 * (off[:, 0] - 0.05) + 0.01 * off[:, 1]
    for seed in range(seeds):
        halves = [0.0, 0.0, *[0.3] * (STEPS // 2 - 2)], [0.5] * (STEPS // 2)
        runs["grpo", seed] = Simulated([*halves[0], *halves[1]])
        shifted = [value + shift for half, shift in zip(halves, off[seed], strict=True) for value in half]
        runs["maxrl", seed] = Simulated(shifted)
    write_campaign(logs, runs, steps=STEPS)
    return off


def designs_of(file: Path, *overrides: str) -> Designs:
    found = plan_designs(plan_runs(load_config(file, overrides), file.name), file.parent / "logs")
    assert found is not None
    return found


def test_runs_of_other_tasks_are_left_out(file: Path) -> None:
    history(file.parent / "logs", 8)
    found = designs_of(file, "data.task=successor")
    assert not found.designs
    assert found.notes[0] == "runs of other tasks were left out: sort"


def test_the_window_that_separates_is_the_cheapest(file: Path) -> None:
    off = history(file.parent / "logs", 8)
    found = designs_of(file)
    spreads = {design.design: design.spread for design in found.designs}
    assert spreads["the last tenth of steps"] == pytest.approx(off[:, 1].std(ddof=1))
    assert spreads["all steps of a run"] == pytest.approx(off.mean(axis=1).std(ddof=1))
    assert spreads["steps 1 to 20"] == pytest.approx(off[:, 0].std(ddof=1))
    by_name = {design.design: design for design in found.designs}
    own, early = by_name["the last tenth of steps"], by_name["steps 1 to 10"]
    assert early.difference == pytest.approx(0.1 * 0.24 / (0.5 + (off[:, 1] - off[:, 0]).mean() / 2))
    assert found.recommended == {"over": [1, 10], "smallest_difference": round(early.difference, 3)}
    assert "steps 1 to 10: another question than the file's; recommended as early" in found.notes[-1]
    draws = np.random.default_rng(0).normal(0.1, own.spread, (500, 10))
    test = SequentialComparison(10, 0.05, 0.1)
    power = np.mean([test.look(d, np.zeros(10)).verdict == "better" for d in draws])
    assert own.power == pytest.approx(power, abs=0.15)  # of 200 campaigns, which may also give up early
    # six or seven seeds of each find it, at a quarter of the steps
    assert 0.6 / 4 <= early.cost_off < 0.75 / 4
    assert by_name["rungs 10, 20, 40"].cost_off < by_name["all steps of a run"].cost_off


def test_a_window_in_which_no_seed_differs_is_not_recommended(file: Path) -> None:
    history(file.parent / "logs", 8, early=0.0, agree=False)
    found = designs_of(file)
    assert {design.design for design in found.designs} == {"the last tenth of steps", "all steps of a run"}
    assert "steps 1 to 10: seeds do not differ at all, so that its spread is not known" in found.notes


def test_another_question_is_named_and_not_recommended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.plan.expected_seeds.SIMULATED", 200)
    history(file.parent / "logs", 8, early=0.0, agree=False)
    found = designs_of(file, "decision.smallest_difference=0.13")
    assert found.recommended == {}  # the file's own finds too little
    assert "all steps of a run would be cheapest, but is another question" in found.notes[-1]
    whole = next(design for design in found.designs if design.design == "all steps of a run")
    asked = f"decision.smallest_difference={whole.difference}"
    assert designs_of(file, "decision.over=whole", asked).recommended == {"over": "whole"}


def test_differences_of_windows_are_the_same_from_either(file: Path) -> None:
    history(file.parent / "logs", 8)
    whole = next(design for design in designs_of(file).designs if design.design == "all steps of a run")
    back = designs_of(file, "decision.over=whole", f"decision.smallest_difference={whole.difference}")
    last = next(design for design in back.designs if design.design == "the last tenth of steps")
    assert whole.difference < 0.1
    assert last.difference == pytest.approx(0.1)


@pytest.mark.parametrize("smallest", ["decision.smallest_difference=0.1", ""])
def test_the_two_forecasts_of_rungs_are_the_same(file: Path, smallest: str) -> None:
    if not smallest:
        file.write_text(file.read_text().replace("smallest_difference", "# smallest_difference"))
    history(file.parent / "logs", 8, agree=False)
    plan = plan_runs(load_config(file, ["decision.rungs=[10,20,40]"]), file.name)
    designs, table = plan_designs(plan, file.parent / "logs"), plan.decision
    assert designs is not None
    assert table is not None
    own = designs.designs[0]
    equal, off, _ = expected_seeds(Most(plan), table, file.parent / "logs")
    assert own.design == "last tenth at rungs 10, 20, 40"
    assert (own.power, own.cost_equal, own.cost_off) == (
        off.found,
        pytest.approx(equal.steps / plan.total_steps),
        pytest.approx(off.steps / plan.total_steps),
    )
    alike = expected_seeds(Most(plan), table, file.parent / "none")[0]  # at all rungs, without a history
    assert alike.steps != equal.steps


def test_rungs_that_end_with_the_last_steps_keep_the_question_and_its_size(file: Path) -> None:
    history(file.parent / "logs", 8)
    rungs = next(d for d in designs_of(file).designs if d.design == "last tenth at rungs 10, 20, 40")
    assert rungs.keys == {"over": "last", "rungs": [10, 20, 40]}
    assert rungs.difference == 0.1


@pytest.mark.parametrize(
    ("finds", "cheaper", "loses"), [(152, 0.1, True), (172, 0.01, True), (172, 0.1, False), (180, 0.1, False)]
)
def test_a_design_has_to_find_as_much_and_to_save_more_than_the_sampling_error(
    finds: int, cheaper: float, loses: bool
) -> None:
    """Of 200 campaigns, the file's own design finds 172; costs have a standard deviation of 0.2."""
    shown = DesignForecast("d", {}, 8, 0.1, 0.1, 0.1, None, None, 0.1, 0.8, 0.5, 0.5, 0.5)
    cost = np.random.default_rng(0).normal(0.7, 0.2, (2, 200))
    own, other = (
        Outcomes(
            Candidate("d", DecisionSection(), (Window(),)),
            shown,
            1.0 * (np.arange(200) < found),
            cost[n] - less,
        )
        for n, (found, less) in enumerate([(172, 0.0), (finds, cheaper)])
    )
    assert other.loses_to(own) is loses


def test_fewer_campaigns_are_simulated_only_where_conditions_are_many() -> None:
    assert [comparisons_simulated(others) for others in (1, 2, 5, 10, 20)] == [200, 100, 40, 40, 10]


def test_early_and_late_differences_are_correlated_as_they_are(file: Path) -> None:
    off = history(file.parent / "logs", 8, agree=False)
    quarter, half = designs_of(file).agreements
    assert quarter.correlation == pytest.approx(np.corrcoef(off.T)[0, 1])
    assert (half.early, half.pairs) == ("steps 1 to 20", 8)
    assert half.flips == np.sum(off[:, 0] * off[:, 1] < 0)
    assert quarter.low is not None
    assert quarter.high is not None
    # Fisher: z is normal with a variance of 1 / (n - 3)
    assert np.arctanh(quarter.high) - np.arctanh(quarter.low) == pytest.approx(2 * 1.959964 / 5**0.5)


def test_an_early_window_that_does_not_tell_the_end_is_named_and_not_recommended(file: Path) -> None:
    history(file.parent / "logs", 8, agree=False)
    found = designs_of(file)
    assert "steps 1 to 10 would be cheapest, but" in found.notes[-1]
    assert found.recommended.get("over") != [1, 10]
    assert not found.recommended.get("rungs")
    asked = designs_of(file, "decision.over=[1, 10]", "decision.smallest_difference=0.05")
    assert asked.recommended == {"over": [1, 10]}


def test_more_questions_find_less_where_they_are_the_noise(file: Path) -> None:
    """Seeds with a variance of 0.001, and two runs with 0.08 by question: 0.001 + 0.16 / 50 of a pair."""
    logs, rng = file.parent / "logs", np.random.default_rng(4)
    files = CampaignFiles(
        write_campaign(logs, {(c, s): flat(0.5) for c in ("grpo", "maxrl") for s in range(40)})
    )
    for run_id, run in files_of_runs(files).items():
        seed_noise = rng.normal(0, 0.001**0.5) if run_id.startswith("maxrl") else 0.0
        writer = OutcomesWriter(run.evals, 1)
        writer.append("hard", 20, {q: [rng.normal(seed_noise, 0.08**0.5)] for q in range(50)})
        writer.close()
    past = Past(past_runs(logs, plan_runs(load_config(file), file.name), []), "eval_hard_reward", "grpo")
    means = {key: question_means(run.files, past.metric) for key, run in past.runs.items()}
    gains = paired_gains(means, past.reference)
    assert question_noise(gains) is not None
    expected = {count: (0.001 + 0.16 / count) ** 0.5 for count in (50, 100, 200)}
    assert question_spreads(gains) == pytest.approx(expected, rel=0.2)


def test_a_plan_says_whether_questions_or_seeds_are_worth_more(file: Path, retrain: Retrain) -> None:
    file.write_text('[[eval]]\nname = "hard"\n' + FILE.replace('"mean_reward"', '"eval_hard_reward"'))
    ends = {(name, seed): flat(0.5, STEPS) for name in ("grpo", "maxrl") for seed in range(8)}
    files = CampaignFiles(write_campaign(file.parent / "logs", ends))
    for run_id, run in files_of_runs(files).items():
        writer = OutcomesWriter(run.evals, 1)
        writer.append("hard", STEPS, {q: [q / 10 if run_id.startswith("maxrl") else 0.0] for q in range(8)})
        writer.close()
    manifest = read_manifest(files.manifest)
    assert manifest is not None
    results = {"grpo": 0.0, "maxrl": 0.35}
    runs = (
        replace(run, result={"eval_hard_reward": run.seed * results[run.condition]}) for run in manifest.runs
    )
    write_manifest(files.manifest, replace(manifest, runs=tuple(runs)))
    done = retrain("explain", file, "--from", "logs")
    assert done.returncode == EXIT_DONE, done.stderr
    assert "more questions are worth more than more seeds" in done.stdout


def asked_history(logs: Path, questions: int, *, by_seed: float) -> None:
    """Write a campaign of eight seeds whose pairs differ by question and by seed, with these deviations."""
    rng, conditions = np.random.default_rng(2), ("grpo", "maxrl")
    ends = {(name, seed): flat(0.5, STEPS) for name in conditions for seed in range(8)}
    files = CampaignFiles(write_campaign(logs, ends))
    means = {}
    for run_id, run in files_of_runs(files).items():
        values = rng.normal(rng.normal(0.5, by_seed), 0.3, questions)
        writer = OutcomesWriter(run.evals, 1)
        writer.append("hard", STEPS, {q: [value] for q, value in enumerate(values.tolist())})
        writer.close()
        means[run_id] = float(values.mean())
    manifest = read_manifest(files.manifest)
    assert manifest is not None
    runs = (replace(run, result={"eval_hard_reward": means[run.run_id]}) for run in manifest.runs)
    write_manifest(files.manifest, replace(manifest, runs=tuple(runs)))


def test_as_many_questions_as_before_find_at_rungs_what_the_design_finds(file: Path) -> None:
    """Seeds gain 0.1 of the reward at the first rung and all of it at the last, where most of them differ."""
    file.write_text(
        '[[eval]]\nname = "hard"\nevery = 10\n' + FILE.replace('"mean_reward"', '"eval_hard_reward"')
    )
    rng, runs, ends = np.random.default_rng(3), dict[tuple[str, int], Simulated](), dict[str, float]()
    for name, seed in product(("grpo", "maxrl"), range(8)):
        height = ends[f"{name}_s{seed}"] = float(rng.normal(0.5, 0.1))
        runs[name, seed] = Simulated(
            [0.5] * STEPS, more=lambda step, end=height: {"eval_hard_reward": end * max(0.1, step / STEPS)}
        )
    files = CampaignFiles(write_campaign(file.parent / "logs", runs, steps=STEPS))
    for run_id, run in files_of_runs(files).items():
        writer = OutcomesWriter(run.evals, 1)
        writer.append("hard", STEPS, {q: [ends[run_id] + 0.01 * q] for q in range(8)})
        writer.close()
    found = designs_of(file, "decision.rungs=[10,20,40]")
    own, same = found.designs[0], found.questions[0]
    assert own.design == "last tenth at rungs 10, 20, 40"
    assert (same.power, same.cost_off) == (own.power, own.cost_off)


def test_questions_are_those_of_the_window_that_is_compared(file: Path, retrain: Retrain) -> None:
    """Conditions that differ by seed over the first half only: questions are the noise of the second."""
    file.write_text(
        '[[eval]]\nname = "hard"\nevery = 10\n' + FILE.replace('"mean_reward"', '"eval_hard_reward"')
    )
    rng, runs = np.random.default_rng(3), dict[tuple[str, int], Simulated]()
    asked = {
        (f"{name}_s{seed}", step): 0.5
        + rng.normal(0, 0.2 if step <= STEPS // 2 else 0)
        + rng.normal(0, 0.1, 8)
        for name in ("grpo", "maxrl")
        for seed in range(8)
        for step in range(10, STEPS + 1, 10)
    }
    for name, seed in product(("grpo", "maxrl"), range(8)):
        means = {step: float(asked[f"{name}_s{seed}", step].mean()) for step in range(10, STEPS + 1, 10)}
        runs[name, seed] = Simulated(
            [0.5] * STEPS,
            more=lambda step, means=means: {"eval_hard_reward": means[step]} if step in means else {},
        )
    files = CampaignFiles(write_campaign(file.parent / "logs", runs, steps=STEPS))
    for run_id, run in files_of_runs(files).items():
        writer = OutcomesWriter(run.evals, 1)
        for step in range(10, STEPS + 1, 10):
            writer.append("hard", step, {q: [value] for q, value in enumerate(asked[run_id, step])})
        writer.close()
    early = designs_of(file, "decision.over=[1, 20]")
    assert early.questions[0].spread == pytest.approx(early.designs[0].spread)
    assert early.questions[0].spread > 1.5 * designs_of(file).questions[0].spread
    done = retrain("explain", file, "--from", "logs", "--set", "decision.over=[1, 20]")
    assert "with so many questions at each evaluation" in " ".join(done.stdout.split())


ASKING = '[[eval]]\nname = "hard"\nprompts = 8\n' + FILE.replace('"mean_reward"', '"eval_hard_reward"')


def test_the_design_that_is_written_asks_more_questions_where_these_are_the_noise(
    file: Path, monkeypatch: pytest.MonkeyPatch, retrain: Retrain
) -> None:
    monkeypatch.setattr("retrain.plan.expected_seeds.SIMULATED", 200)
    file.write_text(ASKING)
    asked_history(file.parent / "logs", 8, by_seed=0.05)
    designs = designs_of(file)
    own, more = designs.designs[:2]
    asked, _, most = designs.questions
    assert (asked.power, asked.cost_off, asked.cost_p90) == (own.power, own.cost_off, own.cost_p90)
    assert most.power > 0.9 > asked.power + 0.2
    # 24 further completions, where a run has so many in training: what fewer seeds save, less these
    training = load_config(file).training
    saved = most.cost_off / (1 + 24 / (STEPS * training.batch_size * training.group_size))
    assert saved < asked.cost_off
    count = more.keys["max_questions"]
    assert more.design == f"{own.design}, {count} questions"
    assert more.power > 0.9 > own.power + 0.2
    done = retrain("explain", file, "--from", "logs", "--design")
    assert done.returncode == EXIT_DONE, done.stderr
    assert f"+max_questions = {count}" in done.stderr
    again = designs_of(file)
    assert again.designs[0].design == own.design
    assert (again.designs[0].spread, again.designs[0].power) == (more.spread, more.power)
    assert "max_questions" not in again.recommended


def test_questions_that_all_seeds_answer_alike_tell_no_spread(file: Path) -> None:
    file.write_text(ASKING)
    plan = plan_runs(load_config(file), file.name)
    assert plan.decision is not None
    own = Candidate("own", plan.decision, (Window(),))
    _, more = with_questions([own], plan, np.tile([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0], (8, 1)))
    assert more.scale == 1


@pytest.mark.parametrize(
    ("questions", "by_seed", "overrides"),
    [
        (8, 0.5, []),  # seeds are the noise
        (8, 0.05, ["decision.max_seeds=5"]),  # too few to choose by
        (8, 0.05, ["decision.over=[1, 40]"]),  # not a run's end alone
        (8, 0.05, ["data.options.count=10"]),  # the data have no more
    ],
)
def test_no_design_asks_more_questions_where_that_helps_nothing_or_is_refused(
    file: Path, questions: int, by_seed: float, overrides: list[str]
) -> None:
    file.write_text(ASKING)
    asked_history(file.parent / "logs", questions, by_seed=by_seed)
    assert not any("max_questions" in design.keys for design in designs_of(file, *overrides).designs)


def test_few_seeds_recommend_nothing(file: Path, retrain: Retrain) -> None:
    history(file.parent / "logs", 5)
    found = designs_of(file)
    assert (found.recommended, found.agreements[0].correlation) == ({}, None)
    assert "5 seeds of history" in found.notes[-1]
    refused = retrain("explain", file, "--from", "logs", "--design")
    assert refused.returncode == EXIT_CONFIG
    assert "no design is recommended, and the file is as it was: 5 seeds of history" in refused.stderr
    assert file.read_text() == FILE


def test_one_seed_tells_no_spread(file: Path) -> None:
    history(file.parent / "logs", 1)
    assert "no condition has two seeds" in designs_of(file).notes[-1]


def test_a_metric_that_no_row_has_is_told(file: Path) -> None:
    history(file.parent / "logs", 6)
    (note,) = designs_of(file, "decision.metric=eval_reward").notes
    assert note == 'the last tenth of steps: no earlier run has "eval_reward" there; no design is known'


def test_a_spread_has_a_chi_square_interval() -> None:
    """Of 5 degrees of freedom, quantiles 0.831 and 12.833 (any table)."""
    assert interval_of_spread(1.0, 5) == pytest.approx(((5 / 12.833) ** 0.5, (5 / 0.831) ** 0.5), rel=5e-3)


def test_what_is_findable_is_found_in_four_of_five() -> None:
    rng, seeds, error = np.random.default_rng(0), 9, 0.05
    size = findable(seeds, error)
    assert size is not None
    test = SequentialComparison(seeds, error)
    looks = (test.look(d, np.zeros(seeds)) for d in rng.normal(size, 1, (200, seeds)))
    assert np.mean([look.verdict == "better" for look in looks]) == pytest.approx(0.8, abs=0.08)
    assert findable(5, error) is None


def test_the_design_is_written_and_nothing_else(file: Path, retrain: Retrain) -> None:
    history(file.parent / "logs", 8)
    size = designs_of(file).recommended["smallest_difference"]
    shares = "shares of 200 simulated campaigns, sampling error up to 7 points"  # 1.96 * 0.5 / 200**0.5
    assert retrain("explain", file).stdout.count(shares) == 1
    done = retrain("explain", file, "--from", "logs", "--design")
    assert done.returncode == EXIT_DONE
    assert "a design answers its own question" in done.stdout
    assert done.stdout.count(shares) == 2
    assert "+over = [1, 10]" in done.stderr
    matters = FILE.replace("smallest_difference = 0.1  # of the last steps", f"smallest_difference = {size}")
    assert file.read_text() == matters.replace("max_seeds = 10\n", "max_seeds = 10\nover = [1, 10]\n")
    written = file.read_text()
    stays = retrain("explain", file, "--from", "logs", "--design", "--json")
    assert "its own design stays" in stays.stderr
    assert file.read_text() == written
    again = json.loads(stays.stdout)["designs"]
    assert again["designs"][0]["design"] == "steps 1 to 10"
    assert again["recommended"] == {"over": [1, 10]}


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (FILE, [], "--design needs earlier campaigns"),
        (
            FILE,
            ["--from", "logs", "--set", "decision.max_seeds=9"],
            "writes into the file, which --set changes",
        ),
        (
            FILE.replace("[decision]", "[budget]").split("metric")[0],
            ["--from", "logs"],
            r"\[decision\] is missing",
        ),
    ],
)
def test_a_design_that_cannot_be_written_is_refused_first(
    file: Path, retrain: Retrain, text: str, options: list[str], why: str
) -> None:
    file.write_text(text)
    refused = retrain("explain", file, "--design", *options)
    assert (refused.returncode, refused.stdout) == (EXIT_CONFIG, "")
    assert re.search(why, refused.stderr)


def test_a_design_is_not_written_into_a_read_only_file(file: Path, retrain: Retrain) -> None:
    file.chmod(0o444)
    refused = retrain("explain", file, "--from", "logs", "--design")
    assert (refused.returncode, file.read_text()) == (EXIT_CONFIG, FILE)
    assert "is read-only; `chmod u+w study.toml`" in refused.stderr.replace(f"{file.parent}/", "")


def test_a_window_in_which_nothing_was_learned_is_no_design(file: Path) -> None:
    off = np.random.default_rng(2).normal(0, 0.01, (8, 2))
    runs = {
        (name, seed): Simulated(
            [0.1, 0.1, *[0.1 - abs(off[seed, place])] * 18, *[0.6 + off[seed, place]] * 20]
        )
        for place, name in enumerate(("grpo", "maxrl"))
        for seed in range(8)
    }
    write_campaign(file.parent / "logs", runs, steps=STEPS)
    found = designs_of(file)
    assert "steps 1 to 10: runs are no better there than at their start" in found.notes
    assert found.recommended == {"over": "last"}
    assert any(note.startswith("the file's own design stays") for note in found.notes)


def test_a_window_that_is_the_start_itself_has_no_gain_left_by_rounding(file: Path) -> None:
    rewards = np.random.default_rng(1).uniform(0, 1, (2, 8, 100))
    runs = {
        (name, seed): Simulated(rewards[place, seed].tolist())
        for place, name in enumerate(("grpo", "maxrl"))
        for seed in range(8)
    }
    write_campaign(file.parent / "logs", runs, steps=100)
    past = Past(past_runs(file.parent / "logs", plan_runs(load_config(file), ""), []), "mean_reward", "grpo")
    assert past.progress(Window(start=0.0, end=100 * START)) == 0.0


def test_of_a_seed_in_two_campaigns_the_newest_counts(file: Path) -> None:
    history(file.parent / "logs", 6)
    once, copy = designs_of(file), file.parent / "logs" / "study-0000"
    shutil.copytree(copy.with_name("study-1a2b"), copy)
    twice = designs_of(file)
    assert (twice.seeds, twice.agreements) == (once.seeds, once.agreements)
    assert [design.pairs for design in twice.designs] == [6] * len(once.designs)


def test_runs_that_finish_cost_their_whole_length(file: Path) -> None:
    history(file.parent / "logs", 8)
    early = next(d for d in designs_of(file).designs if d.design == "steps 1 to 10")
    finishing = next(
        d for d in designs_of(file, "decision.finish=true").designs if d.design == "steps 1 to 10"
    )
    assert finishing.cost_off == pytest.approx(4 * early.cost_off)


def past_of(values: dict[tuple[str, str, int], float]) -> Past:
    runs = {key: PastRun(RunFiles(Path()), {}) for key in values}
    for key, run in runs.items():
        run.rows = [{"step": 1, "m": values[key]}]
    return Past(runs, "m", "r")


@pytest.mark.parametrize("others", [1, 3])
def test_the_spread_of_conditions_that_share_a_reference_is_in_its_interval(others: int) -> None:
    rng, inside = np.random.default_rng(3), 0
    for _ in range(200):
        draws = rng.normal(0, 1, (8, others + 1))
        names = ["r", *(f"k{number}" for number in range(others))]
        past = past_of({("c", names[i], seed): draws[seed, i] for seed, i in np.ndindex(draws.shape)})
        residuals, freedom = past.residuals([Window(start=0.0)])
        low, high = interval_of_spread(float(np.sqrt(np.mean(residuals**2))), freedom)
        inside += low <= math.sqrt(2) <= high
    assert inside / 200 == pytest.approx(0.95, abs=0.04)
