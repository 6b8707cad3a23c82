"""What runs cost, in the report's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.records.layout import RunFiles
from retrain.records.spending import Spending, write_spending
from retrain.report.contents import contents
from retrain.report.gather import gather
from retrain.report.page import page
from tests.simulated import flat, write_campaign

pytestmark = pytest.mark.extras


def test_notes_on_verdicts_do_not_stand_under_costs(tmp_path: Path) -> None:
    directory = write_campaign(tmp_path, {("grpo", seed): flat(0.5) for seed in range(3)})
    write_spending(RunFiles(directory / "runs" / "grpo_s0"), Spending(usd=2.0), durable=False)
    shown = page(contents(gather(directory)))
    assert shown.index("Verdicts follow the") < shown.index("cost of a run") < shown.index("grpo: $2.00")
