import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.text import plain, without_middle


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("grpo_s42", "grpo_s42"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("a\u202eb\u2066c\u200fd", "abcd"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("two\nlines\tand\x00more\x85end", "two lines andmore end"),
        ("lone\ud800surrogate", "lonesurrogate"),
        ("[bold]markup stays text[/bold]", "[bold]markup stays text[/bold]"),
        ("Größe 大きさ", "Größe 大きさ"),
    ],
)
def test_hostile_text_loses_what_a_terminal_would_obey(hostile, shown):
    assert plain(hostile) == shown


def test_long_text_ends_in_an_ellipsis_at_the_limit():
    assert plain("x" * 500, limit=10) == "x" * 9 + "…"


def test_megabytes_of_escapes_leave_no_escape_behind():
    assert plain("\x1b" * 5_000_000, limit=10) == "…"


@settings(max_examples=50)
@given(text=st.text(), limit=st.integers(1, 50))
def test_any_text_becomes_one_printable_line_within_the_limit(text, limit):
    shown = plain(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()


@settings(max_examples=50)
@given(text=st.text())
def test_text_that_is_plain_already_stays_as_it_is(text):
    assert plain(plain(text)) == plain(text)


@pytest.mark.parametrize(
    ("limit", "shown"), [(11, "漢字 lr=0.1"), (10, "漢字…r=0.1"), (9, "漢字…=0.1"), (6, "漢…0.1")]
)
def test_a_name_without_its_middle_fits_in_columns(limit: int, shown: str) -> None:
    assert without_middle("漢字 lr=0.1", limit) == shown
