"""`[campaign.search].sampler`: which points of a sweep are tried next, as Optuna proposes them.

Optuna is asked and told. It keeps nothing: before each round it is asked and told anew, from the first round
on, in the same order and with the values that were recorded, so its seeded sampler is where it was. What it
proposed stands. If another version of it proposes otherwise, it is told the points that were run instead.

No point runs twice: what is proposed again is answered with the known value. The conditions as they are in
the file are tried as well, and are told where they lie within the sweep.

Source: Akiba, Sano, Yanase, Ohta and Koyama 2019, Optuna, arXiv:1907.10902.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from retrain.base.errors import Problem
from retrain.base.extras import Needs, load
from retrain.base.registry import hint
from retrain.config.keys import Proposal, Table, Tables, quote
from retrain.config.resolve import as_tables, flatten
from retrain.config.schema import SearchSection
from retrain.config.sweep import SEED, as_told, bounds_of, scale_of, swept_keys
from retrain.plan.matrix import Plan
from retrain.records.decision import is_higher_better
from retrain.records.rungs import Proposed, all_of

EXTRA = "optuna"
PER_ROUND = 4  # trials, unless the file says otherwise: as many as a machine often runs side by side
ASKS = 100  # in a row that propose nothing new: then there is hardly anything left
CONDITION = "condition"  # which of the file's conditions; keys of the sweep have a dot
DIFFERS = "Optuna proposes other points now than it did: those that were stored stand"


OPTUNA = Needs(EXTRA, (EXTRA,))


@dataclass(frozen=True)
class OptunaSampler:
    """A sampler of Optuna's: its class, and what it can propose and needs."""

    name: str
    ranges: int = 0  # it needs at least so many, and nothing else; 0: takes lists as well
    needs: Needs = OPTUNA


SAMPLERS = {
    "optuna:tpe": OptunaSampler("TPESampler"),
    "optuna:random": OptunaSampler("RandomSampler"),
    "optuna:cmaes": OptunaSampler("CmaEsSampler", 2, Needs(EXTRA, (EXTRA, "cmaes"))),
    "optuna:gp": OptunaSampler("GPSampler", needs=Needs("local", ("torch",))),
    "optuna:qmc": OptunaSampler("QMCSampler", 1, Needs(EXTRA, (EXTRA, "scipy"))),
    "optuna:nsgaii": OptunaSampler("NSGAIISampler"),
}


def to_come(table: SearchSection, rounds: Sequence[Proposed]) -> int:
    """Return how many points a sampler has yet to propose; 0 without a sampler."""
    if not table.sampler or (rounds and not rounds[-1].proposals):
        return 0
    return max(0, (table.trials or 0) - len(all_of(rounds)))


def per_round(table: SearchSection, left: int) -> int:
    """Return how many points a sampler proposes at a time, if it has yet to propose so many."""
    return min(table.trials_per_round or PER_ROUND, left)


def propose(
    plan: Plan,
    table: SearchSection,
    rounds: Sequence[Proposed],
    values: Mapping[str, float | None],
    notice: Callable[[str], None],
) -> Proposed:
    """Return the next round of proposals.

    Args:
        plan: with the conditions of the file and of all rounds.
        table: the sampler.
        rounds: what it has proposed so far.
        values: of conditions, those that it has been told already among them.
        notice: receives what the user should know.
    """
    waiting, is_same = iter(plan.proposed_conditions), True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some samplers are experimental
        study = _Study(plan, table)
        for past in rounds:
            study.tell(past.told)
            for proposal in past.proposals:
                is_same &= study.ask_again(proposal, next(waiting))
        news = {name: value for name, value in values.items() if name not in study.values}
        study.tell(news)
        proposals = [study.ask() for _ in range(per_round(table, to_come(table, rounds)))]
    if not is_same:
        notice(DIFFERS)
    return Proposed(news, tuple(filter(None, proposals)))


