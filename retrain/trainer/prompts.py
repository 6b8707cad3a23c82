"""The order of a run's training prompts: its sources' shares, what curricula choose, and what is put back."""

from __future__ import annotations

import json
import logging
import math
import time
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from retrain.base import registry
from retrain.base.errors import RunFailedError
from retrain.base.rollouts import Floats, Prompt
from retrain.base.user_code import located
from retrain.config.schema import SourceSection
from retrain.control.rules import StateDict
from retrain.plugins.curricula import Curriculum
from retrain.records.step_row import CurriculumSummary

BINS = 10  # of predicted success rates
SLOW_S, SLOW_FRACTION = 1.0, 0.2  # a step's choices that take longer, and this much of it, are named
log = logging.getLogger(__name__)


class Draw(NamedTuple):
    """A prompt that is to be trained on, once."""

    number: int  # of all draws of the run, from 0
    position: int  # of the prompt, among those to train on
    is_extra: bool = False  # beyond the shares of a step, as a refill's


class Lane:
    """The prompts of one source, in the order that a curriculum of their own chooses."""

    def __init__(
        self, source: SourceSection, start: int, size: int, curriculum: Curriculum, name: str
    ) -> None:
        """Its prompts are `size` from position `start` on; `name` is the curriculum's."""
        self.source, self.start = source, start
        self.weight = Fraction(str(source.weight))
        self.owed = Fraction(0)  # prompts that it has not had yet of its share, or less than 0
        self._size, self._curriculum, self._name = size, curriculum, name
        self._again: list[Draw] = []
        self._chose_s, self._was_slow = 0.0, False  # since the last step's end; whether it was named
        self.state_dict(())  # what cannot be saved fails before the first step

    def take(self, count: int) -> tuple[list[Draw], list[int]]:
        """Return the draws that are repeated, and the positions of the others of so many prompts."""
        repeated, self._again = self._again[:count], self._again[count:]
        lacking = count - len(repeated)
        chosen = self._chosen(lacking) if lacking else []
        return repeated, [self.start + position for position in chosen]

    def put_back(self, draws: Iterable[Draw]) -> None:
        """Queue prompts to be drawn again before any others; those of its share are owed again."""
        self._again, self.owed = self._with(draws)

    @property
    def due(self) -> int:
        return len(self._again)

    def observe(self, positions: Sequence[int], rewards: Floats) -> tuple[Floats, Floats] | None:
        """Tell the curriculum of a step; return what it predicted and what was seen, if it predicts."""
        within = [position - self.start for position in positions]
        predicted = self._asked("predict", within)
        scored = np.flatnonzero(~np.isnan(rewards).all(axis=1))
        rates = None
        if predicted is not None and len(scored):
            success = self._checked("success", self._asked("success", rewards[scored]), rewards[scored])
            expected = self._checked("predict", predicted, np.zeros(len(within)))
            rates = expected[scored], np.nanmean(success, axis=1)
        self._asked("observe", within, rewards)
        return rates

    def _checked(self, method: str, returned: Any, of: Floats) -> Floats:
        """Return the success rates that a method of the curriculum gave, NaN where `of` is NaN."""
        try:
            rates = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError):
            rates = np.empty(0)
        known = ~np.isnan(of)
        if rates.shape != of.shape or not ((rates >= 0) & (rates <= 1))[known].all():
            needed = f"numbers from 0 to 1 of shape {of.shape}"
            raise self._failed(f"returned {returned!r:.80} from {method}; needs {needed}")
        return np.where(known, rates, np.nan)

    def state_dict(self, under_way: Iterable[Draw]) -> StateDict:
        """Return the state in which what is under way was put back."""
        state = self._asked("state_dict")
        try:
            if json.loads(json.dumps(state, allow_nan=False)) != state:
                raise TypeError("written and read again, it differs")
        except (TypeError, ValueError) as error:
            raise self._failed(f"has a state that cannot be saved: {error}; needs what JSON takes") from error
        again, owed = self._with(under_way)
        saved = [[draw.number, draw.position] for draw in again]
        return {"again": saved, "owed": str(owed), "curriculum": state}

    def load_state_dict(self, state: StateDict) -> None:
        self._again, self.owed = [Draw(*draw) for draw in state["again"]], Fraction(state["owed"])
        self._asked("load_state_dict", state["curriculum"])

    def _with(self, draws: Iterable[Draw]) -> tuple[list[Draw], Fraction]:
        """Return the prompts to draw again, these added, and how many it is then owed."""
        added = {draw._replace(is_extra=False): draw.is_extra for draw in draws}
        for draw in self._again:
            added.pop(draw, None)
        shares = sum(not is_extra for is_extra in added.values())
        return sorted([*self._again, *added]), self.owed + shares

    def _chosen(self, count: int) -> list[int]:
        """Return the curriculum's choice, checked."""
        began_s = time.monotonic()
        choice = self._asked("choose", count)
        self._chose_s += time.monotonic() - began_s
        is_list, size = isinstance(choice, Sequence | np.ndarray), self._size
        positions = [int(p) for p in choice if isinstance(p, Integral)] if is_list else []
        is_valid = all(0 <= position < size for position in positions)
        if not is_valid or len(positions) != count or len(choice) != count:
            raise self._failed(f"chose {choice!r:.80}; needs a list of {count} positions below {size}")
        if not self._curriculum.repeats and count <= size and len(set(positions)) < count:
            twice = next(p for n, p in enumerate(positions) if p in positions[:n])
            raise self._failed(f"chose position {twice} twice; set `repeats = True` if that is meant")
        return positions

    def name_if_slow(self, step: int, step_time_s: float) -> None:
        """Warn once of choices that took much of a step."""
        chose_s, self._chose_s = self._chose_s, 0.0
        if not self._was_slow and chose_s > max(SLOW_S, SLOW_FRACTION * step_time_s):
            self._was_slow = True
            log.warning(
                "step %d: [data].curriculum: %r took %.1f of %.1f s to choose prompts; make `choose` faster",
                *(step, self._name, chose_s, step_time_s),
            )

    def _asked(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._curriculum, method)(*arguments)
        except Exception as error:
            if registry.is_built_in("curricula", self._name):
                raise
            raise self._failed(f"failed in {method}: {located(error)}") from error

    def _failed(self, what: str) -> RunFailedError:
        of_source = f' of source "{label}"' if (label := self.source.label) else ""
        return RunFailedError(f"[data].curriculum: {self._name!r}{of_source} {what}")


