"""What a run has spent: each billed call, in spend.json before and after it, and in rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from retrain.backends.metering import NOTHING, Meter, tally
from retrain.config.prices import price_of
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.records.layout import RunFiles
from retrain.records.row_parts import CostSummary
from retrain.records.spending import EvaluationCost, Spending, Tokens, read_spending, write_spending
from retrain.records.step_row import StepRow
from retrain.trainer.part import Loop, Part
from retrain.trainer.step import TakenStep


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
        self._check: Callable[[], None] = _allow
        self.meter = Meter(lambda _: self.write(), lambda: self._check())
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
        """Set nothing aside any more."""
        if self.set_aside_usd:
            self.set_aside(0.0)

    @contextmanager
    def sampling(self, rollouts: int) -> Iterator[None]:
        """Return a context that samples so many rollouts, and learns what one costs."""
        with tally() as billed:
            yield
        if self.price is not None:
            self.learn("largest_sampled_usd", billed.tokens.usd(self.price) / rollouts)

    @contextmanager
    def checking(self, check: Callable[[], None]) -> Iterator[None]:
        """Return a context in which `check` is called before each billed call, and may raise."""
        self._check = check
        try:
            yield
        finally:
            self._check = _allow

    def set_aside(self, usd: float) -> None:
        """Set so much aside for what follows `began_usd`, in place of what was."""
        self.set_aside_usd = usd
        self.write()

    def learn(self, name: str, usd: float) -> None:
        """Keep what was dearer than all before it."""
        with self._lock:
            self.known = replace(self.known, **{name: max(usd, getattr(self.known, name))})

    def learn_evaluation(self, name: str, cost: EvaluationCost) -> None:
        """Keep what an evaluation costs."""
        with self._lock:
            self.known = replace(self.known, evaluations={**self.known.evaluations, name: cost})

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


def _allow() -> None:
    """Let each call be made."""
