"""The report of a campaign with a finished run whose rows were changed afterwards."""

import pytest

from retrain.base.errors import EXIT_DONE
from retrain.campaign.run import start

pytestmark = pytest.mark.extras


def test_a_changed_run_is_named_and_left_out(campaign_file, retrain, tmp_path):
    run = start(campaign_file, ["campaign.launcher=inline"])
    assert run.execute().exit_code == EXIT_DONE
    metrics = run.directory / "runs" / "grpo_s0" / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:2]))
    reported = retrain("report", run.directory, "-o", tmp_path / "page.html")
    assert "grpo_s0 is left out" in reported.stderr
    assert "grpo_s0 is left out" in (tmp_path / "page.html").read_text()
