"""Scripts of `benchmarks/` that need extras or some seconds: their help, and what the suite reads of them."""

from __future__ import annotations

import pytest

from tests.test_benchmarks import assert_explained, assert_readable

SMALLEST = {
    "board_at_scale": "--runs 4 --rows 5 --seconds 2",
    "campaign_overhead": "--runs 2 --workers 2 --seconds 0.1",
    "estimator": "--worlds 1",
    "evidence": "--campaigns 5",
    "resume_decision": "--runs 4 --orchestrators 2",
}


def test_every_script_that_needs_extras_explains_itself() -> None:
    assert_explained({"budget", "calculator", "gpu", *SMALLEST})


@pytest.mark.parametrize(("script", "options"), SMALLEST.items())
def test_the_suite_reads_what_a_longer_script_prints(script: str, options: str) -> None:
    assert_readable(script, options)
