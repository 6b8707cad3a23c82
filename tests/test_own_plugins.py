"""Code of a user's own, named by dotted path: what is wrong with it is a problem of its key."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from retrain import registry
from retrain.config.load import parse
from retrain.errors import ConfigError


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def score(:", "(SyntaxError at {file}:1: invalid syntax"),
        ("\nscore = 1 / 0", "(ZeroDivisionError at {file}:2: division by zero); mend that code"),
        ("from .other import score", "(attempted relative import with no known parent package); check"),
        ("pass", "has no attribute 'score'); check the path"),
        ("score = 3", "is a int, not a function"),
    ],
)
def test_what_cannot_be_imported_is_told_with_its_place(
    code: str, says: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{zlib.crc32(code.encode())}"
    (here / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(here))
    with pytest.raises(ConfigError) as caught:
        parse({"reward": {"reward": f"{name}.score"}}, "c.toml")
    (found,) = caught.value.problems
    assert found.startswith("c.toml [reward].reward: ")
    assert says.format(file=here / f"{name}.py") in found


def test_a_function_without_a_module_is_no_path() -> None:
    with pytest.raises(ConfigError, match="is no dotted path"):
        registry.find_function("throttle.load_fn", "load")
