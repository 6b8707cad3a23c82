"""What a run spends, and whether its campaign's budget has room for what it does next.

Each worker sets aside, in its own spend.json, what its next step and the evaluations after it may cost, and
only then adds up what all runs of the campaign have spent and set aside. So of two workers that look at the
same time at least one sees the other, and no lock is needed, which nodes of a cluster may not share. It looks
again before the evaluations. A step may cost more than all before it: the budget is exceeded by at most one
step of each worker.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from retrain.backends.metering import NOTHING, Meter
from retrain.config.flow import flow_settings
from retrain.config.prices import price_of
from retrain.config.schema import Config
from retrain.records.api_row import CostSummary
from retrain.records.campaign_state import ask_to_stop
from retrain.records.layout import RunFiles, campaign_of, files_of_runs, recorded_table
from retrain.records.spending import EvaluationCost, Spending, Tokens, read_spending, write_spending
from retrain.records.text import dollars
from retrain.trainer.due import Due


class RunBudget:
    """The spending of one attempt at a run, and its share in the campaign's budget."""

    def __init__(self, config: Config, files: RunFiles) -> None:
        self._files = files
        self._price = price_of(config)
        self._limit_usd = config.budget.usd
        self._samples_ahead = flow_settings(config) is not None  # rollouts of later steps, at any time
        found = read_spending(files)
        known = found or Spending()
        # calls that were in flight when the last attempt was killed may have been billed
        self._before = replace(known, unsure=known.unsure + known.open)
        self._set_aside_usd, self._largest_usd = 0.0, known.largest_step_usd
        a_step = config.training.batch_size * config.training.group_size  # rollouts; earlier versions lack:
        self._rollout_usd = known.largest_rollout_usd or known.largest_step_usd / a_step
        self._evaluations = dict(known.evaluations)
        self._told = NOTHING  # tokens that a row has
        self._lock = threading.Lock()
        self.meter = Meter(self._keep)
        self._began_usd = self._spent_usd()  # of the step that is being taken
        if found is not None:
            self._write(durable=True)

    @property
    def has_price(self) -> bool:
        return self._price is not None

    def take(self) -> CostSummary | None:
        """Return what was billed since the last call; None if nothing was ever."""
        if self.meter.tokens == NOTHING:
            return None
        taken, self._told = self.meter.tokens - self._told, self.meter.tokens
        usd = None if self._price is None else taken.usd(self._price)
        return CostSummary(
            prefill_tokens=taken.prefill,
            cached_tokens=taken.cached,
            sampled_tokens=taken.sample,
            trained_tokens=taken.train,
            cost_usd=usd,
        )

    def sync(self) -> None:
        """Sync what was spent to disk, before a checkpoint that depends on it."""
        if self.meter.tokens != NOTHING:
            self._write(durable=True)

    def close(self) -> None:
        """Set nothing aside any more."""
        if self._set_aside_usd:
            self._set_aside_usd = 0.0
            self._write(durable=False)

    def took_step(self, rollouts: int = 0) -> None:
        """Learn from a step, since `why_to_stop`, what another may cost; `rollouts` of a warm-up are 0."""
        usd = self._spent_usd() - self._began_usd
        self._largest_usd = max(self._largest_usd, usd)
        if rollouts:
            self._rollout_usd = max(self._rollout_usd, usd / rollouts)

    def evaluated(self, name: str, billed: Tokens) -> None:
        """Learn from an evaluation what another of its kind may cost."""
        if self._price is None or billed == NOTHING:
            return
        known = self._evaluations.get(name)
        usd = max(billed.usd(self._price), known.usd if known else 0.0)
        self._evaluations[name] = EvaluationCost(usd, self._rollout_usd)

    def why_to_stop(self, due: Sequence[Due] = (), *, is_step: bool = True) -> str:
        """Set aside what comes next; return why the campaign stops instead, "" if it need not.

        A stop is asked of the whole campaign.
        """
        if not (due or is_step):
            return ""
        self._began_usd = self._spent_usd()
        if self._price is None or (limit_usd := self._limit_now_usd()) is None:
            return ""
        if not (why := self._lacking(limit_usd, due, is_step=is_step)):
            return ""
        self.close()
        ask_to_stop(campaign_of(self._files.directory), now=False, why=why)
        return why

    def _limit_now_usd(self) -> float | None:
        """Return the campaign's budget, which a resume that adopted this worker may have changed."""
        recorded = recorded_table(self._files, "budget").get("usd")
        return float(recorded) if isinstance(recorded, int | float) else self._limit_usd

    def _lacking(self, limit_usd: float, due: Sequence[Due], *, is_step: bool) -> str:
        """Set the costs aside, then look at all runs; return what the budget lacks, if it does."""
        step_usd = self._next_step_usd() if is_step or self._samples_ahead else 0.0
        next_usd = math.fsum([step_usd, *map(partial(self._cost_usd, is_step=is_step), due)])
        self._set_aside_usd = next_usd
        self._write(durable=False)
        others = self._others()
        spent_usd = math.fsum([self._began_usd, *(one.spent_usd or 0.0 for one in others)])
        promised_usd = math.fsum(one.set_aside_usd for one in others)
        if spent_usd < limit_usd and spent_usd + promised_usd + next_usd <= limit_usd:
            return ""
        what = "step" if is_step else "evaluation"
        under_way = f", {dollars(promised_usd)} are set aside by other runs" * bool(promised_usd)
        evaluations = " with the evaluations after it" * bool(is_step and due)
        return (
            f"the budget of {dollars(limit_usd)} has no room for another {what}: {dollars(spent_usd)} "
            f"are spent{under_way}, and the next {what}{evaluations} costs up to {dollars(next_usd)}"
        )

    def _next_step_usd(self) -> float:
        """Return what this run's dearest step cost; before its first, that of the others'."""
        return self._largest_usd or max((one.largest_step_usd for one in self._others()), default=0.0)

    def _cost_usd(self, due: Due, *, is_step: bool) -> float:
        """Return what the dearest evaluation of its kind cost, and more if completions have grown since.

        One that follows the first step has no price yet: it is asked for again after that step.
        """
        assert self._price is not None
        if (known := self._evaluations.get(due.name)) is None:
            is_too_early = is_step and not self._rollout_usd
            return 0.0 if is_too_early else due.at_most_usd(self._price, self._rollout_usd)
        growth = self._rollout_usd / known.rollout_usd if known.rollout_usd else 1.0
        return known.usd * growth

    def _others(self) -> list[Spending]:
        runs = files_of_runs(campaign_of(self._files.directory)).values()
        found = (read_spending(run) for run in runs if run.directory != self._files.directory)
        return [one for one in found if one is not None]

    def _spent_usd(self) -> float:
        return self._now().spent_usd or 0.0

    def _now(self) -> Spending:
        """Return what the run has spent in all of its attempts; earlier tokens at what they cost then."""
        before, meter = self._before, self.meter
        unsure = before.unsure + meter.unsure
        now = replace(
            before,
            tokens=before.tokens + meter.tokens,
            unsure=unsure,
            open=meter.open,
            largest_step_usd=self._largest_usd,
            largest_rollout_usd=self._rollout_usd,
            evaluations=dict(self._evaluations),
        )
        if self._price is None:
            return now
        earlier = before.tokens.usd(self._price) if before.usd is None else before.usd
        usd = earlier + meter.tokens.usd(self._price)
        now = replace(now, usd=usd, unsure_usd=unsure.usd(self._price), open_usd=meter.open.usd(self._price))
        left = self._began_usd + self._set_aside_usd - (now.spent_usd or 0.0) if self._set_aside_usd else 0.0
        return replace(now, set_aside_usd=max(0.0, left))

    def _keep(self, _: Meter) -> None:
        self._write(durable=False)

    def _write(self, *, durable: bool) -> None:
        with self._lock:
            write_spending(self._files, self._now(), durable=durable)
