"""A run that is interrupted again and again ends in exactly the numbers of one that is left alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from retrain.base.errors import EXIT_DONE, EXIT_INTERRUPTED
from retrain.campaign.run import start
from retrain.records.metrics import read_metrics
from retrain.trainer.worker import run as run_worker
from tests.clocks import without_times

COMPANIONS = {
    "schedule and warm-up": ["training.lr_schedule=cosine", "training.lr_warmup_steps=3"],
    "adascale": ["scaling.rule=adascale", "scaling.smoothing=0.9"],
    "adamscale": ["scaling.rule=adamscale", "scaling.smoothing=0.9"],
    "legw": ["scaling.rule=legw", "scaling.base_warmup_epochs=0.5"],
    "token transform": ["algorithm.transform_mode=gtpo_sepa"],
    "every prompt several times": ["training.batch_size=7", "training.max_steps=9"],
    "evaluation in between": ["training.eval_every=2"],
}


class AfterSteps(threading.Event):
    """Asks to stop at the n-th step boundary."""

    def __init__(self, boundaries: int) -> None:
        super().__init__()
        self._left = boundaries

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def numbers(directory: Path) -> list[dict[str, object]]:
    return without_times(read_metrics(directory))


@pytest.mark.parametrize("sets", COMPANIONS.values(), ids=COMPANIONS.keys())
def test_interruptions_leave_no_trace_in_the_numbers(sets: list[str], campaign_file: Path) -> None:
    text = campaign_file.read_text()
    campaign_file.write_text(text.partition("[campaign]")[0])
    sets = ["training.max_steps=9", "training.save_every=0", "training.seed=5", *sets]
    left_alone = start(campaign_file, sets).directory
    assert run_worker(left_alone, threading.Event()) == EXIT_DONE
    disturbed = start(campaign_file, sets).directory
    for boundaries in (1, 2, 4):
        assert run_worker(disturbed, AfterSteps(boundaries)) == EXIT_INTERRUPTED
    assert run_worker(disturbed, threading.Event()) == EXIT_DONE
    assert numbers(disturbed) == numbers(left_alone)
    assert len(numbers(disturbed)) == 9
