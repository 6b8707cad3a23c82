"""Does `retrain compare` tell identical conditions apart, and find a difference as often as theory says?

Each campaign is real: runs of the numpy backend, written to disk and read back as users' are. It holds
`a`; `twin`, the same but for a learning rate 0.1 % higher, which changes every sampled token after a few
steps and no mean that so few seeds could show; and `slow`, with a lower learning rate. Seeds are its own.

    paired      a against twin (or slow) of one campaign, seed by seed
    unpaired    a against twin (or slow) of the next campaign, whose seeds are others: exactly identical

The size of the real difference is taken from all runs of all campaigns together. How often so few seeds
find it follows from the noncentral t distribution if scores are normal ("by theory"), and otherwise from
drawing seeds out of all ("expected"). "By bootstrap" is how often the BCa interval alone would claim one.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from scipy import stats

from benchmarks.suite import script_parser
from retrain.campaign.run import run_campaign
from retrain.cli.render.tables import table
from retrain.records.windows import Window
from retrain.results.report.compare import MetricComparison, Outcome, compare
from retrain.results.report.gather import CampaignRecord, gather
from retrain.results.report.sides import Match, Side, final_value, side_of

Scores = NDArray[np.float64]

METRICS = ("eval_reward", "mean_reward")
CAMPAIGN = """
[training]
batch_size = 8
group_size = 8
max_tokens = 4
temperature = 1.0
lr = 3e-2
save_every = 0

[data]
task = "sort"
eval_prompts = 64
[data.options]
length = 2

[reward]
reward = "partial"

[backend.options]
hidden = 16
embedding = 8

[campaign]
seeds = [{seeds}]
max_steps = {steps}
launcher = "inline"

[[campaign.conditions]]
name = "a"

[[campaign.conditions]]
name = "twin"
[campaign.conditions.training]
lr = 3.003e-2

[[campaign.conditions]]
name = "slow"
[campaign.conditions.training]
lr = {slow}

[logging]
log_dir = "{log_dir}"
"""


@dataclass(frozen=True)
class Setting:
    """What is judged: a pair of conditions in a metric, by so many seeds."""

    other: str
    metric: str
    seeds: int
    paired: bool


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--slow", type=float, default=1.5e-2)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        orders = [
            (Path(directory) / f"{i:04d}", range(i * max(asked.seeds), (i + 1) * max(asked.seeds)), asked)
            for i in range(asked.campaigns)
        ]
        with ProcessPoolExecutor(asked.jobs) as pool:
            campaigns = list(pool.map(run_one, orders))
        Console(width=160).print(table("", COLUMNS, list(rows(campaigns, asked.seeds))))


def run_one(order: tuple[Path, range, argparse.Namespace]) -> CampaignRecord:
    directory, seeds, asked = order
    directory.mkdir()
    file = directory / "aa.toml"
    text = CAMPAIGN.format(
        seeds=", ".join(map(str, seeds)), steps=asked.steps, slow=asked.slow, log_dir=directory
    )
    file.write_text(text)
    run_campaign(file)
    return gather(directory)


COLUMNS = (
    "compared",
    "metric",
    ">seeds",
    "how",
    ">separated",
    ">expected",
    ">of so many",
    ">by theory",
    ">by bootstrap",
    ">true difference",
    ">in spreads",
)


def rows(campaigns: Sequence[CampaignRecord], seed_counts: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for other, metric, seeds, paired in product(("twin", "slow"), METRICS, seed_counts, (True, False)):
        yield row(campaigns, Setting(other, metric, seeds, paired))


def row(campaigns: Sequence[CampaignRecord], setting: Setting) -> tuple[str, ...]:
    found = [judge(*pair, setting) for pair in pairs(campaigns, setting)]
    told_apart = np.mean([one.differences[0].outcome in (Outcome.HIGHER, Outcome.LOWER) for one in found])
    by_bootstrap = np.mean([excludes_zero(one) for one in found])
    a, other = (values(campaigns, name, setting.metric) for name in ("a", setting.other))
    expected = 0.05 if setting.other == "twin" else resampled_power(a, other, setting)
    low, high = stats.binom.interval(0.95, len(found), expected)
    gap = float(other.mean() - a.mean())
    return (
        f"a, {setting.other}",
        setting.metric,
        str(setting.seeds),
        "paired" if setting.paired else "unpaired",
        f"{told_apart:.1%}",
        f"{expected:.1%}",
        f"{low / len(found):.1%} to {high / len(found):.1%}",
        f"{0.05 if setting.other == 'twin' else normal_power(a, other, setting):.1%}",
        f"{by_bootstrap:.1%}",
        f"{gap:+.4f}",
        f"{gap / spread(a, other, setting):+.2f}",
    )


def pairs(
    campaigns: Sequence[CampaignRecord], setting: Setting
) -> Iterator[tuple[CampaignRecord, CampaignRecord]]:
    for i, campaign in enumerate(campaigns):
        yield campaign, campaign if setting.paired else campaigns[(i + 1) % len(campaigns)]


def judge(first: CampaignRecord, second: CampaignRecord, setting: Setting) -> MetricComparison:
    sides = (
        Side("a", side_of(first, "a").runs[: setting.seeds]),
        Side(setting.other, side_of(second, setting.other).runs[: setting.seeds]),
    )
    return compare(Match("", sides), [setting.metric]).metrics[0]


def excludes_zero(found: MetricComparison) -> bool:
    low, high = found.differences[0].difference.bootstrap_low, found.differences[0].difference.bootstrap_high
    return low is not None and high is not None and (low > 0 or high < 0)


def spread(a: Scores, other: Scores, setting: Setting) -> float:
    """Deviation of what one seed says of the difference; NaN if all seeds say the same."""
    found = (other - a).std(ddof=1) if setting.paired else math.hypot(a.std(ddof=1), other.std(ddof=1))
    return float(found) or math.nan


def normal_power(a: Scores, other: Scores, setting: Setting) -> float:
    """How often so many seeds find the difference, were scores normal: the noncentral t distribution."""
    n, variances = setting.seeds, (a.var(ddof=1), other.var(ddof=1))
    welch = (n - 1) * sum(variances) ** 2 / sum(v**2 for v in variances)
    freedom = float(n - 1 if setting.paired else welch)
    gap = float(other.mean() - a.mean())
    centre, edge = gap / spread(a, other, setting) * math.sqrt(n), float(stats.t.ppf(0.975, freedom))
    return float(stats.nct.sf(edge, freedom, centre) + stats.nct.cdf(-edge, freedom, centre))


def resampled_power(a: Scores, other: Scores, setting: Setting, draws: int = 20_000) -> float:
    """How often so many seeds find it, with scores as they are: scipy's tests on seeds drawn from all."""
    rng = np.random.default_rng(0)
    which = rng.integers(len(a), size=(draws, setting.seeds))
    warnings.simplefilter("ignore")  # now and then all seeds drawn are the same one
    if setting.paired:
        p = stats.ttest_rel(other[which], a[which], axis=1).pvalue
    else:
        strangers = rng.integers(len(a), size=which.shape)
        p = stats.ttest_ind(other[strangers], a[which], axis=1, equal_var=False).pvalue
    return float(np.mean(p < 0.05))


def values(campaigns: Sequence[CampaignRecord], condition: str, metric: str) -> Scores:
    found = [compare_values(campaign, condition, metric) for campaign in campaigns]
    return np.concatenate(found)


def compare_values(campaign: CampaignRecord, condition: str, metric: str) -> Scores:
    return np.array([final_value(run, metric, Window()) for run in side_of(campaign, condition).runs])


if __name__ == "__main__":
    main()
