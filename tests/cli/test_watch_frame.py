"""Frames of the live view: they fit whatever there is to show and wherever it is shown."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from retrain.base.streams import ASCII
from retrain.cli.render.frame import LEVELS, clock, frame, matrix, sparkline
from retrain.control.semaphore import Holder
from retrain.records.run_row import RunReading, RunRow
from retrain.results.status import CampaignStatus, PermitStatus, summarize
from retrain.results.status.watch import View, WatchedCampaign, WatchEvent

STATES = ["pending", "running", "done", "failed", "died", "infrastructure", "interrupted", "unreadable"]
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=30)


def filled(kind, **values):
    """A row with what a test says, and nothing in its other fields."""
    blank = {f.name: "" if f.type == "str" else None for f in dataclasses.fields(kind)}
    return kind(**blank | values)


def run_of(condition="grpo", seed=0, state="running", **values):
    own = {"run_id": f"{condition}_s{seed}", "condition": condition, "seed": seed, "state": state}
    return filled(RunRow, **own | {"phase": "train", "step": 5, "max_steps": 10} | values)


def campaign_of(runs, state="running", rewards=(0.1, 0.5, 0.9)):
    holder = Holder(1, "host", "holder", 0.5)
    status = filled(
        CampaignStatus,
        id="study-20250131T120000Z-0a1b",
        name="study",
        state=state,
        conditions=summarize(runs),
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        runs=tuple(runs),
        steps_done=sum(run.step for run in runs),
        steps_total=10 * len(runs),
        eta_s=100.0,
        eta_p90_s=200.0,
        permits=filled(PermitStatus, permits=4, holders=(holder,), waiting=7),
    )
    return WatchedCampaign(status, {run.run_id: RunReading(run, tuple(rewards)) for run in runs})


def view_of(*campaigns, events=()):
    return View(campaigns, tuple(events), ())


def text_of(view, width=100, height=30):
    return "\n".join(line.plain for line in frame(view, width, height, "logs"))


@given(
    names=st.lists(NAMES, min_size=0, max_size=12, unique=True),
    seeds=st.integers(1, 120),
    states=st.lists(st.sampled_from(STATES), min_size=1, max_size=5),
    campaigns=st.integers(0, 4),
    width=st.integers(1, 200),
    height=st.integers(1, 60),
)
def test_a_frame_fits_every_screen(names, seeds, states, campaigns, width, height):
    runs = [
        run_of(name, seed, states[(i + seed) % len(states)], message="why", bp_regime=name)
        for i, name in enumerate(names)
        for seed in range(seeds)
    ]
    events = [WatchEvent("2025-01-31T12:00:00.000Z", "failed", name * 9, run_id=name) for name in names]
    view = view_of(*[campaign_of(runs)] * campaigns, events=events if campaigns else ())
    lines = frame(view, width, height, "logs")
    assert len(lines) <= height
    assert all(cell_len(line.plain) <= width for line in lines)


def test_the_view_tells_bars_matrix_curves_regime_batch_permits_and_events():
    run = run_of(bp_regime="optimal", batch_size=12, reward_mean=0.9, throttle_level="reduced")
    event = WatchEvent("2025-01-31T12:00:00.000Z", "failed", "ValueError: no such task", run_id="grpo_s1")
    told = text_of(view_of(campaign_of([run, run_of(seed=1, state="failed")]), events=[event]), width=120)
    for part in ("50 %", "left (P90", "permits 1/4 held, 7 waiting", "optimal", "reduced", "12", "✗"):
        assert part in told
    assert "failed grpo_s1: ValueError: no such task" in told


def test_the_view_names_the_runs_that_lack_most_scores():
    shares = (0.02, 0.31, None, 0.5, 0.04)
    runs = [
        run_of(seed=seed, unscored_fraction=share, unscored_reason="judge.py:9: UnscoredError: 503")
        for seed, share in enumerate(shares)
    ]
    lines = text_of(view_of(campaign_of(runs)), width=120).splitlines()
    assert [line[:40] for line in lines if "no score" in line] == [
        "grpo_s3: 50 % of completions have no sco",
        "grpo_s1: 31 % of completions have no sco",
        "grpo_s4: 4 % of completions have no scor",
    ]


def test_the_view_names_the_runs_whose_trainer_drifts_from_its_sampler():
    rise = "mismatch_kl rose steadily from 0.0013 to 0.0054 nats per token in 40 steps, up to step 40"
    told = text_of(view_of(campaign_of([run_of(mismatch_rise=rise), run_of(seed=1)])), width=120)
    assert f"grpo_s0: {rise}" in told
    assert "grpo_s1: " not in told


@pytest.mark.parametrize(("width", "height"), [(120, 30), (80, 24), (40, 15), (20, 6)])
def test_the_last_line_says_how_to_leave_at_every_size(width, height):
    runs = [run_of(f"condition-{i}", seed) for i in range(9) for seed in range(9)]
    events = [WatchEvent("2025-01-31T12:00:00.000Z", "started", "", run_id="c0_s0")] * 9
    lines = text_of(view_of(campaign_of(runs), events=events), width, height).splitlines()
    assert (len(lines), lines[-1].startswith("q quits")) == (height, True)


def test_a_campaign_without_its_orchestrator_shows_how_to_resume():
    seen = campaign_of([run_of()])
    status = dataclasses.replace(seen.status, resume_with="retrain resume logs/study")
    told = text_of(view_of(dataclasses.replace(seen, status=status)), width=120)
    assert "its orchestrator has exited" in told
    assert "retrain resume logs/study" in told


@pytest.mark.parametrize("directory", ["logs/study-20250131T120000Z-0a1b", "/x" * 40, "/データ/研究/実験"])
def test_the_command_that_resumes_is_whole_on_a_small_screen(directory):
    seen = campaign_of([run_of(f"c{i}", seed) for i in range(3) for seed in range(3)])
    status = dataclasses.replace(seen.status, resume_with=f"retrain resume {directory}")
    lines = text_of(view_of(dataclasses.replace(seen, status=status)), width=40, height=15).splitlines()
    assert f"retrainresume{directory}" in "".join(lines).replace(" ", "")


def test_states_are_told_apart_without_colour_and_in_ascii():
    shown = [
        matrix(campaign_of([run_of(state=state, step=9)]).status, 40, 9)[1].plain[-1]
        for state in ("pending", "running", "done", "failed", "interrupted")
    ]
    assert len(set(shown)) == len({ASCII[char] for char in shown}) == 5


def test_an_evaluation_that_falls_while_the_reward_rises_is_named():
    told = text_of(view_of(campaign_of([run_of(eval_falling="hard fell by 0.2")])))
    assert "grpo_s0: the reward rises, but hard fell by 0.2" in told


def test_forty_columns_show_how_every_condition_goes():
    runs = [run_of(f"condition-{i}", seed) for i in range(4) for seed in range(3)]
    told = text_of(view_of(campaign_of(runs)), width=40, height=24)
    assert all(f"condition-{i}" in told for i in range(4))


@pytest.mark.parametrize("conditions", [2, 3, 6])
def test_a_short_screen_shows_conditions_runs_and_an_event(conditions):
    runs = [run_of(f"c{c}", seed) for c in range(conditions) for seed in range(3)]
    events = [WatchEvent("2025-01-31T12:00:00.000Z", "started", "", run_id="c0_s0")] * 4
    lines = text_of(view_of(campaign_of(runs), events=events), width=40, height=15).splitlines()
    assert sum(line.startswith("  c") for line in lines) >= 1
    assert sum(line.startswith("▅ c") for line in lines) >= 2
    assert sum("started c0_s0" in line for line in lines) == 1


def test_a_condition_and_its_runs_are_shown_by_its_own_name():
    told = text_of(view_of(campaign_of([run_of("Контроль", run_id="condition-4ee952_s0")])), width=80)
    assert "Контроль_s0" in told
    assert "4ee952" not in told


def test_a_thousand_runs_are_counted_where_they_do_not_fit():
    states = ["done", "running", "failed", "pending"]
    runs = [run_of(f"c{i}", seed, states[seed % 4]) for i in range(10) for seed in range(100)]
    told = text_of(view_of(campaign_of(runs)), width=80, height=24)
    assert "250 done" in told
    assert "(+" in told


def test_what_runs_and_what_failed_comes_before_what_is_over():
    runs = [run_of(seed=0, state="done"), run_of(seed=1, state="failed"), run_of(seed=2, state="running")]
    told = text_of(view_of(campaign_of(runs)))
    assert told.index("grpo_s2") < told.index("grpo_s1") < told.index("grpo_s0")


def test_runs_of_a_campaign_share_one_scale():
    low, high = run_of(seed=0), run_of(seed=1)
    status = campaign_of([low, high]).status
    campaign = WatchedCampaign(
        status, {"grpo_s0": RunReading(low, (0.0, 0.1)), "grpo_s1": RunReading(high, (0.9, 1.0))}
    )
    told = text_of(View((campaign,), (), ())).splitlines()
    assert "▁▁" in next(line for line in told if "grpo_s0" in line)
    assert "██" in next(line for line in told if "grpo_s1" in line)


def test_a_directory_without_campaigns_says_how_to_begin():
    assert "no campaigns yet" in text_of(View((), (), ()))


def test_campaigns_that_are_over_get_one_line_beside_one_that_runs():
    over = campaign_of([run_of(state="done")], state="done")
    told = text_of(View((over, over, campaign_of([run_of()])), (), ()))
    assert "other campaigns: 2 done" in told


def test_a_run_without_rows_is_shown_without_a_curve():
    told = text_of(view_of(campaign_of([run_of(reward_mean=None)], rewards=())))
    assert "grpo_s0" in told


def test_each_character_of_a_frame_has_one_in_ascii():
    runs = [run_of(f"condition-{i}", seed, state) for i in range(40) for seed, state in enumerate(STATES)]
    told = text_of(view_of(campaign_of(runs)), width=60)
    assert set(told) - set(map(chr, range(128))) <= set(ASCII)


@given(values=st.lists(st.floats(0, 1), max_size=100), width=st.integers(0, 50))
def test_a_sparkline_never_rises_where_values_fall(values, width):
    levels = [LEVELS.index(char) for char in sparkline(sorted(values), width, 0, 1)]
    assert levels == sorted(levels)
    assert len(levels) == min(width, len(values))


def test_what_is_no_time_shows_no_time():
    assert clock("\x1b[2J") == " " * 8


def test_conditions_of_a_sweep_are_told_apart_by_the_ends_of_their_names():
    names = [f"grpo 漢字 lr=0.001 temperature=0.757 entropy_bonus=0.0{number}" for number in (181, 431, 56)]
    view = view_of(campaign_of([run_of(name, seed) for name in names for seed in (0, 1)]))
    lines = text_of(view, 80, 24).splitlines()
    starts = [line[:29] for line in lines if line[2:].startswith("grpo")]
    assert len(set(starts)) == len(starts) == 3 + 6  # a line of the matrix each, and a line for each run
