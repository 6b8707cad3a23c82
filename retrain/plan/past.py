"""Earlier campaigns of a plan's conditions: how their runs differed, and campaigns drawn from that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import numpy as np

from retrain.base.errors import ConfigError, RecordsError
from retrain.base.rollouts import Floats
from retrain.plan.matrix import Plan
from retrain.records.decision import is_higher_better, value_of_rows
from retrain.records.files import readable
from retrain.records.layout import CampaignFiles, RunFiles, by_start, find_campaigns, recorded_table
from retrain.records.lines import Row, number_in
from retrain.records.manifest import read_manifest
from retrain.records.metrics import mean, read_metrics
from retrain.records.row_parts import Columns
from retrain.records.run_state import RunState
from retrain.records.text import first_of
from retrain.records.windows import Window

MOST_RUNS = 200  # read, of the newest campaigns
START = 0.05  # of a run's steps: what it could before it learned
REWARD = "mean_reward"  # in each row of every run

Key: TypeAlias = tuple[str, str, int]  # campaign, condition, seed


class PastRun:
    """One earlier run."""

    def __init__(self, files: RunFiles, result: Columns) -> None:
        self.files, self.result = files, result

    @cached_property
    def rows(self) -> Sequence[Row]:
        """Its rows; none if they cannot be read."""
        return readable(read_metrics, self.files.directory) or ()


class Past:
    """Earlier runs: their values over windows, and how those of the same seed differ."""

    def __init__(self, runs: Mapping[Key, PastRun], metric: str, reference: str) -> None:
        self.runs, self.metric, self.reference = runs, metric, reference
        self._values: dict[tuple[str, Window], dict[Key, float]] = {}

    def values(self, window: Window, metric: str = "") -> Mapping[Key, float]:
        """Return the values of the runs that come to the end of a window."""
        metric = metric or self.metric
        if (metric, window) not in self._values:
            values = (
                (key, value_of_rows(r.rows, r.result, metric, window)[1]) for key, r in self.runs.items()
            )
            self._values[metric, window] = {key: value for key, value in values if value is not None}
        return self._values[metric, window]

    def differences(self, window: Window) -> dict[Key, float]:
        """Return each run's value minus the reference's with its seed, of the newest campaign with both."""
        values, campaigns = self.values(window), dict[tuple[str, int], str]()
        for campaign, name, seed in values:
            if name != self.reference and (campaign, self.reference, seed) in values:
                campaigns.setdefault((name, seed), campaign)
        return {
            (campaign, name, seed): values[campaign, name, seed] - values[campaign, self.reference, seed]
            for (name, seed), campaign in campaigns.items()
        }

    def residuals(self, windows: Sequence[Window]) -> tuple[Floats, float]:
        """Return how far differences are off their condition's mean in a campaign, shape (pairs, windows).

        They are scaled so that their mean square is the variance. Without pairs, they are those of single
        runs, scaled as the difference of two. Also their degrees of freedom: conditions that share a
        reference have differences that correlate by 1/2, and squares by 1/4.
        """
        by_window, factor = [self.differences(window) for window in windows], 1.0
        if not by_window[-1]:
            by_window, factor = [dict(self.values(window)) for window in windows], math.sqrt(2)
        groups: dict[tuple[str, str], list[list[float]]] = {}
        for key in by_window[-1]:
            if all(key in values for values in by_window):
                groups.setdefault(key[:2], []).append([values[key] for values in by_window])
        several = [np.array(group) for group in groups.values() if len(group) > 1]
        if not several:
            return np.zeros((0, len(windows))), 0.0
        pairs = sum(map(len, several))
        freedom = pairs - len(several)
        residuals = np.concatenate([group - group.mean(axis=0) for group in several])
        sharing = max(Counter(campaign for campaign, _ in groups).values()) if factor == 1 else 1
        return factor * math.sqrt(pairs / freedom) * residuals, freedom / (1 + (sharing - 1) / 4)

    def seen(self, window: Window) -> float | None:
        """Return the mean difference of the condition that is farthest from the reference."""
        by_condition: dict[str, list[float]] = {}
        for (_, name, _), value in self.differences(window).items():
            by_condition.setdefault(name, []).append(value)
        return max((float(np.mean(values)) for values in by_condition.values()), key=abs, default=None)

    def seeds(self, window: Window) -> int:
        """Return how many seeds a condition has, with its reference unless none has one."""
        counts = Counter(name for _, name, _ in self.differences(window) or self.values(window))
        return max(counts.values(), default=0)

    def progress(self, window: Window) -> float:
        """Return by how much runs were better over a window than at their start, at least 0.

        In the metric, or in the reward where rows begin without it.
        """
        in_rows = all(r.rows and number_in(r.rows[0], self.metric) is not None for r in self.runs.values())
        metric = self.metric if in_rows else REWARD
        gains = [
            value - start
            for key, value in self.values(window, metric).items()
            if (rows := self.runs[key].rows)
            and (start := mean(number_in(row, metric) for row in rows[: math.ceil(START * len(rows))]))
            is not None
        ]
        gain = float(np.mean(gains)) if gains else 0.0
        is_higher = is_higher_better(metric)
        return abs(gain) if is_higher is None else max(0.0, gain if is_higher else -gain)

    def shares(self, windows: Sequence[Window], whole: Window) -> list[float]:
        """Return what had been learned over each of the windows, as a share of that over another one."""
        learned = self.progress(whole)
        return [self.progress(window) / learned if learned else 0.0 for window in windows]


def past_if_any(logs: Path, plan: Plan, metric: str) -> Past:
    """Return the earlier runs of a plan's conditions; none where nothing has run."""
    try:
        runs = past_runs(logs, plan, [])
    except (ConfigError, RecordsError):
        runs = {}
    return Past(runs, metric, plan.reference)


