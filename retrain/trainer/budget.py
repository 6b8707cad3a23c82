"""What a run spends, and whether its campaign's budget has room for what it does next.

Each worker sets aside, in its own spend.json, what its next step and the evaluations after it may cost, and
only then adds up what all runs of the campaign have spent and set aside. So of two workers that look at the
same time at least one sees the other, and no lock is needed, which nodes of a cluster may not share. It looks
again before the evaluations, and within one that costs more than was set aside. A step may cost more than
all before it: the budget is exceeded by at most one step of each worker.

Where sampling runs ahead of training, all that may be sampled until the next look is set aside. If there is
no room for it, or no step has told what it costs, nothing is sampled ahead.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial

from retrain.backends.metering import NOTHING, Meter, tally
from retrain.base.errors import InterruptedRunError
from retrain.base.locks.held import is_held
from retrain.config.prices import price_of
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import RunFiles, campaign_of, files_of_runs, recorded_table
from retrain.records.row_parts import CostSummary
from retrain.records.spending import EvaluationCost, Spending, Tokens, read_spending, write_spending
from retrain.records.text import dollars
from retrain.trainer.evaluation import Due
from retrain.trainer.source import AsyncSource

PART = 0.25  # of an evaluation's cost so far: set aside for its next part, once it outgrows its estimate


class RunBudget:
    """The spending of one attempt at a run, and its share in the campaign's budget."""

    def __init__(self, config: Config, files: RunFiles) -> None:
        self._files = files
        self._price = price_of(config)
        self._limit_usd = config.budget.usd
        self._group_size = config.training.group_size
        self.ahead: AsyncSource | None = None  # None: each step samples its own
        found = read_spending(files)
        # what earlier attempts spent, and what all of them learned of costs; calls that were in flight when
        # the last attempt was killed may have been billed
        self._known = (found or Spending()).after_kill().learned_at(self._price)
        self._set_aside_usd = 0.0
        self._recorded = NOTHING  # tokens of this attempt that a row has
        self._earlier = NOTHING  # tokens that no row has, of the attempts up to the checkpoint
        self._earlier_usd: float | None = 0.0  # at the prices at which they were taken
        self._lock = threading.Lock()
        self._evaluation_usd: float | None = None  # spent when an evaluation began that the budget may stop
        self.meter = Meter(self._keep, self._check_room)
        self._began_usd = self._spent_usd()  # of the step that is being taken
        if found is not None:
            self._write()

    @property
    def has_price(self) -> bool:
        return self._price is not None

    def take(self) -> CostSummary | None:
        """Return what was billed since the last call; None if nothing was ever."""
        if NOTHING == self.meter.tokens == self._earlier:
            return None
        taken, usd = self._unrecorded()
        self._recorded, self._earlier, self._earlier_usd = self.meter.tokens, NOTHING, 0.0
        return CostSummary(
            prefill_tokens=taken.prefill,
            cached_tokens=taken.cached,
            sampled_tokens=taken.sample,
            trained_tokens=taken.train,
            cost_usd=usd,
        )

    def state_dict(self) -> StateDict:
        """Return what was billed and no row has: an evaluation that the checkpoint has is not repeated."""
        tokens, usd = self._unrecorded()
        return {"tokens": asdict(tokens), "usd": usd}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self._earlier, self._earlier_usd = Tokens(**state["tokens"]), state["usd"]

    def _unrecorded(self) -> tuple[Tokens, float | None]:
        """Return the tokens that no row has, and their dollars; None if the price is not known."""
        since = self.meter.tokens - self._recorded
        if self._price is None:
            return self._earlier + since, None
        earlier_usd = self._earlier_usd
        if earlier_usd is None:  # without a price then
            earlier_usd = self._earlier.usd(self._price)
        return self._earlier + since, earlier_usd + since.usd(self._price)

    def sync(self) -> None:
        """Write what was learned of costs since the last call, before a checkpoint that depends on it."""
        if self.meter.tokens != NOTHING:
            self._write()

    def close(self) -> None:
        """Set nothing aside any more."""
        if self._set_aside_usd:
            self._set_aside_usd = 0.0
            self._write()

    @contextmanager
    def sampling(self, rollouts: int) -> Iterator[None]:
        """Return a context that samples so many rollouts, and learns what one costs."""
        with tally() as billed:
            yield
        if self._price is not None:
            self._learn("largest_sampled_usd", billed.tokens.usd(self._price) / rollouts)

    def took_step(self, rollouts: int = 0, trained: Tokens = NOTHING) -> None:
        """Learn from a step, since `why_to_stop`, what another may cost; `rollouts` of a warm-up are 0.

        What it sampled is not what was sampled meanwhile, if that is ahead of training.
        """
        usd = self._spent_usd() - self._began_usd
        sampled_usd = self._known.largest_sampled_usd
        if sampled_usd and rollouts and self.ahead is not None and self._price is not None:
            self._learn("largest_trained_usd", trained.usd(self._price))
            usd = self._known.largest_trained_usd + rollouts * sampled_usd
        self._learn("largest_step_usd", usd)
        if rollouts:
            self._learn("largest_rollout_usd", usd / rollouts)

    def evaluated(self, due: Due, billed: Tokens) -> None:
        """Learn from an evaluation what another of its kind may cost."""
        if self._price is None or billed == NOTHING:
            return
        known = self._known_cost(due)
        usd = max(billed.usd(self._price), known.usd if known else 0.0)
        cost = EvaluationCost(usd, self._known.largest_rollout_usd, due.size)
        with self._lock:
            self._known = replace(self._known, evaluations={**self._known.evaluations, due.name: cost})

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context whose calls are made only while the budget has room for them.

        An InterruptedRunError is raised from the first call that it has no room for.
        """
        is_limited = self._price is not None and self._limit_now_usd() is not None
        self._evaluation_usd = self._spent_usd() if is_limited else None
        try:
            yield
        finally:
            self._evaluation_usd = None

    def why_to_stop(self, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        """Set aside what comes next; return why the campaign stops instead, "" if it need not.

        A stop is asked of the whole campaign.
        """
        if not (due or is_step):
            return ""
        self._began_usd, why = self._spent_usd(), ""
        if self._price is None or (limit_usd := self._limit_now_usd()) is None:
            return ""
        for holds in self._ways():
            next_usd = self._cost_of(due, is_step=is_step, holds=holds)
            what, more = "step" if is_step else "evaluation", " with the evaluations after it"
            if not (why := self._lacking(limit_usd, next_usd, what, more if is_step and due else "")):
                if self.ahead is not None:
                    self.ahead.hold(holds)
                return ""
        self._stop(why)
        return why

    def _ways(self) -> Sequence[bool]:
        """Return whether sampling is held to what the next step needs, in the order to be tried."""
        if self.ahead is None:
            return (False,)
        return (False, True) if self._dearest("largest_rollout_usd") else (True,)

    def _check_room(self) -> None:
        """Set aside more if an evaluation costs more than that; stop the campaign if there is no room."""
        if self._evaluation_usd is None:
            return
        spent_usd = self._spent_usd()
        limit_usd = self._limit_now_usd() if spent_usd - self._began_usd >= self._set_aside_usd else None
        if limit_usd is not None:
            part_usd, self._began_usd = PART * (spent_usd - self._evaluation_usd), spent_usd
            if why := self._lacking(limit_usd, part_usd, "part of an evaluation"):
                self._stop(why)
                raise InterruptedRunError(why)

    def _stop(self, why: str) -> None:
        """Stop the campaign; what is being sampled stays set aside."""
        if self.ahead is not None:
            self.ahead.hold(True)
        self._set_aside_usd = self._ahead_usd(0, holds=True)
        self._began_usd = self._spent_usd()
        self._write()
        ask_to_stop(campaign_of(self._files.directory), now=False, why=why)

    def _limit_now_usd(self) -> float | None:
        """Return the campaign's budget, which a resume that adopted this worker may have changed."""
        recorded = recorded_table(self._files, "budget").get("usd")
        return float(recorded) if isinstance(recorded, int | float) else self._limit_usd

    def _lacking(self, limit_usd: float, next_usd: float, what: str, more: str = "") -> str:
        """Set aside what follows `_began_usd`, then look at all runs; return what the budget lacks."""
        self._set_aside_usd = next_usd
        self._write()
        others = self._others()
        spent_usd = math.fsum([self._began_usd, *(one.spent_usd or 0.0 for one in others)])
        promised_usd = math.fsum(one.set_aside_usd for one in others)
        if spent_usd < limit_usd and spent_usd + promised_usd + next_usd <= limit_usd:
            return ""
        under_way = f", {dollars(promised_usd)} are set aside by other runs" if promised_usd else ""
        return (
            f"the budget of {dollars(limit_usd)} has no room for another {what}: {dollars(spent_usd)} "
            f"are spent{under_way}, and the next {what}{more} costs up to {dollars(next_usd)}"
        )

    def _cost_of(self, due: Sequence[Due], *, is_step: bool, holds: bool) -> float:
        """Return what is to be set aside until the next look, which begins anew."""
        if holds and self.ahead is not None:
            self.ahead.hold(True)
        ahead_usd = self._ahead_usd(int(is_step), holds=holds)
        self._began_usd = self._spent_usd()  # now: what came in since is in both, and not in neither
        step_usd = self._dearest("largest_step_usd") if is_step else 0.0
        trained_usd = self._dearest("largest_trained_usd") if is_step else 0.0
        dues_usd = map(partial(self._cost_usd, is_step=is_step), due)
        return math.fsum([max(step_usd, trained_usd + ahead_usd), *dues_usd])

    def _ahead_usd(self, steps: int, *, holds: bool) -> float:
        """Return what is sampled at most until the next look, if sampling runs ahead of training."""
        groups = self.ahead.most_groups(steps, held=holds) if self.ahead is not None else 0
        if not groups:
            return 0.0
        rollout_usd = self._dearest("largest_sampled_usd") or self._dearest("largest_rollout_usd")
        return groups * self._group_size * rollout_usd

    def _learn(self, name: str, usd: float) -> None:
        """Keep what was dearer than all before it."""
        with self._lock:
            self._known = replace(self._known, **{name: max(usd, getattr(self._known, name))})

    def _dearest(self, name: str) -> float:
        """Return what this run's dearest cost; before its first, that of the others'."""
        own_usd: float = getattr(self._known, name)
        return own_usd or max((getattr(one, name) for one in self._others()), default=0.0)

    def _cost_usd(self, due: Due, *, is_step: bool) -> float:
        """Return what the dearest evaluation of its kind cost, and more if completions have grown since.

        One that follows the first step has no price yet: it is asked for again after that step.
        """
        assert self._price is not None
        rollout_usd = self._known.largest_rollout_usd
        if (known := self._known_cost(due)) is None:
            is_too_early = is_step and not rollout_usd
            return 0.0 if is_too_early else due.at_most_usd(self._price, rollout_usd)
        growth = rollout_usd / known.rollout_usd if known.rollout_usd else 1.0
        return known.usd * growth

    def _known_cost(self, due: Due) -> EvaluationCost | None:
        """Return what an evaluation has cost; None if it was never made, or not of this size."""
        known = self._known.evaluations.get(due.name)
        return known if known and known.size == due.size else None

    def _others(self) -> list[Spending]:
        """Return what other runs have spent; of one without a live worker, calls cut off are set aside."""
        found = []
        for run in files_of_runs(campaign_of(self._files.directory)).values():
            one = read_spending(run) if run.directory != self._files.directory else None
            if one is None:
                continue
            if (one.set_aside_usd or one.open_usd) and not is_held(run.lock):
                one = replace(one, set_aside_usd=one.open_usd or 0.0)
            found.append(one)
        return found

    def _spent_usd(self) -> float:
        return self._now().spent_usd or 0.0

    def _now(self) -> Spending:
        """Return what the run has spent in all of its attempts; earlier tokens at what they cost then.

        Without a price now, no dollars are told: they would lack what was billed since.
        """
        before, meter = self._known, self.meter
        tokens, unsure = before.tokens + meter.tokens, before.unsure + meter.unsure
        now = replace(before, tokens=tokens, unsure=unsure, open=meter.open)
        if (price := self._price) is None:
            return replace(now, usd=None, unsure_usd=None, open_usd=None, tokens_usd=None)
        usd = before.tokens.usd(price) if before.usd is None else before.usd
        unsure_usd = before.unsure.usd(price) if before.unsure_usd is None else before.unsure_usd
        usd, unsure_usd = usd + meter.tokens.usd(price), unsure_usd + meter.unsure.usd(price)
        open_usd, tokens_usd = meter.open.usd(price), tokens.usd(price)
        now = replace(now, usd=usd, unsure_usd=unsure_usd, open_usd=open_usd, tokens_usd=tokens_usd)
        left = self._began_usd + self._set_aside_usd - (now.spent_usd or 0.0) if self._set_aside_usd else 0.0
        return replace(now, set_aside_usd=max(0.0, left))

    def _keep(self, _: Meter) -> None:
        self._write()

    def _write(self) -> None:
        with self._lock:
            write_spending(self._files, self._now())