class PromptStream:
    """Endless draws of training prompts, for batches of any size.

    Of several sources, each step has its share of each: exactly, as whole prompts are, and what rounding
    leaves is carried over to the next step. The state is the number of draws and that of each source: the
    prompts to take again, and the curriculum's.
    """

    def __init__(self, prompts: Sequence[Prompt], lanes: Sequence[Lane], seed: int) -> None:
        self._prompts, self._lanes, self._seed = prompts, lanes, seed
        self._drawn = 0

    def draw(self, count: int, step: int = 1, shares: Mapping[str, int] | None = None) -> list[Draw]:
        """Return the next draws, those put back first.

        Args:
            step: that they are for, from 1; sources may begin and end with some.
            shares: prompts of each source, beyond those of the step; by default the sources' weights decide.
        """
        if shares is None:
            quotas = self._quotas(count, step)
        else:
            quotas = [shares.get(lane.source.label, 0) for lane in self._lanes]
        taken = [lane.take(quota) for lane, quota in zip(self._lanes, quotas, strict=True)]
        repeated = sorted(draw for again, _ in taken for draw in again)
        positions = [position for _, chosen in taken for position in chosen]
        if len(self._lanes) > 1:  # in random order, so that the first ones are a fair sample
            order = np.random.default_rng([self._seed, self._drawn]).permutation(len(positions))
            positions = [positions[number] for number in order]
        start = self._drawn
        self._drawn += len(positions)
        draws = [*repeated, *(Draw(start + n, position) for n, position in enumerate(positions))]
        return draws if shares is None else [draw._replace(is_extra=True) for draw in draws]

    def name_if_slow(self, step: int, step_time_s: float) -> None:
        """Warn once of each curriculum whose choices took much of a step."""
        for lane in self._lanes:
            lane.name_if_slow(step, step_time_s)

    def put_back(self, draws: Iterable[Draw]) -> None:
        """Queue prompts to be drawn again before any others of their source."""
        for lane, own in self._by_lane(draws):
            lane.put_back(own)

    @property
    def due(self) -> int:
        """How many were put back, which are drawn before any others."""
        return sum(lane.due for lane in self._lanes)

    def at(self, draw: Draw) -> Prompt:
        return self._prompts[draw.position]

    def observe(self, draws: Sequence[Draw], rewards: Floats) -> CurriculumSummary | None:
        """Tell the curricula of a step; return what they predicted beside what was seen, if they predict.

        Args:
            rewards: of shape (draws, rollouts), NaN where unscored.
        """
        rows = {draw: row for row, draw in enumerate(draws)}
        rates = [
            lane.observe([draw.position for draw in own], rewards[[rows[draw] for draw in own]])
            for lane, own in self._by_lane(draws)
            if own
        ]
        known = [both for both in rates if both is not None]
        if not known:
            return None
        predicted, seen = map(np.concatenate, zip(*known, strict=True))
        bins: dict[str, list[float]] = {}  # of the rates that were seen, by those predicted
        for expected, rate in sorted(zip(predicted.tolist(), seen.tolist(), strict=True)):
            bins.setdefault(f"{min(int(expected * BINS), BINS - 1) * 100 // BINS:02}", []).append(rate)
        return CurriculumSummary(
            predicted=float(predicted.mean()),
            seen=float(seen.mean()),
            prompts={name: len(seen_rates) for name, seen_rates in bins.items()},
            solved={name: sum(seen_rates) / len(seen_rates) for name, seen_rates in bins.items()},
        )

    def state_dict(self, under_way: Iterable[Draw] = ()) -> StateDict:
        """Return the state in which what is under way was put back."""
        states = {lane.source.label: lane.state_dict(own) for lane, own in self._by_lane(under_way)}
        return {"drawn": self._drawn, "sources": states}

    def load_state_dict(self, state: StateDict) -> None:
        self._drawn = int(state["drawn"])
        for lane in self._lanes:
            lane.load_state_dict(state["sources"][lane.source.label])

    def _by_lane(self, draws: Iterable[Draw]) -> list[tuple[Lane, list[Draw]]]:
        by_lane: list[tuple[Lane, list[Draw]]] = [(lane, []) for lane in self._lanes]
        starts = [lane.start for lane in self._lanes]
        for draw in draws:
            by_lane[bisect(starts, draw.position) - 1][1].append(draw)
        return by_lane

    def _quotas(self, count: int, step: int) -> list[int]:
        """Return how many prompts of each source a step has, and carry over what rounding leaves."""
        ends = [lane.source.until_step for lane in self._lanes]
        if None not in ends:  # asynchronous sampling may be ahead of the last step
            step = min(step, max(end for end in ends if end is not None))
        active = [lane for lane in self._lanes if lane.source.is_active(step)]
        if not active:
            raise RunFailedError(
                f"[[data.source]]: step {step} has no source; change from_step or until_step"
            )
        rest = count - sum(lane.owed for lane in active)
        weights = sum(lane.weight for lane in active)
        exact = [lane.owed + lane.weight / weights * rest for lane in active]
        quotas = dict(zip(active, apportioned(exact), strict=True))
        for lane, due in zip(active, exact, strict=True):
            lane.owed = due - quotas[lane]
        return [quotas.get(lane, 0) for lane in self._lanes]


