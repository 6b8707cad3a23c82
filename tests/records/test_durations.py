"""Time spans as people write and read them."""

import pytest

from retrain.records.text import about, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6h", 21600),
        ("90m", 5400),
        ("90 min", 5400),
        ("1h30m", 5400),
        ("2d", 172800),
        ("45s", 45),
        ("1.5h", 5400),
    ],
)
def test_spans_are_read_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "6", "h", "6 hours and", "-1h", "1h x", "1e3s", "nan"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write it as 6h"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["0s", "0h 0m"])
def test_no_time_is_told_apart_from_what_is_no_span(text: str) -> None:
    with pytest.raises(ValueError, match=f"got '{text}'; needs a time above 0, such as 6h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.00042, "0.42 ms"),
        (0.004, "4.0 ms"),
        (0.0047, "4.7 ms"),
        (0.0994, "99 ms"),
        (0.0998, "0.10 s"),
        (0.1, "0.10 s"),
        (0.25, "0.25 s"),
        (0.996, "1.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min 0 s"),
        (125, "2 min 5 s"),
        (12000, "3 h 20 min"),
        (187200, "2 d 4 h"),
    ],
)
def test_a_span_has_two_digits_or_its_two_largest_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_about_leaves_out_what_an_estimate_cannot_know() -> None:
    assert (about(31 * 60 + 4), about(3600), about(7 * 60 + 5)) == ("31 min", "1 h", "7 min 5 s")