def past_runs(logs: Path, plan: Plan, notes: list[str]) -> dict[Key, PastRun]:
    """Read the runs of a plan's conditions, and of its tasks, in earlier campaigns, the newest first."""
    runs: dict[Key, PastRun] = {}
    other_tasks: set[str] = set()
    tasks = {
        name: run.config.data.task for name, run in plan.first_runs.items() if not run.config.data.source
    }
    for path in sorted(find_campaigns(logs), key=by_start, reverse=True):
        files = CampaignFiles(path)
        manifest = readable(read_manifest, files.manifest)
        for run in manifest.runs if manifest else ():
            if run.state != RunState.DONE or run.condition not in plan.conditions or len(runs) >= MOST_RUNS:
                continue
            directory = files.existing_run(run.run_id)
            task = recorded_table(directory, "data").get("task")
            if task is not None and tasks.get(run.condition, task) != task:
                other_tasks.add(str(task))
                continue
            if run.seed is not None:
                runs[path.name, run.condition, run.seed] = PastRun(directory, run.result or {})
    if other_tasks:
        notes.append(f"runs of other tasks were left out: {first_of(sorted(other_tasks))}")
    return runs


def spread_of(residuals: Floats) -> float:
    """Return the standard deviation over the last window."""
    return float(np.sqrt(np.mean(residuals[:, -1] ** 2))) if len(residuals) else 0.0


def drawn_differences(
    residuals: Floats, freedom: float, shape: tuple[int, int, int], rng: np.random.Generator
) -> Floats:
    """Return differences of simulated campaigns, with the covariance of earlier ones over their windows.

    Args:
        residuals, freedom: as `Past.residuals` returns them; the spread that they show is uncertain, unless
            freedom is infinite.
        shape: (campaigns, conditions, seeds), to which that of windows is added.
    """
    campaigns, _, seeds = shape
    noise = rng.normal(size=(*shape, len(residuals)))
    # conditions share their reference's noise
    noise = (noise + rng.normal(size=(campaigns, 1, seeds, len(residuals)))) / math.sqrt(2)
    if freedom < math.inf:  # what the spread may really be
        noise *= np.sqrt(freedom / rng.chisquare(freedom, (campaigns, 1, 1, 1)))
    return noise @ residuals / math.sqrt(len(residuals))
