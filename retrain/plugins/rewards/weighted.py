"""A weighted sum of other rewards.

```toml
[reward]
reward = "weighted"

[reward.params.parts]
math = 0.9                                          # a reward's name and its weight

[reward.params.parts.brevity]                       # or a label and a table
reward = "my_rewards.brevity"
weight = 0.1
params = { longest = 200 }
```

Weights are not normalised: if they add up to 1, a completion with full marks in every part gets 1, which
counts as correct. Each part is a column of the step's row: `reward_math`, `reward_brevity`.

A completion is right if the part `outcome` is 1: by default the heaviest one that can be 1.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from retrain.base import extras, registry
from retrain.base.errors import ConfigError, Problem
from retrain.base.event_loop import begun
from retrain.plugins.rewards import Answer, BatchScorer, Outcome, Score, is_number, score_with
from retrain.plugins.rewards.opening import CallingScorer, RewardRange, close_unawaited, open_reward, range_of
from retrain.plugins.rewards.parts import name_problem, part_name
from retrain.plugins.sandbox import choice_problems, with_sandbox

PURE = True  # if its parts are
PART_KEYS = ("reward", "weight", "params")
GRAVITY = (Outcome.SCORED, Outcome.ERROR, Outcome.TIMEOUT, Outcome.FAULT)


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the sum."""

    label: str
    reward: str
    weight: float
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name in rows."""
        return part_name(self.label)


@dataclass(frozen=True, slots=True)
class OpenPart:
    """A part that is ready to score."""

    weight: float
    scorer: BatchScorer
    bounds: RewardRange  # each part is checked against its own range
    name: str


def open_scorer(
    *,
    parts: Mapping[str, Any],
    outcome: str = "",
    sandbox: str = "auto",
    sandbox_options: Mapping[str, Any] | None = None,
) -> WeightedScorer:
    """Open every part; a completion that one of them cannot score is unscored.

    Args:
        parts: name of a reward -> its weight, or label -> table of `reward` (default: the label),
            `weight` and `params`.
        outcome: label of the part that is 1 for a right completion; "" is the heaviest that can be 1.
        sandbox: where parts run programs that a policy wrote; see the reward "python".
        sandbox_options: its options.

    Raises:
        ConfigError: a part is wrong.
    """
    if problems := list(check_params({"parts": parts, "outcome": outcome})):
        raise ConfigError([problem.in_table for problem in problems])
    where = {"sandbox": sandbox, "sandbox_options": sandbox_options}
    opened: list[OpenPart] = []
    with ExitStack() as stack:
        for part in _parts_of(parts):
            scorer = open_reward(part.reward, part.params, where)
            stack.callback(scorer.close)
            opened.append(OpenPart(part.weight, scorer, range_of(part.reward), part.name))
        return WeightedScorer(opened, stack.pop_all())


score = score_with(open_scorer)


def check_params(params: Mapping[str, Any]) -> Iterator[Problem]:
    """Return the problems of the parts and of their parameters."""
    parts = params.get("parts")
    if not isinstance(parts, Mapping) or not parts:
        what = f"got {parts!r}; needs a table of rewards with their weights, such as {{ match = 1.0 }}"
        yield Problem(("parts",), what)
        return
    for label, table in parts.items():
        yield from (problem.below("parts", label) for problem in _form_problems(table))
    terms = _parts_of(parts)
    if wrong_name := name_problem(term.name for term in terms):
        yield Problem(("parts",), wrong_name)
    labels = {term.name: term.label for term in terms}
    for term in terms:
        if labels[term.name] != term.label:
            what = (
                f"its column reward_{term.name} is that of {labels[term.name]!r}, too; choose another label"
            )
            yield Problem(("parts", term.label), what)
    if (outcome := params.get("outcome", "")) and outcome not in parts:
        fix = registry.hint(str(outcome), parts, f"needs one of {', '.join(parts)}")
        yield Problem(("outcome",), f"got {outcome!r}; {fix}")
    for part in terms:
        if problem := registry.problem_with_name("rewards", part.reward):
            yield Problem(("parts", part.label), problem)
            continue
        if problem := extras.missing_problem("rewards", part.reward):
            yield Problem(("parts", part.label), problem)
        wrong = registry.problems_with_table("rewards", part.reward, part.params)
        yield from (problem.below("parts", part.label, "params") for problem in wrong)
    yield from choice_problems(params)


def made_of(params: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return name and parameters of every well-formed part, with the sandbox that all share."""
    return [(part.reward, with_sandbox(part.params, params)) for part in _parts_of(params.get("parts"))]


def part_weights(params: Mapping[str, Any]) -> dict[str, float]:
    """Return the weight of every well-formed part."""
    return {part.name: part.weight for part in _parts_of(params.get("parts"))}