def apportioned(exact: Sequence[Fraction]) -> list[int]:
    """Return whole numbers with the same sum, by largest remainders; none is below 0.

    Args:
        exact: shares whose sum is a whole number; of equal remainders the first comes first.
    """
    whole = [max(0, math.floor(share)) for share in exact]
    while lacking := sum(exact) - sum(whole):
        remainders = [share - number for share, number in zip(exact, whole, strict=True)]
        if lacking > 0:
            whole[remainders.index(max(remainders))] += 1
        else:  # a source that had too many leaves more to the others than there is
            least = min(remainder for remainder, number in zip(remainders, whole, strict=True) if number)
            whole[remainders.index(least)] -= 1
    return whole


def open_stream(
    prompts: Sequence[Prompt],
    name: str,
    params: Mapping[str, Any],
    seed: int,
    sources: Sequence[SourceSection] = (),
) -> PromptStream:
    """Return the draws of a run whose `[data]` names a curriculum, which each source has one of."""
    lanes, start = [], 0
    for source in sources or [SourceSection()]:
        own = [prompt for prompt in prompts if prompt.source == source.label] if sources else prompts
        curriculum = registry.find_plugin("curricula", name)(own, seed=seed, **params)
        made = registry.check_made("curricula", name, curriculum)
        lanes.append(Lane(source, start, len(own), made, name))
        start += len(own)
    return PromptStream(prompts, lanes, seed)
