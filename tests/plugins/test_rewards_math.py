"""What a failed check of a completion says about its reference answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, Outcome
from retrain.plugins.rewards.math import MathScorer

HANGS_ONCE = """
import pathlib, time
def check(completion, prompt):
    if completion == "fails":
        raise ValueError("cannot be read")
    if completion == prompt.answer:
        try:
            pathlib.Path(prompt.text).mkdir()
        except FileExistsError:
            return 1.0
        time.sleep(60)
    return 0.0
"""


def test_a_reference_is_checked_again_if_its_check_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs_once.py").write_text(HANGS_ONCE)
    monkeypatch.syspath_prepend(tmp_path)
    scorer = MathScorer("hangs_once.check", {}, workers=1, timeout_s=2.0)
    try:
        answer = Answer("fails", Prompt(0, f"{tmp_path}/hung", "1"))
        found = [scorer.score_all([answer])[0] for _ in range(2)]
    finally:
        scorer.close()
    assert [(score.value, score.outcome) for score in found] == [(None, Outcome.ERROR), (0.0, Outcome.ERROR)]
