"""When a campaign with `[decision]` has evidence enough: which runs it needs, and what they show.

Seeds are added in rounds: first those that are given, three at least, then one at a time, each to the
reference and to all conditions that are still open. After each round every open condition is looked at. All
of it follows from the values of the runs that ended, so that a campaign that was killed decides as if it had
not been.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from retrain.config.campaign import Decide
from retrain.controllers.sequential import Look, SequentialComparison
from retrain.plan.matrix import Plan
from retrain.records.decision import ConditionDecision, Decision, is_higher_better

OPEN = "continue"


@dataclass(frozen=True)
class Progress:
    """What a campaign has asked for and found."""

    decision: Decision
    wanted: frozenset[str]  # ids of the runs asked for so far


def comparison_of(table: Decide, conditions: int) -> SequentialComparison:
    """Return the test that a table asks for, of so many conditions with the reference among them."""
    return SequentialComparison(
        table.max_seeds, table.error, table.smallest_difference, comparisons=conditions - 1
    )


def decide(
    plan: Plan, table: Decide, ended: Mapping[str, float | None], begun: Collection[str], *, is_spent: bool
) -> Progress:
    """Return what a campaign needs next and what it has found.

    Args:
        ended: by run id, the value of each run that ended; None if it has none, as it failed.
        begun: runs that were started.
        is_spent: whether the budget is used up, so that no further round begins.
    """
    reference, ids = plan.reference, {(run.condition, run.seed): run.run_id for run in plan.runs}
    found = {name: ConditionDecision(name, OPEN, 0) for name in plan.conditions if name != reference}
    comparison = comparison_of(table, len(plan.conditions))
    compared: dict[str, list[tuple[float, float]]] = {}
    wanted, ending = {ids[name, seed] for seed in plan.added_seeds for name in plan.conditions}, "seeds"
    for seeds, more in plan.rounds():
        still = [name for name, one in found.items() if one.verdict == OPEN]
        batch = {ids[name, seed] for seed in more for name in (reference, *still)}
        if not still or (is_spent and not batch & set(begun)):
            ending = "budget" if still else "decided"
            break
        wanted |= batch
        if not batch <= ended.keys():
            ending = ""
            break
        for name in still:
            values = [(ended[ids[name, seed]], ended[ids[reference, seed]]) for seed in seeds]
            compared[name] = [(a, b) for a, b in values if a is not None and b is not None]
            found[name] = _looked_at(name, compared[name], comparison, table.metric)
    for name, one in found.items():
        if ending and one.verdict == OPEN:  # after fewer seeds than planned: the error left is for this look
            found[name] = _looked_at(name, compared.get(name, ()), comparison, table.metric, final=True)
    if ending == "seeds" and all(one.verdict != "undecided" for one in found.values()):
        ending = "decided"
    return Progress(
        Decision(
            metric=table.metric,
            reference=reference,
            error=table.error,
            max_seeds=table.max_seeds,
            runs=len(wanted),
            saved_runs=len(plan.runs) - len(wanted) if ending else 0,
            ended=ending,
            smallest_difference=table.smallest_difference,
            conditions=tuple(found.values()),
        ),
        frozenset(wanted),
    )


def _looked_at(
    name: str,
    pairs: Sequence[tuple[float, float]],
    comparison: SequentialComparison,
    metric: str,
    *,
    final: bool = False,
) -> ConditionDecision:
    """Return what pairs of a condition's and the reference's values show; two at least are compared."""
    if len(pairs) < 2:
        return ConditionDecision(name, "undecided" if final else OPEN, len(pairs))
    values, reference = np.array(pairs).T
    look = comparison.look(values, reference, final=final)
    low, high = (bound if math.isfinite(bound) else None for bound in look.interval)
    alone = float(values.var(ddof=1) + reference.var(ddof=1))
    removed = 1 - float((values - reference).var(ddof=1)) / alone if alone > 0 else None
    verdict = _in_words(look, metric)
    return ConditionDecision(name, verdict, look.seeds, look.difference, low, high, look.p_value, removed)


def _in_words(look: Look, metric: str) -> str:
    """Return the verdict, for a metric of which less may be better."""
    opposite = {"better": "worse", "worse": "better"}
    return opposite.get(look.verdict, look.verdict) if is_higher_better(metric) is False else look.verdict