def outcome(params: Mapping[str, Any]) -> str:
    """Return the name of the part that tells right from wrong; "" if none can be 1."""
    parts = _parts_of(params.get("parts"))
    if label := params.get("outcome"):
        return next((part.name for part in parts if part.label == label), "")
    able = [part for part in parts if part.weight > 0 and range_of(part.reward).high >= 1]
    return max(able, key=lambda part: part.weight).name if able else ""


def servers(params: Mapping[str, Any]) -> dict[str, str]:
    """Return the servers that the parts need, as address -> parameter."""
    named: dict[str, str] = {}
    for part in _parts_of(params.get("parts")):
        needed = registry.ask("rewards", part.reward, "servers", part.params)
        for address, key in needed.items():
            named[address] = f"parts.{part.label}.params.{key}"
    return named


def _parts_of(parts: object) -> list[Term]:
    """Return the well-formed parts of a table; `check_params` reports the others."""
    tables = parts if isinstance(parts, Mapping) else {}
    full = {label: {"weight": table} if is_number(table) else table for label, table in tables.items()}
    return [
        Term(label, table.get("reward", label), float(table["weight"]), table.get("params", {}))
        for label, table in full.items()
        if not any(_form_problems(table))
    ]


class WeightedScorer(BatchScorer):
    """Scores with all parts concurrently."""

    def __init__(self, parts: Sequence[OpenPart], opened: ExitStack) -> None:
        self._parts = parts
        self.sandbox = next((part.scorer.sandbox for part in parts if part.scorer.sandbox), "")
        self.uses_all_cores = any(part.scorer.uses_all_cores for part in parts)
        self._opened = opened

    @property
    def scored(self) -> int | None:
        counts = (part.scorer.scored for part in self._parts)
        return min((count for count in counts if count is not None), default=None)

    def score_all(self, answers: Sequence[Answer]) -> Coroutine[Any, Any, list[Score]]:
        # start the parts that wait for processes or servers, then call functions in this thread
        columns: list[Any] = [
            begun(partial(part.scorer.score_all, answers)) if _waits(part.scorer) else None
            for part in self._parts
        ]
        try:
            for at, part in enumerate(self._parts):
                if columns[at] is None:
                    columns[at] = part.scorer.score_all(answers)
        except BaseException:
            close_unawaited(columns)
            raise

        async def summed() -> list[Score]:
            results = await asyncio.gather(*map(_column, columns))
            scores = [part.bounds.keep(column) for part, column in zip(self._parts, results, strict=True)]
            return [_sum(self._parts, row) for row in zip(*scores, strict=True)]

        return summed()

    def close(self) -> None:
        self._opened.close()


def _waits(scorer: BatchScorer) -> bool:
    """Whether `score_all` blocks until all scores are available."""
    at_once = isinstance(scorer, CallingScorer | WeightedScorer)
    return not (at_once or inspect.iscoroutinefunction(scorer.score_all))


async def _column(scores: Any) -> list[Score]:
    values = await asyncio.wrap_future(scores) if isinstance(scores, Future) else scores
    result: list[Score] = await values if inspect.isawaitable(values) else values
    return result


def _sum(parts: Sequence[OpenPart], scores: Sequence[Score]) -> Score:
    """Return the weighted sum with its gravest outcome; unknown if a part's score is, with that outcome."""
    is_over_limit = any(s.is_over_limit for s in scores)
    values: dict[str, float | None] = {}
    for part, score in zip(parts, scores, strict=True):
        values[part.name] = score.value
        values.update({f"{part.name}_{inner}": value for inner, value in score.parts.items()})
    unknown = [s for s in scores if s.value is None]
    if unknown:  # what one part cannot judge stays so when another one is back
        first = min(unknown, key=lambda s: s.is_outage)
        return replace(first, is_over_limit=is_over_limit, parts=values)
    gravest = max(scores, key=lambda s: GRAVITY.index(s.outcome))
    total = sum(part.weight * (s.value or 0.0) for part, s in zip(parts, scores, strict=True))
    return Score(total, gravest.outcome, gravest.message, is_over_limit, parts=values)


def _form_problems(table: object) -> Iterator[Problem]:
    if is_number(table):
        return
    if not isinstance(table, Mapping):
        yield Problem((), f"got {table!r}; needs a weight, or a table of {', '.join(PART_KEYS)}")
        return
    for key in table.keys() - {*PART_KEYS}:
        yield Problem((key,), f"unknown key; it takes {', '.join(PART_KEYS)}")
    if not is_number(table.get("weight")):
        yield Problem(("weight",), f"got {table.get('weight')!r}; needs a number")
    if not isinstance(table.get("reward", ""), str):
        yield Problem(("reward",), f"got {table['reward']!r}; needs the name of a reward")
    if not isinstance(table.get("params", {}), Mapping):
        yield Problem(("params",), f"got {table['params']!r}; needs a table of the reward's parameters")
