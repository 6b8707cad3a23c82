"""Rollouts to read: those that runs kept, chosen by what is asked, alone or of two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

from retrain.base.errors import ConfigError
from retrain.records.layout import RunFiles
from retrain.records.run_row import RunRow
from retrain.records.samples import KeptSample, samples_of
from retrain.records.text import plain
from retrain.results.board.drawn import Histories
from retrain.results.board.live import Shown
from retrain.results.report.signs import WINDOW, find_jump, signs_of_cheating

MOST_SAMPLES = 40  # shown at a time, the newest first
CHEATING = (
    "mean_reward", "eval_reward", "batch_size", "group_size", "reward_faults", "reward_over_limits",
    "reward_timeout_fraction",
)  # fmt: skip
Query: TypeAlias = Any  # starlette's QueryParams
SignsOfSteps: TypeAlias = dict[int, list[str]]  # by step


def rollouts(
    histories: Histories, shown: Shown, run: RunRow, against: RunRow | None, query: Query
) -> dict[str, Any]:
    """Return the kept rollouts of a run that a query asks for; in pairs, with those of another run.

    Raises:
        ConfigError: a reward of the query is no number.
    """
    is_wanted = _filter(query)
    kept = _kept(shown.files_of(run), query.get("of", ""))
    signs, sentences = _signs(histories, shown, run)
    facts: dict[str, Any] = {
        "sources": sorted({plain(sample.source) for sample in kept} - {""}),
        "kept": len(kept),
        "signs": sentences,
    }
    if against is None:
        chosen = [sample for sample in reversed(kept) if is_wanted(sample, signs)]
        shown_samples = [[_as_json(sample, run, signs)] for sample in chosen[:MOST_SAMPLES]]
        return {**facts, "found": len(chosen), "groups": shown_samples}
    others = _kept(shown.files_of(against), query.get("of", ""))
    signs_of_other, more = _signs(histories, shown, against)
    pairs = [
        [_as_json(one, run, signs), _as_json(other, against, signs_of_other)]
        for one, other in _pairs(kept, others)
        if is_wanted(one, signs) or is_wanted(other, signs_of_other)
    ]
    return {**facts, "signs": [*sentences, *more], "found": len(pairs), "groups": pairs[:MOST_SAMPLES]}


def _kept(files: RunFiles, of: str) -> list[KeptSample]:
    return list(samples_of(files.held_out if of == "held-out" else files.samples))


def _pairs(
    kept: Sequence[KeptSample], others: Sequence[KeptSample]
) -> Iterator[tuple[KeptSample, KeptSample]]:
    """Iterate over rollouts of the same prompt: after the same step if there are such, else the latest."""

    def by_prompt(samples: Sequence[KeptSample]) -> dict[Any, dict[int, KeptSample]]:
        found: dict[Any, dict[int, KeptSample]] = {}
        for sample in samples:
            steps = found.setdefault((sample.evaluation, sample.source, sample.prompt_id), {})
            steps.setdefault(sample.step, sample)
        return found

    theirs = by_prompt(others)
    for prompt, steps in by_prompt(kept).items():
        if prompt in theirs:
            common = steps.keys() & theirs[prompt].keys()
            at, beside = (max(common),) * 2 if common else (max(steps), max(theirs[prompt]))
            yield steps[at], theirs[prompt][beside]


def _filter(query: Query) -> Callable[[KeptSample, SignsOfSteps], bool]:
    """Return whether a sample is what a query asks for."""
    source = query.get("source", "")
    try:
        least, most = float(query.get("least") or -math.inf), float(query.get("most") or math.inf)
    except ValueError as error:
        raise ConfigError(f"the filter by reward needs a number: {error}") from error

    def is_wanted(sample: KeptSample, signs: SignsOfSteps) -> bool:
        if source and sample.source != source:
            return False
        if (least > -math.inf or most < math.inf) and sample.reward is None:
            return False
        if sample.reward is not None and not least <= sample.reward <= most:
            return False
        if "truncated" in query and not sample.truncated:
            return False
        return "signs" not in query or bool(sample.sign) or sample.step in signs

    return is_wanted


def _signs(histories: Histories, shown: Shown, run: RunRow) -> tuple[SignsOfSteps, list[str]]:
    """Return the signs of cheating of each step, and those of the run in sentences."""
    sides = histories.sides(shown, [run], CHEATING)
    if not sides:
        return {}, []
    (history,) = sides[0].runs
    steps, metric, signs = history.columns.steps.tolist(), history.columns.metric, SignsOfSteps()
    if jump := find_jump(steps, metric("mean_reward"), metric("eval_reward")):
        for step in range(jump.step, jump.step + WINDOW):
            signs.setdefault(step, []).append(f"the reward jumps by {jump.rise:.2g} at step {jump.step}")
    if run.eval_falling and steps:
        signs.setdefault(steps[-1], []).append(f"the reward rises, but {run.eval_falling}")
    return signs, list(signs_of_cheating(sides))


def _as_json(sample: KeptSample, run: RunRow, signs: SignsOfSteps) -> dict[str, Any]:
    told = [sample.sign] if sample.sign else []
    facts = {"run": run.name, "signs": told + signs.get(sample.step, []), "extent": sample.extent}
    return asdict(sample) | facts
