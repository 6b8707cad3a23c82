"""What a run has spent, and whether its campaign's budget has room for what it does next.

Each billed call is in spend.json before and after it, and in rows. Each worker also sets aside there what its
next step and the evaluations after it may cost, and only then adds up what all runs of the campaign have
spent and set aside. So of two workers that look at the same time at least one sees the other, and no lock is
needed, which nodes of a cluster may not share. It looks again before the evaluations, and within one that
costs more than was set aside. A step may cost more than all before it: the budget is exceeded by at most one
step of each worker.

Where sampling runs ahead of training, all that may be sampled until the next look is set aside. If there is
no room for it, or no step has told what it costs, nothing is sampled ahead.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from retrain.backends.metering import NOTHING, Meter, tally
from retrain.base.errors import InterruptedRunError
from retrain.base.locks import is_held
from retrain.config.prices import Price, price_of
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs, recorded_table
from retrain.records.row_parts import CostSummary
from retrain.records.spending import EvaluationCost, Spending, Tokens, read_spending, write_spending
from retrain.records.step_row import StepRow
from retrain.records.text import dollars
from retrain.trainer.part import Due, Loop, Part, TakenStep

if TYPE_CHECKING:
    from retrain.trainer.source import AsyncSource


class Ledger(Part):
    """The spending of a run in all of its attempts, and what its calls cost."""

    name = "budget"
    changes_between_steps = True

    def __init__(self, config: Config, files: RunFiles) -> None:
        """Read what earlier attempts spent; calls that were in flight at a kill may have been billed."""
        self.files = files
        self.price = price_of(config)
        recorded = read_spending(files)
        # what earlier attempts spent, and what all of them learned of costs
        self.known = (recorded or Spending()).after_kill().learned_at(self.price)
        self.set_aside_usd = 0.0  # since `began_usd`
        self._recorded = NOTHING  # tokens of this attempt that a row has
        self._earlier = NOTHING  # tokens that no row has, of the attempts up to the checkpoint
        self._earlier_usd: float | None = 0.0  # at the prices at which they were taken
        self._lock = threading.Lock()
        self.check: Callable[[], None] = lambda: None  # called before each billed call, and may raise
        self.meter = Meter(lambda _: self.write(), lambda: self.check())
        self.began_usd = self.spent_usd()  # of the step that is being taken
        if recorded is not None:
            self.write()

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        return replace(row, cost=self.take())

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

    def leave_out(self, tokens: Tokens) -> None:
        """Count tokens in no row: of an evaluation before the first step, which one of several runs makes."""
        self._recorded += tokens

    def state_dict(self) -> StateDict:
        """Return what was billed and no row has: an evaluation that the checkpoint has is not repeated."""
        tokens, usd = self._unrecorded()
        return {"tokens": asdict(tokens), "usd": usd}

    def load_state_dict(self, state: StateDict) -> None:
        self._earlier, self._earlier_usd = Tokens(**state["tokens"]), state["usd"]

    def _unrecorded(self) -> tuple[Tokens, float | None]:
        """Return the tokens that no row has, and their dollars; None if the price is not known."""
        since = self.meter.tokens - self._recorded
        if self.price is None:
            return self._earlier + since, None
        earlier_usd = self._earlier_usd
        if earlier_usd is None:  # without a price then
            earlier_usd = self._earlier.usd(self.price)
        return self._earlier + since, earlier_usd + since.usd(self.price)

    def sync(self) -> None:
        """Write what was learned of costs since the last call."""
        if self.meter.tokens != NOTHING:
            self.write()

    def close(self) -> None:
        if self.set_aside_usd:
            self.set_aside(0.0)

    @contextmanager
    def sampling(self, rollouts: int) -> Iterator[None]:
        """Return a context that samples so many rollouts, and learns what one costs."""
        with tally() as billed:
            yield
        if self.price is not None:
            self.learn("largest_sampled_usd", billed.tokens.usd(self.price) / rollouts)

    def set_aside(self, usd: float) -> None:
        """Set so much aside for what follows `began_usd`, in place of what was."""
        self.set_aside_usd = usd
        self.write()

    def learn_evaluation(self, name: str, cost: EvaluationCost) -> None:
        with self._lock:
            self.known = replace(self.known, evaluations={**self.known.evaluations, name: cost})

    def learn(self, name: str, usd: float) -> None:
        """Keep what was dearer than all before it."""
        with self._lock:
            self.known = replace(self.known, **{name: max(usd, getattr(self.known, name))})

    def spent_usd(self) -> float:
        return self._spending().spent_usd or 0.0

    def _spending(self) -> Spending:
        """Return what the run has spent in all of its attempts; earlier tokens at what they cost then.

        Without a price now, no dollars are told: they would lack what was billed since.
        """
        before, meter = self.known, self.meter
        tokens, unsure = before.tokens + meter.tokens, before.unsure + meter.unsure
        spending = replace(before, tokens=tokens, unsure=unsure, open=meter.open)
        if (price := self.price) is None:
            return replace(spending, usd=None, unsure_usd=None, open_usd=None, tokens_usd=None)
        usd = before.tokens.usd(price) if before.usd is None else before.usd
        unsure_usd = before.unsure.usd(price) if before.unsure_usd is None else before.unsure_usd
        spending = replace(
            spending,
            usd=usd + meter.tokens.usd(price),
            unsure_usd=unsure_usd + meter.unsure.usd(price),
            open_usd=meter.open.usd(price),
            tokens_usd=tokens.usd(price),
        )
        if not self.set_aside_usd:
            return replace(spending, set_aside_usd=0.0)
        left_usd = self.began_usd + self.set_aside_usd - (spending.spent_usd or 0.0)
        return replace(spending, set_aside_usd=max(0.0, left_usd))

    def write(self) -> None:
        with self._lock:
            write_spending(self.files, self._spending())


PART = 0.25  # of an evaluation's cost so far: set aside for its next part, once it outgrows its estimate


class Budget(Part):
    """A run's share in the budget of its campaign."""

    def __init__(
        self, config: Config, campaign: CampaignFiles, ledger: Ledger, ahead: AsyncSource | None = None
    ) -> None:
        """Prepare; without a source that samples ahead, each step samples its own."""
        self._limit_usd = config.budget.usd
        self._group_size = config.training.group_size
        self._most_batches = 1 + config.data.most_refill  # that a step samples
        self._campaign = campaign
        self.ledger = ledger
        self._ahead = ahead
        self._evaluation_usd = 0.0  # spent when the evaluation began that is made

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        batch, size = taken.batch, row.rollouts.group_size
        at_most = self._most_batches * len(batch.groups) * size
        self.took_step(len(batch.everything.groups) * size, taken.billed, at_most)
        return row

    def took_step(self, rollouts: int = 0, trained: Tokens = NOTHING, at_most: int = 0) -> None:
        """Learn from a step, since `why_to_stop`, what another may cost; `rollouts` of a warm-up are 0.

        What it sampled is not what was sampled meanwhile, if that is ahead of training; nor what another one
        may sample `at_most`, with a refill.
        """
        ledger = self.ledger
        usd = most_usd = ledger.spent_usd() - ledger.began_usd
        sampled_usd = ledger.known.largest_sampled_usd
        is_unlike = self._ahead is not None or self._most_batches > 1
        if is_unlike and sampled_usd and rollouts and ledger.price is not None:
            ledger.learn("largest_trained_usd", trained.usd(ledger.price))
            usd = ledger.known.largest_trained_usd + rollouts * sampled_usd
            most_usd = usd + max(0, at_most - rollouts) * sampled_usd
        ledger.learn("largest_step_usd", most_usd)
        if rollouts:
            ledger.learn("largest_rollout_usd", usd / rollouts)

    def evaluated(self, due: Due, billed: Tokens) -> None:
        ledger = self.ledger
        if ledger.price is None or billed == NOTHING:
            return
        before = self._cost_of_kind(due)
        usd = max(billed.usd(ledger.price), before.usd if before else 0.0)
        ledger.learn_evaluation(due.name, EvaluationCost(usd, ledger.known.largest_rollout_usd, due.size))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Return a context whose calls are made only while the budget has room for them.

        An InterruptedRunError is raised from the first call that it has no room for.
        """
        if self.ledger.price is None or self._limit_now_usd() is None:
            yield
            return
        self._evaluation_usd = self.ledger.spent_usd()
        before, self.ledger.check = self.ledger.check, self._check_room
        try:
            yield
        finally:
            self.ledger.check = before

    def why_to_stop(self, step: int, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        """Set aside what comes next; return why the campaign stops instead, "" if it need not.

        A stop is asked of the whole campaign.
        """
        if not (due or is_step):
            return ""
        self.ledger.began_usd = self.ledger.spent_usd()
        if (price := self.ledger.price) is None or (limit_usd := self._limit_now_usd()) is None:
            return ""
        what = "step" if is_step else "evaluation"
        more = " with the evaluations after it" if is_step and due else ""
        # whether sampling is held to what the next step needs, in the order to be tried
        ways, why = [False], ""
        if self._ahead is not None:
            ways = [False, True] if self._dearest("largest_rollout_usd") else [True]
        for holds in ways:
            if holds and self._ahead is not None:
                self._ahead.hold(True)
            ahead_usd = self._ahead_usd(int(is_step), holds=holds)
            self.ledger.began_usd = self.ledger.spent_usd()  # now: what came in since is in both, not neither
            step_usd = self._dearest("largest_step_usd") if is_step else 0.0
            trained_usd = self._dearest("largest_trained_usd") if is_step else 0.0
            dues_usd = (
                self._evaluation_at_most_usd(evaluation, price, is_step=is_step) for evaluation in due
            )
            next_usd = math.fsum([max(step_usd, trained_usd + ahead_usd), *dues_usd])
            if not (why := self._lacking(limit_usd, next_usd, what, more)):
                if self._ahead is not None:
                    self._ahead.hold(holds)
                return ""
        self._stop(why)
        return why

    def _check_room(self) -> None:
        """Set aside more if an evaluation costs more than that; stop the campaign if there is no room."""
        ledger = self.ledger
        spent_usd = ledger.spent_usd()
        if spent_usd - ledger.began_usd < ledger.set_aside_usd:
            return
        if (limit_usd := self._limit_now_usd()) is None:
            return
        part_usd, ledger.began_usd = PART * (spent_usd - self._evaluation_usd), spent_usd
        if why := self._lacking(limit_usd, part_usd, "part of an evaluation"):
            self._stop(why)
            raise InterruptedRunError(why)

    def _stop(self, why: str) -> None:
        """Stop the campaign; what is being sampled stays set aside."""
        if self._ahead is not None:
            self._ahead.hold(True)
        ahead_usd = self._ahead_usd(0, holds=True)
        self.ledger.began_usd = self.ledger.spent_usd()
        self.ledger.set_aside(ahead_usd)
        ask_to_stop(self._campaign, now=False, why=why)

    def _limit_now_usd(self) -> float | None:
        """Return the campaign's budget, which a resume that adopted this worker may have changed."""
        recorded = recorded_table(self.ledger.files, "budget").get("usd")
        return float(recorded) if isinstance(recorded, int | float) else self._limit_usd

    def _lacking(self, limit_usd: float, next_usd: float, what: str, more: str = "") -> str:
        """Set aside what follows `began_usd`, then look at all runs; return what the budget lacks."""
        self.ledger.set_aside(next_usd)
        others = self._others()
        spent_usd = math.fsum([self.ledger.began_usd, *(other.spent_usd or 0.0 for other in others)])
        promised_usd = math.fsum(other.set_aside_usd for other in others)
        if spent_usd < limit_usd and spent_usd + promised_usd + next_usd <= limit_usd:
            return ""
        under_way = f", {dollars(promised_usd)} are set aside by other runs" if promised_usd else ""
        return (
            f"the budget of {dollars(limit_usd)} has no room for another {what}: {dollars(spent_usd)} "
            f"are spent{under_way}, and the next {what}{more} costs up to {dollars(next_usd)}"
        )

    def _ahead_usd(self, steps: int, *, holds: bool) -> float:
        """Return what is sampled at most until the next look, if sampling runs ahead of training."""
        groups = self._ahead.most_groups(steps, held=holds) if self._ahead is not None else 0
        if not groups:
            return 0.0
        rollout_usd = self._dearest("largest_sampled_usd") or self._dearest("largest_rollout_usd")
        return groups * self._group_size * rollout_usd

    def _dearest(self, name: str) -> float:
        """Return what this run's dearest cost; before its first, that of the others'."""
        dearest_usd: float = getattr(self.ledger.known, name)
        return dearest_usd or max((getattr(other, name) for other in self._others()), default=0.0)

    def _evaluation_at_most_usd(self, due: Due, price: Price, *, is_step: bool) -> float:
        """Return what the dearest evaluation of its kind cost, and more if completions have grown since.

        One that follows the first step has no price yet: it is asked for again after that step.
        """
        rollout_usd = self.ledger.known.largest_rollout_usd
        if (before := self._cost_of_kind(due)) is None:
            is_too_early = is_step and not rollout_usd
            return 0.0 if is_too_early else due.at_most_usd(price, rollout_usd)
        growth = rollout_usd / before.rollout_usd if before.rollout_usd else 1.0
        return before.usd * growth

    def _cost_of_kind(self, due: Due) -> EvaluationCost | None:
        """Return what an evaluation has cost; None if it was never made, or not of this size."""
        cost = self.ledger.known.evaluations.get(due.name)
        return cost if cost and cost.size == due.size else None

    def _others(self) -> list[Spending]:
        """Return what other runs have spent; of one without a live worker, calls cut off are set aside."""
        spendings = []
        for run in files_of_runs(self._campaign).values():
            if run.directory == self.ledger.files.directory or (spending := read_spending(run)) is None:
                continue
            if (spending.set_aside_usd or spending.open_usd) and not is_held(run.lock):
                spending = replace(spending, set_aside_usd=spending.open_usd or 0.0)
            spendings.append(spending)
        return spendings
