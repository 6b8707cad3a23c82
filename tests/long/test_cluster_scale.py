"""A whole campaign through the real command line, on a Slurm that only keeps its books."""

from __future__ import annotations

from benchmarks.studies.cluster_scale import measure


def test_a_large_campaign_stays_within_what_the_site_allows_and_asks_seldom() -> None:
    row = measure(100, at_a_time=20, task_s=0.5, array_size=40, most_jobs=0, statuses=1)
    assert row.finished == 100
    assert (row.arrays, row.largest_array) == (3, 40)
    assert row.most_at_once <= 20
    assert row.least_gap_s is not None
    assert row.least_gap_s >= 2.0
    assert row.manifests <= 2 + 20  # the first, the last, and one for every twentieth of the runs