class _Study:
    """A study of Optuna's, whose trials are conditions of a campaign."""

    def __init__(self, plan: Plan, table: SearchSection) -> None:
        """Begin with the file's own conditions; no other was proposed yet."""
        listed = [name for name in plan.conditions if name not in plan.proposed_conditions]
        self._optuna = _library()
        self._swept, self._trials = swept_keys(plan.campaign.sweep), table.trials or 1
        kinds = self._optuna.distributions
        self._space: dict[str, Any] = {}
        if len(listed) > 1:
            self._space[CONDITION] = kinds.CategoricalDistribution(tuple(range(1, len(listed) + 1)))
        for key, value in self._swept.items():
            if isinstance(value, list):
                self._space[key] = kinds.CategoricalDistribution(value)
            else:
                is_whole, low, high, is_log = bounds_of(key, value)
                kind = kinds.IntDistribution if is_whole else kinds.FloatDistribution
                self._space[key] = kind(low, high, log=is_log)
        self._study = self._optuna.create_study(
            sampler=_sampler(self._optuna, table, plan.campaign.sweep.get(SEED, 0)),
            direction="minimize" if is_higher_better(table.metric) is False else "maximize",
        )
        self._open: dict[str, Any] = {}  # trials without a value, by condition
        self._seen: dict[tuple[Any, ...], str] = {}  # conditions, "" for a new one, by their points
        self.values: dict[str, float | None] = {}
        for number, name in enumerate(listed, start=1):
            values = dict(flatten(as_tables(plan.first_runs[name].config)))
            self._enqueue(Proposal({key: values.get(key) for key in self._swept}, number), name)

    def tell(self, values: Mapping[str, float | None]) -> None:
        """Pass on the values of conditions; None of one without a value."""
        self.values |= values
        for name, value in values.items():
            if (trial := self._open.pop(name, None)) is not None:
                self._tell(trial, value)

    def ask(self) -> Proposal | None:
        """Return a point that is new; None if there is hardly one left."""
        _, proposal = self._next()
        if proposal is not None:
            self._seen[_key(proposal)] = ""
        return proposal

    def ask_again(self, proposal: Proposal, name: str) -> bool:
        """Ask for a condition that was proposed before, and return whether it is proposed again."""
        trial, proposed = self._next()
        if proposed == proposal:
            self._open[name], self._seen[_key(proposal)] = trial, name
            return True
        if proposed is not None:
            self._tell(trial, None)
        self._enqueue(proposal, name)
        return False

    def _next(self) -> tuple[Any, Proposal | None]:
        for _ in range(ASKS):
            trial = self._study.ask(self._space)
            point: Table = {}
            for key, table in self._swept.items():
                value = trial.params[key]
                point[key] = value if isinstance(table, list) else as_told(key, table, value, self._trials)
            proposal = Proposal(point, trial.params.get(CONDITION, 1))
            if (name := self._seen.get(_key(proposal))) is None:
                return trial, proposal
            self._tell(trial, self.values.get(name))
        return None, None

    def _enqueue(self, proposal: Proposal, name: str) -> None:
        """Make a condition a trial, unless the sweep does not contain it."""
        for key, value in proposal.point.items():
            swept = self._swept.get(key, [])
            if isinstance(swept, list):
                is_within = value in swept
            else:
                low, high = swept[scale_of(swept)]
                is_within = isinstance(value, int | float) and low <= value <= high
            if not is_within:
                return
        self._seen[_key(proposal)] = name
        chosen = {CONDITION: proposal.number} if CONDITION in self._space else {}
        self._study.enqueue_trial(proposal.point | chosen)
        self._open[name] = self._study.ask(self._space)

    def _tell(self, trial: Any, value: float | None) -> None:
        state = self._optuna.trial.TrialState
        self._study.tell(trial, value, state=state.FAIL if value is None else state.COMPLETE)


def _key(proposal: Proposal) -> tuple[Any, ...]:
    return (proposal.number, *sorted(proposal.point.items()))


def _library() -> Any:
    """Return Optuna, silenced but for errors; a ConfigError says how to install it."""
    optuna = load("optuna", EXTRA, EXTRA)
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # of a sampler's reasons to draw at random
    return optuna


def _sampler(optuna: Any, table: SearchSection, seed: int) -> Any:
    return getattr(optuna.samplers, SAMPLERS[table.sampler].name)(seed=seed, **table.sampler_options)


def sampler_problems(table: SearchSection, sweep: Tables, conditions: int) -> Iterator[Problem]:
    """Iterate over the problems of a search's sampler, as far as one does not hide the next."""
    if not table.sampler:
        for key in ("sampler_options", "trials", "trials_per_round"):
            if value := getattr(table, key):
                what = f"got {quote(value)}; has no effect without a sampler, such as optuna:tpe"
                yield Problem((key,), what)
        return
    swept, at = swept_keys(sweep), ("sampler",)
    if table.sampler not in SAMPLERS:
        meant, others = table.sampler.rpartition(":")[2].lower(), f"there are {', '.join(SAMPLERS)}"
        others = hint(f"optuna:{meant}", list(SAMPLERS), others) if meant else others
        yield Problem(at, f"no sampler is named {quote(table.sampler)}; {others}")
    elif not swept:
        yield Problem(at, "proposes points of [campaign.sweep], and there is none")
    elif table.trials is None:
        yield Problem(("trials",), "is missing; give the number of points that the sampler proposes")
    else:
        misfits = _misfits(table, table.trials, swept, conditions)
        lacking = (needs.problem(table.sampler) for needs in (OPTUNA, SAMPLERS[table.sampler].needs))
        missing = (Problem(at, what) for what in lacking if what)
        yield from islice(chain(misfits, missing, _wrong_options(table)), 1)


def _misfits(table: SearchSection, trials: int, swept: Tables, conditions: int) -> Iterator[Problem]:
    """Iterate over why the sampler does not suit the sweep."""
    lists = [value for value in swept.values() if isinstance(value, list)]
    least, is_mixed = SAMPLERS[table.sampler].ranges, bool(lists) or conditions > 1
    if least and (is_mixed or len(swept) < least):
        others = "lists and conditions" if is_mixed else "fewer"
        needed = "one range or more" if least == 1 else f"{least} ranges or more"
        what = f"{table.sampler} needs {needed}; {others} it would draw at random: use optuna:tpe"
        yield Problem(("sampler",), what)
    points = math.prod(map(len, lists)) * conditions
    if len(lists) == len(swept) and trials >= points:
        fix = "give fewer, or remove the sampler, and all are run"
        what = f"got {table.trials}, and the lists have {points} combinations in all: {fix}"
        yield Problem(("trials",), what)


def _wrong_options(table: SearchSection) -> Iterator[Problem]:
    """Iterate over which of the sampler's options are wrong, as far as Optuna tells."""
    optuna = _library()
    parameters = inspect.signature(getattr(optuna.samplers, SAMPLERS[table.sampler].name)).parameters
    names = [name for name in parameters if name != "seed"]
    for key in table.sampler_options:
        if key not in names:
            is_seed = key == "seed"
            others = "the seed is campaign.sweep.seed" if is_seed else hint(key, names, ", ".join(names))
            yield Problem(("sampler_options", key), f"{table.sampler} has no such option; {others}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            study = optuna.create_study(sampler=_sampler(optuna, table, 0))
            study.ask({"one": optuna.distributions.FloatDistribution(0, 1)})
    except (TypeError, ValueError) as error:
        yield Problem(("sampler_options",), f"{table.sampler} refuses them: {error}")
