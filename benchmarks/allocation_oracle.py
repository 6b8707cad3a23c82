"""What an allocation would cost that knew the true differences: how much of a saving there is to have at all.

    python -m benchmarks.allocation_oracle                             500 campaigns per scenario (1 min each)
    python -m benchmarks.allocation_oracle --scenario "all differ"     one scenario

The test is that of `allocate = "auto"`, and so is its error. The oracle gives all of the error to the largest
difference, then to the next. A seed goes where the chance of finding the true difference is largest per cost;
conditions that equal the reference get none after the first. Campaigns, columns and rounds are those of
`benchmarks.allocation`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from math import sqrt

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.allocation import (
    BUDGETS,
    FINE,
    SCENARIO_HELP,
    SCENARIOS,
    cost_for,
    curve,
    drawn,
    planned,
    traced,
)
from benchmarks.suite import script_parser
from retrain.config.campaign import DecisionSection
from retrain.control.rules.sequential import FINAL
from retrain.control.rules.sequential.rejection import NORMAL, score
from retrain.plan.decidable import Found
from retrain.plan.decision import Walk
from retrain.plan.matrix import Plan

NEXT = 1e-3  # weight of a condition relative to the one before it
LEAST = 1e-9  # chance per second below which no further seed is worth it


class Oracle(Walk):
    """Goes through the rounds of a campaign, and knows how many standard deviations each condition is off."""

    def __init__(
        self, plan: Plan, table: DecisionSection, seconds: Mapping[str, float], *, off: Mapping[str, float]
    ) -> None:
        super().__init__(plan, table, seconds)
        self._off = off

    @cached_property
    def _weights(self) -> dict[str, float]:
        largest_first = sorted(self.verdicts, key=lambda name: self._off[name], reverse=True)
        return {name: NEXT**place for place, name in enumerate(largest_first)}

    def next_round(self, begun: Collection[str] = ()) -> dict[str, int]:
        if not all(self._asked.values()):
            return super().next_round(begun)
        worth = {name: self._promise(name) for name in self._open if self._off[name]}
        if max(worth.values(), default=0.0) <= LEAST:
            self.verdicts |= dict.fromkeys(self._open, "no_difference")
            return {}
        best = max(worth, key=worth.__getitem__)
        return {best: self._asked[best] + 1}

    def _closed(self, found: Sequence[Found]) -> list[Found]:
        return [one for one in found if one.verdict == "undecided"]

    def _promise(self, name: str) -> float:
        test, drift, seeds = self._comparison_of(name)[0], self._off[name], self._asked[name]
        d = self._differences(name, seeds)
        z, spent, best = score(d) * np.sign(d.mean()), 0.0, 0.0
        for look, seed in enumerate(self._seeds[seeds:], seeds + 1):
            runs = [one for one in (name, self._plan.reference) if self.ids[one, seed] not in self.wanted]
            spent += sum(self._seconds[one] for one in runs)
            if look >= test.fewest_seeds:
                share = FINAL if look == test.max_seeds else test.test.interim / 2
                bound = NORMAL.inv_cdf(1 - share * test.error_of_each)
                expected = (z * sqrt(seeds) + drift * (look - seeds)) / sqrt(look)
                best = max(best, NORMAL.cdf((expected - bound) / sqrt(1 - seeds / look)) / spent)
        return best


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--campaigns", type=int, default=500)
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", metavar="NAME", help=SCENARIO_HELP)
    options = parser.parse_args()
    plan, equal = planned()
    auto = replace(equal, allocate="auto")
    table = Table("scenario", "power", "of rounds", "error", box=None, title="percent")
    for name in options.scenario or ("costs differ", "all differ"):
        rng = np.random.default_rng(0)
        campaigns = [drawn(plan, SCENARIOS[name], rng) for _ in range(options.campaigns)]
        differing = sum(off > 0 for one in campaigns for off in one.off.values())
        rounds = curve([traced(plan, equal, one) for one in campaigns], differing, FINE)
        known = [traced(plan, auto, one, partial(Oracle, off=one.off)) for one in campaigns]
        for cost, power, error in curve(known, differing, BUDGETS):
            share = 100 * cost / cost_for(power, rounds)
            table.add_row(name, f"{power:.1f}", "" if np.isnan(share) else f"{share:.1f}", f"{error:.1f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
