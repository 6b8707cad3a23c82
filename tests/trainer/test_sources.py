"""Several sources of prompts: their shares of each step, their own rewards and environments, their rows."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.rollouts import Prompt
from retrain.config.schema import SourceSection
from retrain.records.metrics import read_metrics
from retrain.trainer.prompts import Draw, PromptStream, open_stream
from tests.trainer.test_trainer import SMALL, train

SORT, COPY = {"task": "sort", "weight": 3.0}, {"task": "copy", "options": {"base": 7}}


def sourced(*sources: dict[str, Any], **data: object) -> dict[str, Any]:
    return {**SMALL, "data": {"source": [*sources], **data}}


def stream_of(*sources: SourceSection, size: int = 50, name: str = "shuffle") -> PromptStream:
    prompts = [Prompt(n, str(n), "", source=one.label) for one in sources for n in range(size)]
    return open_stream(prompts, name, {}, 1, sources)


def counts(stream: PromptStream, draws: list[Draw]) -> Counter[str]:
    return Counter(stream.at(draw).source for draw in draws)


@given(
    weights=st.lists(st.sampled_from([0.1, 0.3, 1.0, 2.0, 2.5, 7.0, 90.0]), min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_shares_are_exact_over_any_steps(weights: list[float], sizes: list[int]) -> None:
    sources = [SourceSection(name=f"s{n}", task="t", weight=w) for n, w in enumerate(weights)]
    stream, drawn, whole = stream_of(*sources), Counter[str](), sum(Fraction(str(w)) for w in weights)
    for size in sizes:
        step = counts(stream, stream.draw(size))
        assert step.total() == size
        drawn += step
        for source in sources:
            exact = drawn.total() * Fraction(str(source.weight)) / whole
            assert abs(drawn[source.label] - exact) < 1


def test_rows_say_what_each_source_gave(tmp_path: Path) -> None:
    rows = read_metrics(train(tmp_path / "r", sourced(SORT, COPY)).directory)
    assert [(row["source_sort_prompts"], row["source_copy_prompts"]) for row in rows[:4]] == [
        (2, 1), (3, 0), (2, 1), (2, 1),
    ]  # fmt: skip
    for row in rows:
        assert row["source_sort_tokens"] + row["source_copy_tokens"] == row["tokens_per_step"]
        parts = [
            (row[f"source_{name}_prompts"], row[f"source_{name}_mean_reward"]) for name in ("sort", "copy")
        ]
        mean = sum(prompts * (reward or 0) for prompts, reward in parts) / row["batch_size"]
        assert mean == pytest.approx(row["mean_reward"])
