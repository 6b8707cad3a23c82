import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.control.rules.throttle import (
    LEVELS,
    Held,
    Load,
    ThrottleLevel,
    ThrottleRule,
    ThrottleState,
    decide,
    level_for,
)

FULL, REDUCED, MINIMAL, PAUSED = ThrottleLevel
LOADS = st.floats(0, 1)
RULE = ThrottleRule()


def loaded(share):
    return Load({"cpu": share})


def replay(shares, rule=RULE, every_s=5.0):
    held, states = None, []
    for i, share in enumerate(shares):
        state, held = decide(loaded(share), i * every_s, held, rule)
        states.append(state)
    return states


def levels(shares, rule=RULE, every_s=5.0):
    return [state.level for state in replay(shares, rule, every_s)]


def test_levels_are_ordered_by_restriction():
    assert FULL < REDUCED < MINIMAL < PAUSED
    assert max(ThrottleLevel) is PAUSED


@pytest.mark.parametrize(
    ("load", "level"),
    [
        (0.0, FULL),
        (0.299, FULL),
        (0.3, REDUCED),
        (0.599, REDUCED),
        (0.6, MINIMAL),
        (0.85, PAUSED),
        (1.0, PAUSED),
    ],
)
def test_a_boundary_belongs_to_the_more_restrictive_level(load, level):
    assert level_for(load) is level


@pytest.mark.parametrize(
    ("level", "batch", "workers", "gpu", "interval_s"),
    [(FULL, 1.0, 4, 1.0, 30), (REDUCED, 0.5, 2, 0.5, 15), (MINIMAL, 0.25, 1, 0.25, 10), (PAUSED, 0, 0, 0, 5)],
)
def test_each_level_leaves_what_its_table_row_says(level, batch, workers, gpu, interval_s):
    state = ThrottleState(level, "")
    given_back = (state.batch_multiplier, state.num_workers, state.gpu_fraction, state.check_interval_s)
    assert given_back == (batch, workers, gpu, interval_s)
    assert state.should_train == (level is not PAUSED)


@given(low=LOADS, high=LOADS, min_level=st.sampled_from(ThrottleLevel))
def test_more_load_never_leaves_more(low, high, min_level):
    low, high = sorted((low, high))
    rule = ThrottleRule(min_level=min_level)
    (at_low,), (at_high,) = replay([low], rule), replay([high], rule)
    assert at_low.batch_multiplier >= at_high.batch_multiplier
    assert at_low.level >= min_level


@given(shares=st.lists(LOADS, min_size=1), min_level=st.sampled_from(ThrottleLevel))
def test_no_history_of_loads_goes_below_the_minimum_or_the_table(shares, min_level):
    chosen = levels(shares, ThrottleRule(min_level=min_level))
    assert all(level >= max(min_level, level_for(share)) for level, share in zip(chosen, shares, strict=True))


def test_load_around_a_boundary_does_not_flap():
    assert levels([0.301, 0.299] * 50) == [REDUCED] * 100


def test_more_load_restricts_at_once():
    assert levels([0.0, 0.9]) == [FULL, PAUSED]


def test_less_load_relaxes_only_after_the_dwell():
    assert levels([0.9, 0.1, 0.1, 0.1, 0.1]) == [PAUSED, PAUSED, PAUSED, FULL, FULL]


def test_a_burst_starts_the_dwell_again():
    assert levels([0.9, 0.1, 0.9, 0.1, 0.1, 0.1]) == [PAUSED] * 5 + [FULL]


def test_one_low_reading_at_the_end_of_the_dwell_relaxes_no_further_than_the_others_allow():
    assert levels([0.9, 0.7, 0.7, 0.0, 0.7]) == [PAUSED, PAUSED, PAUSED, MINIMAL, MINIMAL]


@given(shares=st.lists(LOADS, min_size=1))
def test_a_level_is_left_only_for_one_that_every_reading_of_the_dwell_allowed(shares):
    chosen, readings = levels(shares), int(RULE.dwell_s // 5) + 1
    for i in range(1, len(shares)):
        if chosen[i] < chosen[i - 1]:
            assert i + 1 >= readings
            assert all(level_for(share) <= chosen[i] for share in shares[i + 1 - readings : i + 1])


def test_relaxing_stops_at_the_level_that_keeps_the_margin():
    assert levels([0.9, 0.58, 0.58, 0.58], ThrottleRule(hysteresis=0.05)) == [PAUSED] * 3 + [MINIMAL]


def test_an_unknown_load_is_marked_and_never_full():
    state, _ = decide(Load(unknown=("GPU: gone",)), 0.0, None, RULE)
    assert (state.level, state.load, state.is_known) == (REDUCED, None, False)
    assert "GPU: gone" in state.reason


def test_a_partly_unknown_load_is_as_restrictive_as_its_known_part():
    state, _ = decide(Load({"cpu": 0.9}, ("GPU: gone",)), 0.0, None, RULE)
    assert (state.level, state.is_known) == (PAUSED, False)


def test_the_rule_for_unknown_loads_is_a_choice():
    state, _ = decide(Load(), 0.0, None, ThrottleRule(on_unknown=PAUSED))
    assert not state.should_train


def test_a_reading_that_becomes_unknown_does_not_relax_at_once():
    state, held = decide(Load(), 1.0, Held(PAUSED), RULE)
    assert (state.level, held.calm_since_s) == (PAUSED, 1.0)


@pytest.mark.parametrize(
    "choice", [{"hysteresis": 0.3}, {"hysteresis": -0.1}, {"dwell_s": -1}, {"dwell_s": float("nan")}]
)
def test_margins_that_cannot_work_are_refused(choice):
    with pytest.raises(ValueError, match="needs"):
        ThrottleRule(**choice)


@given(share=LOADS)
def test_the_scarcest_resource_decides(share):
    assert Load({"cpu": share, "memory": share / 2, "gpu": 0.0}).value == share


def test_a_state_is_plain_data_for_a_log():
    (state,) = replay([0.42])
    assert state.to_dict() == {
        "level": "reduced",
        "load": 0.42,
        "is_known": True,
        "batch_multiplier": 0.5,
        "num_workers": 2,
        "gpu_fraction": 0.5,
        "should_train": True,
        "check_interval_s": 15.0,
        "reason": "load 0.42: cpu 0.42",
        "parts": {"cpu": 0.42},
    }
    assert state.summary() == "[reduced] batch×0.50 workers=2 gpu=50% | fleet_load=0.42 zone=moderate"


def test_every_level_has_a_row():
    assert set(LEVELS) == set(ThrottleLevel)
