"""The quickstart does what the README says of it: its conditions can be told apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TEMPLATE = Path(__file__).parents[2] / "templates" / "quickstart.toml"


def test_the_better_condition_of_the_quickstart_is_named(here: Path) -> None:
    command = [sys.executable, "-m", "retrain"]
    subprocess.run([*command, TEMPLATE], cwd=here, check=True, capture_output=True)
    (campaign,) = (here / "logs").glob("quickstart-*")
    shown = subprocess.run([*command, "compare", campaign], check=True, capture_output=True, text=True)
    assert "slow against fast: lower, worse" in shown.stdout
    assert len(json.loads((campaign / "manifest.json").read_text())["runs"]) == 6
