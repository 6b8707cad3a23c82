"""Changing keys of a table leaves all other text as it is."""

from __future__ import annotations

import tomllib

import pytest

from retrain.base.errors import ConfigError
from retrain.config.toml_files import with_keys

FILE = """# a study
[decision]   # how it ends
metric = "a#b"  # what counts
rungs = [
  10, # first
  [20][0],
]
over = "last"  # the end

[training]
over = 1
""".replace("  [20][0],\n", "  20,\n")


def test_keys_are_set_and_comments_on_other_values_stay() -> None:
    keys = {"metric": "a#b", "over": [1, 10], "finish": False, "rungs": []}
    found = with_keys(FILE, "study.toml", "decision", keys)
    assert found == (
        '# a study\n[decision]   # how it ends\nmetric = "a#b"  # what counts\nrungs = []\n'
        "over = [1, 10]\nfinish = false\n\n[training]\nover = 1\n"
    )


def test_lines_end_as_they_did() -> None:
    text = "[decision]\r\nmax_seeds = 9 # few\r\n"
    found = with_keys(text, "study.toml", "decision", {"max_seeds": 12, "over": "whole"})
    assert found == '[decision]\r\nmax_seeds = 12\r\nover = "whole"\r\n'
    assert tomllib.loads(found)["decision"] == {"max_seeds": 12, "over": "whole"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("decision = {metric = 'a'}", "written in another way"),
        ("decision.metric = 'a'", "written in another way"),
        ("[training]", "not in this file"),
        ('[decision]\nmetric = """\n[x]\nover = 1\n"""\n', "told apart"),
    ],
)
def test_a_table_that_cannot_be_edited_is_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        with_keys(text, "study.toml", "decision", {"over": "whole"})
