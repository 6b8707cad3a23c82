"""What a report makes of records: curves, fits, lanes, failures, tables. Pages are tests/extras' business."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from subprocess import CompletedProcess
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.run_state import Start
from retrain.records.spending import Spending, write_spending
from retrain.records.text import MISSING
from retrain.results.report.contents import contents
from retrain.results.report.curves import (
    Bins,
    bins_for,
    curve,
    describe,
    domain,
    points,
    seed_points,
)
from retrain.results.report.facts import failures, headline, provenance
from retrain.results.report.gather import CampaignRecord, gather
from retrain.results.report.outputs import ends_of, rows_of, write_csv, write_jsonl
from retrain.results.report.page import page
from retrain.results.report.sides import Side
from retrain.results.report.tables import significant
from retrain.results.report.timeline import step_split, time_axis, timeline
from tests.simulated import Simulated, flat, side, write_campaign

Call = Callable[..., CompletedProcess[str]]
ONE_BY_ONE = Bins(width=1, count=20, end=20)


def test_a_curve_is_the_mean_over_seeds_with_students_interval(tmp_path):
    found = curve(side(tmp_path, *(flat(3.0 + i) for i in range(6))), "mean_reward", ONE_BY_ONE)
    half = 2.570582 * math.sqrt(3.5 / 6)  # t table, 5 degrees of freedom; variance of 3 to 8
    assert found.mean.tolist() == [5.5] * 20
    assert found.low == pytest.approx(5.5 - half, abs=1e-5)
    assert found.high == pytest.approx(5.5 + half, abs=1e-5)
    assert (len(found.each), found.is_cut) == (0, False)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_so_few_seeds_are_drawn_themselves_and_have_no_band(tmp_path, seeds):
    found = curve(side(tmp_path, *(flat(float(i)) for i in range(seeds))), "mean_reward", ONE_BY_ONE)
    assert np.isnan(found.low).all()
    assert found.seeds.tolist() == [float(seeds)] * 20
    assert found.each[:, 0].tolist() == [float(i) for i in range(seeds)]
    assert {row["k"] for row in seed_points(found)} == set(range(seeds))
    assert "Thin lines: the seeds." in describe([found], ONE_BY_ONE)


def test_held_out_curves_begin_before_training_and_end_with_the_run(tmp_path):
    its = side(tmp_path, Simulated([0.5] * 20, held_out=0.75, more=held_out_at_10))
    run = replace(its.runs[0], start=Start({"eval_reward": 0.25}))
    found = curve(Side("grpo", (run,)), "eval_reward", ONE_BY_ONE)
    assert (found.steps.tolist(), found.mean.tolist()) == ([0, 10, 20], [0.25, 0.5, 0.75])
    per = curve(Side("grpo", (run,)), "eval_reward", Bins(1.0, 200, 200.0, "tokens"))
    assert (per.steps[0], per.mean[0]) == (0, 0.25)
    assert per.mean[-1] == pytest.approx(0.75, abs=0.01)  # the mean of the last half step


def held_out_at_10(step):
    return {"tokens_per_step": 10} | ({"eval_reward": 0.5} if step == 10 else {})


def test_an_interval_ends_where_the_metric_does_and_says_so(tmp_path):
    found = curve(side(tmp_path, *(flat(i / 5) for i in range(6))), "mean_reward", ONE_BY_ONE)
    assert float(found.low.min()) >= 0
    assert curve(side(tmp_path / "2", *[flat(0.0)] * 5, flat(1.0)), "mean_reward", ONE_BY_ONE).low[0] == 0
    high = curve(side(tmp_path / "3", *[flat(1.0)] * 5, flat(0.0)), "mean_reward", ONE_BY_ONE)
    assert (high.high[0], high.is_cut) == (1.0, True)
    assert "clipped to the range of the metric" in describe([high], ONE_BY_ONE)
    unbounded = curve(side(tmp_path / "4", *[flat(9.0)] * 5, flat(0.0)), "mean_reward", ONE_BY_ONE)
    assert unbounded.high[0] > 9


def test_a_run_that_failed_does_not_bend_the_mean(tmp_path):
    found = curve(side(tmp_path, flat(1.0), flat(0.0, 5, ending="failed")), "mean_reward", ONE_BY_ONE)
    assert found.mean.tolist() == [1.0] * 20


def test_a_condition_whose_runs_all_failed_is_drawn_run_by_run_and_in_no_mean(tmp_path):
    failed = [flat(0.5, 5, ending="failed"), flat(0.7, 5, ending="failed")]
    found = curve(side(tmp_path, *failed), "mean_reward", ONE_BY_ONE)
    assert found.steps.tolist() == [1, 2, 3, 4, 5]
    assert np.isnan(found.mean).all()
    assert found.each[:, 0].tolist() == [0.5, 0.7]
    assert points(found) == []
    assert describe([found], ONE_BY_ONE) == "Thin lines: the seeds. All runs of grpo failed: no mean."
    assert step_split(side(tmp_path / "2", *failed)) == {}


def test_a_chart_says_of_how_few_seeds_its_lines_are(tmp_path):
    """A mean whose runs ended at different steps may jump there."""
    whole, died = flat(0.5), flat(0.5, 5, ending="")
    found = curve(side(tmp_path, whole, died, died), "mean_reward", ONE_BY_ONE)
    assert describe([found], ONE_BY_ONE).startswith("Line: mean over 1 to 3 seeds.")
    alone = curve(side(tmp_path / "2", whole), "mean_reward", ONE_BY_ONE)
    assert describe([alone], ONE_BY_ONE) == "Line: one seed."


def test_runs_of_one_step_are_not_said_to_have_none(tmp_path):
    shown = contents(gather(write_campaign(tmp_path, {("grpo", 0): flat(0.5, 1)}, steps=1)))
    assert "No run has rows yet" not in page(shown)


def test_bins_average_steps_and_keep_a_seed_one_value(tmp_path):
    found = curve(side(tmp_path, Simulated([0, 2, 4, 6])), "mean_reward", Bins(width=2, count=2, end=4))
    assert (found.steps.tolist(), found.mean.tolist()) == ([1.5, 3.5], [1.0, 5.0])


def test_rare_values_stand_at_their_own_steps(tmp_path):
    rare = Simulated([0.0] * 20, more=lambda step: {"eval_reward": 1.0} if step in (7, 20) else {})
    found = curve(side(tmp_path, rare), "eval_reward", Bins(width=5, count=4, end=20))
    assert found.steps.tolist() == [7.0, 20.0]


@given(conditions=st.integers(1, 100), metrics=st.integers(1, 60), longest=st.integers(1, 10**6))
def test_all_curves_together_stay_small(conditions, metrics, longest):
    class Run:
        last_step = longest

    sides = [Side(str(i), (Run(),)) for i in range(conditions)]  # type: ignore[arg-type]
    bins = bins_for(sides, metrics)
    assert bins.count * conditions * metrics * 4 <= 500_000
    assert bins.width * bins.count >= longest > bins.width * (bins.count - 1)


@pytest.mark.parametrize(
    ("value", "axis"), [(0.0, [0, 1]), (16.0, [0, 20]), (2.4849, [0, 3.106125]), (-1e6, [-1.25e6, 0])]
)
def test_a_metric_that_never_changes_has_an_axis_from_zero(tmp_path, value, axis):
    found = [curve(side(tmp_path, flat(value)), "mean_reward", ONE_BY_ONE)]
    assert domain(found) == pytest.approx(axis)


def test_final_values_that_are_equal_have_an_axis_and_intervals_end_with_the_metric(tmp_path):
    equal = {(c, s): flat(0.5) for c in "ab" for s in range(3)}
    found = contents(gather(write_campaign(tmp_path, equal))).sections["comparison"][0].spec
    (seeds,) = [layer for layer in found["layer"] if layer["mark"]["type"] == "point"]
    assert seeds["encoding"]["x"]["scale"]["domain"] == [0, 0.625]
    spread = {(c, s): flat(s / 2) for c in "ab" for s in range(3)}
    found = contents(gather(write_campaign(tmp_path / "2", spread))).sections["comparison"][0].spec
    (intervals,) = [layer for layer in found["layer"] if layer["mark"]["type"] == "rule"]
    assert [(row["l"], row["h"]) for row in intervals["data"]["values"]] == [(0, 1), (0, 1)]
    assert "clipped to the range of the metric" in " ".join(found["title"]["subtitle"])
    two = {(c, s): flat(s / 2) for c in "ab" for s in range(2)}  # seeds; too few for an interval
    found = contents(gather(write_campaign(tmp_path / "3", two))).sections["comparison"][0].spec
    assert " ".join(found["title"]["subtitle"]).endswith("Circles: seeds. Bar: mean.")


def test_attempts_are_laid_into_as_few_lanes_as_hold_them(tmp_path):
    found = timeline(side(tmp_path, flat(0.5), flat(0.5), flat(0.5)).runs)
    assert [bar.lane for bar in found.bars] == [1, 2, 3]  # all began within a second, each took 40
    assert [bar.end_s - bar.start_s for bar in found.bars] == pytest.approx([40.0] * 3)


def test_a_clock_that_was_set_back_makes_no_bar_of_negative_length(tmp_path):
    run = RunFiles(write_campaign(tmp_path, {("grpo", 0): flat(0.5)}) / "runs" / "grpo_s0")
    begun, ended = (json.loads(line) for line in run.attempts.read_text().splitlines())
    again = {**begun, "attempt": 2, "started_at": "2025-01-01T00:00:00.000Z"}
    run.attempts.write_text("".join(json.dumps(row) + "\n" for row in (begun, ended, again)))
    found = timeline(gather(run.directory).runs)
    assert len(found.bars) == 2
    assert all(bar.end_s >= bar.start_s for bar in found.bars)
    assert time_axis(100.0, 0.0).unit == "seconds"


def test_waiting_for_permits_is_summed_and_placed(tmp_path):
    directory = write_campaign(tmp_path, {("grpo", 0): flat(0.5)})
    attempts = directory / "runs" / "grpo_s0" / "attempts.jsonl"
    begun, ended = (json.loads(line) for line in attempts.read_text().splitlines())
    begun["started_at"] = "2025-01-31T12:00:00.000Z"  # when its rows say
    attempts.write_text(json.dumps(begun) + "\n" + json.dumps(ended) + "\n")
    found = timeline(gather(directory).runs)
    assert found.bars[0].waits()[1].sum() == 10.0  # half a second in each of 20 steps
    assert sum(one.share * (one.end_s - one.start_s) for one in found.waiting) == pytest.approx(
        10.0, rel=0.05
    )


def test_the_parts_of_a_step_add_up_to_it(tmp_path):
    assert step_split(side(tmp_path, flat(0.5))) == {
        "sampling": 0.5, "waiting for permits": 0.5, "rewards": 0.25, "training": 0.5, "other": 0.25,
    }  # fmt: skip


def test_waiting_for_environments_is_a_part_of_its_own(tmp_path):
    found = step_split(side(tmp_path, flat(0.5, more=lambda step: {"environment_wait_s": 0.7})))
    assert found["waiting for environments"] == pytest.approx(0.7)
    assert found["waiting for permits"] == pytest.approx(0.3)  # that of concurrent calls: at most the rest
    assert found["sampling"] == pytest.approx(0.0)
    assert sum(found.values()) == pytest.approx(2.0)


def test_failures_come_first_with_the_end_of_their_output(tmp_path):
    output = "Traceback:\n  File \x1b[31m'x.py'\x1b[0m\n" + "KeyError\u202e: 'k'\n"
    bad = flat(0.5, 5, ending="failed", message="KeyError: 'k'", output=output)
    runs = {("grpo", 0): flat(0.5), ("grpo", 1): flat(0.5, 4, ending=""), ("grpo", 2): bad}
    (failed, tail), (died, _) = failures(gather(write_campaign(tmp_path, runs)).runs)
    assert (failed.run_id, failed.message, died.state) == ("grpo_s2", "KeyError: 'k'", "died")
    assert tail == ["Traceback:", "  File 'x.py'", "KeyError: 'k'"]


def test_provenance_names_versions_host_and_times(tmp_path):
    facts = dict(provenance(gather(write_campaign(tmp_path, {("grpo", 0): flat(0.5)}))))
    assert {"retrain", "Python", "git commit", "started on", "started", "ended"} <= facts.keys()
    assert all(facts.values())


def test_provenance_names_what_computed_and_old_records_do_without(tmp_path):
    import numpy

    campaign = gather(write_campaign(tmp_path, {("grpo", 0): flat(0.5), ("grpo", 1): flat(0.4)}))
    assert f"numpy {numpy.__version__}" in dict(provenance(campaign))["workers' software"]
    for run in campaign.runs:
        path = run.directory / "attempts.jsonl"
        path.write_text(path.read_text().replace('"software"', '"unknown"'))
    assert dict(provenance(gather(campaign.directory)))["workers' software"] == MISSING


def test_a_headline_counts_runs_by_state(tmp_path):
    runs = {("grpo", 0): flat(0.5), ("maxrl", 0): flat(0.5, 5, ending="failed")}
    found = headline(gather(write_campaign(tmp_path, runs)))
    assert found == "2 runs (1 done, 1 failed): 2 conditions, 1 seed, 25 steps."


def test_a_headline_has_what_all_runs_cost(tmp_path):
    directory = write_campaign(tmp_path, {("grpo", seed): flat(0.5) for seed in range(3)})
    for seed, usd in enumerate((2.0, 1.5)):
        write_spending(RunFiles(directory / "runs" / f"grpo_s{seed}"), Spending(usd=usd))
    assert headline(gather(directory)).endswith("60 steps, cost $3.50.")


@pytest.mark.parametrize("damage", [b"", b"\0\xff{[" * 99, b'{"step": 1e9}\n{"step": true}\n[]\n7\n'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "run.toml", "done.json"])
def test_a_damaged_file_costs_its_own_content_only(tmp_path, name, damage):
    directory = write_campaign(tmp_path, {("grpo", s): flat(0.5) for s in range(2)})
    (directory / "runs" / "grpo_s0" / name).write_bytes(damage)
    shown = contents(gather(directory))
    assert len(shown.campaign.runs) == 2
    assert "mean-reward" in [chart.name for chart in shown.charts]


def test_a_warm_up_is_a_chart_of_its_own_with_each_update_once(tmp_path):
    directory = write_campaign(tmp_path, {("grpo", 0): flat(0.5), ("grpo", 1): flat(0.5)})
    updates = [(1, 1, 3.0), (2, 1, 9.0), (2, 2, 2.0)]  # a second attempt repeats the second
    rows = [json.dumps({"step": s, "attempt": a, "loss": loss}) for s, a, loss in updates]
    (directory / "runs" / "grpo_s0" / "warmup.jsonl").write_text("\n".join([*rows, "torn"]) + "\n")
    (directory / "runs" / "grpo_s1" / "warmup.jsonl").mkdir()  # cannot be read
    first, *others = contents(gather(directory)).sections["learning"]
    assert [chart.name for chart in others] == ["mean-reward"]
    assert [row["m"] for row in first.spec["data"]["values"]] == [3.0, 2.0]


def test_absurd_values_leave_charts_that_json_can_hold(tmp_path):
    absurd = Simulated([1e308] * 3, more=lambda step: {"loss": 10**400, "lr": -1e308, "a]b.c\\": step})
    directory = write_campaign(tmp_path, {("grpo", s): absurd for s in range(3)}, steps=3)
    for chart in contents(gather(directory), ["a]b.c\\"]).charts:
        json.dumps(chart.spec, allow_nan=False)


def test_a_campaign_without_a_manifest_is_read_from_its_runs(tmp_path):
    directory = write_campaign(tmp_path, {("grpo", s): flat(0.5) for s in range(2)})
    (directory / "manifest.json").unlink()
    found = gather(directory)
    assert [(run.condition, run.seed, run.state) for run in found.runs] == [
        ("grpo", 0, "done"),
        ("grpo", 1, "done"),
    ]


def exported(campaign: CampaignRecord) -> list[Row]:
    return list(rows_of([campaign]))


def written(write: Callable[[Iterator[Row], BinaryIO], None], rows: Iterable[Row]) -> str:
    out = io.BytesIO()
    write(iter(rows), out)
    return out.getvalue().decode()


def test_an_export_holds_every_step_of_every_run_once(tmp_path):
    directory = write_campaign(tmp_path, {(c, s): flat(0.5) for c in ("grpo", "maxrl") for s in range(3)})
    rows = exported(gather(directory))
    header = written(write_csv, rows).partition("\n")[0]
    assert header.split(",")[:6] == ["campaign", "run", "condition", "seed", "state", "step"]
    assert len({(row["run"], row["step"]) for row in rows}) == len(rows) == 120


def test_csv_gives_back_what_the_rows_say(tmp_path):
    odd = Simulated([0.1, 0.25], more=lambda step: {"bp_reason": 'a "quoted",\nline', "nested": {"k": [1]}})
    found = exported(gather(write_campaign(tmp_path, {("grpo", 0): odd}, steps=2)))
    first, second = csv.DictReader(io.StringIO(written(write_csv, found)))
    assert (first["mean_reward"], second["step"], first["bp_reason"]) == ("0.1", "2", 'a "quoted",\nline')
    assert json.loads(first["nested"]) == {"k": [1]}


def test_json_lines_are_the_rows(tmp_path):
    found = exported(gather(write_campaign(tmp_path, {("grpo", 0): flat(0.5)})))
    assert [json.loads(line) for line in written(write_jsonl, found).splitlines()] == found


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (-0.00678, "-0.00678"), (12345.6, "12,346"), (0, "0"), (None, "-"), (math.nan, "-")],
)
def test_numbers_are_shown_with_three_digits(value, shown):
    assert significant(value) == shown


def test_an_export_of_ends_holds_final_values_and_configuration(tmp_path):
    runs = {
        ("grpo", 0): flat(0.5),
        ("maxrl", 0): flat(0.25, 5, ending="failed", message="Traceback\nOSError: no room"),
    }
    done, failed = ends_of([gather(write_campaign(tmp_path, runs))])
    assert (done["state"], done["final.eval_reward"], done["algorithm.advantage_mode"]) == (
        "done",
        0.5,
        "grpo",
    )
    assert (failed["state"], failed["step"], failed["final.mean_reward"], failed["message"]) == (
        "failed",
        5,
        0.25,
        "OSError: no room",
    )


@pytest.mark.parametrize("names", [["study-aaaa"], ["study-aaaa", "study-bbbb"], []])
def test_the_export_command_takes_any_number_of_campaigns(tmp_path, retrain: Call, names):
    (tmp_path / "logs").mkdir()
    for name in names:
        write_campaign(tmp_path / "logs", {("grpo", 0): flat(0.5)}, name=name)
    answer = retrain("export")
    assert answer.returncode == 0
    assert len(list(csv.DictReader(io.StringIO(answer.stdout)))) == 20 * len(names)


def test_an_export_into_a_file_of_an_unknown_kind_says_which_are_known(tmp_path, retrain: Call):
    write_campaign(tmp_path / "logs", {("grpo", 0): flat(0.5)})
    answer = retrain("export", "-o", "rows.xlsx")
    assert (answer.returncode, "use --format csv, jsonl or parquet" in answer.stderr) == (2, True)


@pytest.mark.parametrize("command", ["export", "report"])
def test_an_unknown_format_is_refused_in_the_same_words(tmp_path, retrain: Call, command: str):
    write_campaign(tmp_path / "logs", {("grpo", 0): flat(0.5)})
    answer = retrain(command, "--format", "xml")
    assert answer.returncode == 2
    assert answer.stderr.startswith("--format xml: unknown file format; use --format ")
