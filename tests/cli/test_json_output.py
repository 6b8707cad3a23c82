"""What `--json` prints has a version, and every field of it is documented."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.campaign import conformance
from retrain.campaign.states import RunStates
from retrain.cli import doctor, plugins
from retrain.config.load import ValueOrigin
from retrain.control.semaphore import Holder
from retrain.plan import designs, expected_seeds, explain, most_cost
from retrain.plan.estimate import Change, devices, money, wall_time
from retrain.records import attention, campaign_state, decision, rungs, samples, windows
from retrain.records.manifest import Expectation
from retrain.records.run_row import Pace
from retrain.results import publish
from retrain.results.publish import merging
from retrain.results.report import compare, questions, statistics
from retrain.results.status import CampaignStatus, ConditionStatus, MirrorStatus, PermitStatus, waiting
from tests.simulated import flat, write_campaign

PAGE = Path(__file__).parents[2] / "docs" / "json.md"
DOCUMENTED = {
    **{kind.__name__: kind for kind in (CampaignStatus, ConditionStatus, Pace)},
    **{kind.__name__: kind for kind in (MirrorStatus, PermitStatus, Holder, Expectation)},
    **{kind.__name__: kind for kind in (explain.Explanation, explain.ConditionPlan, wall_time.WallTime)},
    **{kind.__name__: kind for kind in (wall_time.ConditionSummary, Change)},
    **{kind.__name__: kind for kind in (compare.Comparison, compare.MetricComparison, compare.SideResult)},
    **{kind.__name__: kind for kind in (compare.Judged, statistics.SeedSummary, statistics.Difference)},
    **{kind.__name__: kind for kind in (decision.Decision, decision.ConditionDecision)},
    **{kind.__name__: kind for kind in (decision.QuestionNoise, decision.Questions)},
    "Unreached": decision.Unreached,
    **{kind.__name__: kind for kind in (rungs.Searched, rungs.Rung)},
    "ByQuestion": questions.ByQuestion,
    "ExpectedSeeds": expected_seeds.ExpectedSeeds,
    **{kind.__name__: kind for kind in (designs.Designs, designs.DesignForecast)},
    **{kind.__name__: kind for kind in (designs.Agreement, designs.QuestionForecast)},
    "FurtherQuestions": designs.FurtherQuestions,
    **{kind.__name__: kind for kind in (explain.SourceShares, explain.MemoryUse)},
    "MostCost": most_cost.MostCost,
    "Price": explain.Price,
    **{kind.__name__: kind for kind in (devices.DeviceSplits, devices.DeviceSplit)},
    "ValueOrigin": ValueOrigin,
    "KeyDifference": compare.KeyDifference,
    "Cost": compare.Cost,
    "UnscoredShare": compare.UnscoredShare,
    "Window": windows.Window,
    **{kind.__name__: kind for kind in (money.CostForecast, money.ConditionCost)},
    "ChecklistLine": explain.ChecklistLine,
    "Check": doctor.Check,
    **{kind.__name__: kind for kind in (waiting.Waited, attention.Attention, campaign_state.Alert)},
    "Published": publish.Published,
    "Merged": merging.Merged,
    **{kind.__name__: kind for kind in (samples.KeptSample, samples.SampleTurn)},
    **{kind.__name__: kind for kind in (plugins.PluginRow, conformance.Finding, RunStates)},
}


def sections() -> Iterator[tuple[str, list[str]]]:
    for section in PAGE.read_text().split("\n### ")[1:]:
        yield (
            section.splitlines()[0],
            re.findall(r"^\| `(\w+)` \| [^|]+ \| [^|\s][^|]* \|$", section, re.MULTILINE),
        )


def test_every_field_is_documented_and_no_other() -> None:
    assert dict(sections()) == {
        name: [field.name for field in dataclasses.fields(kind)] for name, kind in DOCUMENTED.items()
    }


@pytest.mark.parametrize(
    ("command", "key"),
    [("status", "campaigns"), ("doctor", "checks"), ("explain", "conditions")],
)
def test_results_say_their_version(
    command: str, key: str, retrain: Callable[..., CompletedProcess[str]], campaign_file: Path
) -> None:
    logs = campaign_file.parent / "logs"
    write_campaign(logs, {(c, s): flat(0.5) for c in ("grpo", "maxrl") for s in (0, 1)})
    about = {"status": logs, "doctor": campaign_file.name, "explain": campaign_file.name}
    found = json.loads(retrain(command, about[command], "--json").stdout)
    assert (found["version"], isinstance(found[key], list)) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("plugins", "rewards"), "plugins"),
        (("plugins", "--check", "retrain.plugins.rewards.match.score"), "findings"),
    ],
)
def test_lists_are_under_a_name(
    arguments: tuple[str, ...], key: str, retrain: Callable[..., CompletedProcess[str]]
) -> None:
    found = json.loads(retrain(*arguments, "--json").stdout)
    assert found.keys() == {"version", key}
    assert found[key][0].keys()
