"""What runs cost, in comparisons and in the report's page."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.records.layout import RunFiles
from retrain.records.spending import Spending, write_spending
from retrain.records.text import dollars
from retrain.results.report.compare import compare, cost_lines
from retrain.results.report.contents import contents
from retrain.results.report.gather import gather
from retrain.results.report.page import page
from retrain.results.report.sides import choose
from tests.simulated import flat, write_campaign
from tests.trainer.test_budget import run_with_budget

pytestmark = pytest.mark.extras


def test_notes_on_verdicts_do_not_stand_under_costs(tmp_path: Path) -> None:
    directory = write_campaign(tmp_path, {("grpo", seed): flat(0.5) for seed in range(3)})
    write_spending(RunFiles(directory / "runs" / "grpo_s0"), Spending(usd=2.0))
    shown = page(contents(gather(directory)))
    assert shown.index("Outcomes follow the") < shown.index("cost of a run") < shown.index("grpo: $2.00")


def test_compare_tells_what_a_difference_costs(campaign_file: Path) -> None:
    campaign_file.write_text(campaign_file.read_text().replace('"maxrl"', '"maxrl"\ntraining.group_size = 8'))
    done = run_with_budget(campaign_file, 5)
    [match] = choose([str(done.directory)])
    found = compare(match, ["mean_reward"])
    cheap, dear = found.costs
    assert (cheap.dearer_usd, cheap.runs, dear.runs) == (0.0, 2, 2)
    assert cheap.cost_usd is not None
    assert dear.cost_usd is not None
    assert dear.dearer_usd == pytest.approx(dear.cost_usd - cheap.cost_usd)
    said = list(cost_lines(found))
    assert said[0] == f"grpo: {dollars(cheap.cost_usd)}"
    assert said[1].startswith(
        f"maxrl: {dollars(dear.cost_usd)}; {dollars(dear.dearer_usd)} more; mean_reward +"
    )
    assert said[1].endswith(" per further dollar")
