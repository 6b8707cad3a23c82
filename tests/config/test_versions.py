"""A file keeps the meanings that its keys had when its campaign began."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.config import keys
from retrain.config.keys import CURRENT, Table, as_meant
from retrain.config.load import load_config


def test_a_file_of_an_earlier_number_is_read_with_every_change_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faster(tables: Table) -> Table:
        return {"training": {"lr": 10 * tables["training"]["lr"]}}

    for number in (CURRENT, CURRENT + 1):
        monkeypatch.setitem(keys.UPGRADES, number, faster)
    monkeypatch.setattr(keys, "CURRENT", CURRENT + 2)
    (path := tmp_path / "c.toml").write_text("[training]\nlr = 0.001\n")
    rates = [load_config(path, version=CURRENT + n).training.lr for n in range(3)]
    assert rates == pytest.approx([0.1, 0.01, 0.001])


@pytest.mark.parametrize("number", [CURRENT - 1, CURRENT + 1])
def test_a_number_of_another_version_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=rf"^version {number} .* reads {CURRENT} to {CURRENT}; use"):
        as_meant({"run": {"version": number}})
