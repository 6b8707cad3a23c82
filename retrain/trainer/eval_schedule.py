"""When a run evaluates its policy; and `[[eval]]`, each with its own reward, prompts and sampling stream.

They change nothing that they measure: a run takes the same steps with them as without. One that falls while
the reward rises is a sign that the policy exploits its reward.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Sampling
from retrain.backends.metering import tally
from retrain.base.errors import InterruptedRunError
from retrain.base.rollouts import CORRECT, Floats, Group, Prompt
from retrain.config.campaign import EvalSection
from retrain.config.resolve import as_played
from retrain.config.schema import Config
from retrain.control.rules import StateDict
from retrain.control.rules.persistent_noise import deviation, window_rises
from retrain.records.files import record_of
from retrain.records.row_parts import Evaluation, EvalWatch, NamedEvaluation, Value, columns
from retrain.records.spending import Tokens
from retrain.records.step_row import StepRow
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.budget import Budget
from retrain.trainer.episodes import SampleGroups
from retrain.trainer.evaluation import (
    AnyEvaluation,
    Due,
    HeldOut,
    Newest,
    Stream,
    each_pass_at_k,
    standard_error,
)
from retrain.trainer.journal import Journal
from retrain.trainer.part import Loop, Part
from retrain.trainer.step import TakenStep, is_due

WINDOW = 10  # steps whose mean reward is that of an evaluation's policy
RECENT = 320  # steps whose rewards are kept
TELLING = 60  # steps that show how much such a mean varies; fewer show how much each differs from the next
FROM_NEIGHBOURS, FROM_STEPS = 1.46, 2.7  # of distant windows over these, at an autocorrelation of 0.9
RISEN = 3.0  # standard deviations of the reward's rise
CERTAIN = 3.0  # normal score of Student's t, at least: the best of many evaluations is partly luck
ERROR = 0.05  # probability that any of a run's evaluations seems to fall, which all pairs of them share


@dataclass(frozen=True)
class OpenEval:
    """An `[[eval]]` that is ready: its table, its held-out prompts, its reward and how they are sampled."""

    table: EvalSection
    prompts: Sequence[Prompt]
    reward: Callable[[Sequence[Group], int], ScoredBatch]
    sample: SampleGroups  # completions, or whole episodes

    @property
    def name(self) -> str:
        return self.table.name


@dataclass(frozen=True)
class StepEvaluations:
    """The evaluations after a step: their parts of its row."""

    evaluation: Evaluation | None
    evals: Mapping[str, NamedEvaluation]
    eval_watch: EvalWatch | None

    def added_to(self, row: StepRow) -> StepRow:
        return replace(row, evaluation=self.evaluation, evals=self.evals, eval_watch=self.eval_watch)

    def columns(self) -> dict[str, Value]:
        return columns(self.evaluation) | columns(self.evals) | columns(self.eval_watch)


def count_of_evaluations(table: EvalSection, steps: int) -> int:
    """Return how often a run of so many steps makes an evaluation."""
    return table.at_start + (math.ceil(steps / table.every) if table.every else 1)


class EvalSchedule(Part):
    """The run's own evaluation and every `[[eval]]`, each when it is due and once per step."""

    name = "evals"
    changes_between_steps = True

    def __init__(
        self,
        config: Config,
        held_out: HeldOut,
        opened: Sequence[OpenEval],
        journal: Journal,
        budget: Budget,
        stop: threading.Event,
    ) -> None:
        self._config, self._training = config, config.training
        self._held_out, self._opened = held_out, opened
        self._journal, self._budget, self._stop = journal, budget, stop
        self._newest = Newest(config)
        self._falling = Falling()
        self._owes = False  # a stop came before the newest row had its evaluations

    def begin(self, loop: Loop) -> None:
        """Make those that an earlier attempt owes, or those that come before the first step."""
        if self._owes:
            if why := self._why_to_leave(loop.step):
                loop.leave(why)
            self._journal.complete(loop.step, self._of_step(loop).columns())
            self._owes = False
        if loop.step == 0:
            loop.leave_if_due(self.due(0), is_step=False)
            self._of_step(loop)

    def due(self, step: int) -> list[Due]:
        due = self._after(step, at_end=step >= self._training.max_steps)
        return [self._asked(evaluated) for evaluated in due if self._newest.of(evaluated.name, step) is None]

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Add the evaluations that are due; after a stop, the next attempt adds them."""
        self._falling.trained(taken.rollouts.mean_reward)
        why = self._why_to_leave(loop.step)
        if not why:
            try:
                return self._of_step(loop).added_to(row)
            except InterruptedRunError as error:
                why = str(error)
        self._owes, taken.leave_with = True, why
        return row

    def finish(self, loop: Loop) -> dict[str, Value]:
        """Make all of them; return their columns."""
        return self._of_step(loop, at_end=True).columns()

    def state_dict(self) -> StateDict:
        """Return the newest of each, so that a resumed run does not repeat them, and what falls."""
        falling = asdict(self._falling)
        return {"newest": self._newest.state_dict(), "falling": falling, "owes": self._owes}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; another version's evaluations are not used."""
        self._falling = record_of(Falling, state["falling"])
        self._newest.load_state_dict(state["newest"])
        self._owes = state["owes"]

    def _why_to_leave(self, step: int) -> str:
        """Return why the next attempt makes the evaluations that are due; "" if this one does."""
        due = self.due(step)
        if due and self._stop.is_set():  # they may take longer than this process has left
            return "its evaluations are left to the next attempt"
        return self._budget.why_to_stop(step, due, is_step=False)

    def _of_step(self, loop: Loop, *, at_end: bool = False) -> StepEvaluations:
        """Make those that come after the newest step, at a run's end all."""
        with self._budget.evaluating():
            made = {
                evaluated.name: self._made(loop, evaluated)
                for evaluated in self._after(loop.step, at_end=at_end)
            }
        own = made.get(self._held_out.name)
        return StepEvaluations(
            own if isinstance(own, Evaluation) else None,
            {name: one for name, one in made.items() if isinstance(one, NamedEvaluation)},
            self._falling.watch() if self._opened else None,
        )

    def _after(self, step: int, *, at_end: bool) -> Iterator[HeldOut | OpenEval]:
        """Iterate over the evaluations that come after so many steps; 0 is before the first."""
        for opened in self._opened:
            if at_end or (is_due(opened.table.every, step) if step else opened.table.at_start):
                yield opened
        if self._held_out.prompts and (at_end or (step > 0 and is_due(self._training.eval_every, step))):
            yield self._held_out

    def _asked(self, evaluated: HeldOut | OpenEval) -> Due:
        if isinstance(evaluated, HeldOut):
            return evaluated.due()
        table, longest = evaluated.table, evaluated.table.max_tokens or self._training.max_tokens
        played = as_played(self._config, table).environment
        return Due(table.name, evaluated.prompts, table.samples, longest, played, self._config)

    def _made(self, loop: Loop, evaluated: HeldOut | OpenEval) -> AnyEvaluation:
        """Return an evaluation, the newest if it is of this step; raise if more are due after a stop."""
        step = loop.step
        if newest := self._newest.of(evaluated.name, step):
            return newest
        self._journal.phase(f"evaluate {evaluated.name}".rstrip(), step)
        measured = (
            evaluated.evaluate(step) if isinstance(evaluated, HeldOut) else self._evaluate(evaluated, step)
        )
        self._newest.keep(evaluated.name, step, measured)
        self._budget.evaluated(self._asked(evaluated), Tokens(**measured.billed))
        loop.amend()  # a kill would cost it again
        if self._stop.is_set() and self.due(step):
            raise InterruptedRunError("a stop was requested between evaluations")
        return measured

    def _evaluate(self, opened: OpenEval, step: int) -> NamedEvaluation:
        table, started = opened.table, time.perf_counter()
        how = Sampling(
            group_size=table.samples,
            max_tokens=table.max_tokens or self._training.max_tokens,
            temperature=table.temperature,
        )
        place = (self._training.seed, step)
        with tally() as billed:
            groups = Stream(opened.sample, opened.prompts, how, place, table.name).groups()
        batch = opened.reward(groups, step)
        self._journal.evaluated(table.name, step, _outcomes(batch))
        known = np.flatnonzero(batch.scored.any(axis=1))
        rates = np.mean(batch.rewards[known] >= CORRECT, axis=1, where=batch.scored[known])
        asked = [batch.groups[number].prompt.id for number in known.tolist()]
        rewards = np.mean(batch.rewards[known], axis=1, where=batch.scored[known])
        scores = dict(zip(asked, map(float, rewards), strict=True))
        looks = count_of_evaluations(table, self._training.max_steps)
        self._falling.evaluated(table.name, step, scores, looks)
        found = _summary(batch, known, rewards, rates, table.samples, time.perf_counter() - started)
        return replace(found, billed=billed.by_kind())


def _outcomes(batch: ScoredBatch) -> dict[int, list[float | None]]:
    return {
        group.prompt.id: [None if np.isnan(reward) else float(reward) for reward in rewards]
        for group, rewards in zip(batch.groups, batch.rewards, strict=True)
    }


def _summary(
    batch: ScoredBatch, known: NDArray[np.int_], means: Floats, rates: Floats, samples: int, time_s: float
) -> NamedEvaluation:
    """Return an evaluation's figures, by each prompt's mean reward and share of right completions."""
    tries = (1, samples) if samples > 1 else ()
    passed = {str(k): each_pass_at_k(batch.rewards[known] >= CORRECT, k, batch.scored[known]) for k in tries}
    return NamedEvaluation(
        reward=float(np.mean(means)),
        reward_se=standard_error(means),
        correct_rate=float(np.mean(rates)),
        correct_rate_se=standard_error(rates),
        prompts=len(rates),
        reward_error_fraction=batch.error_fraction,
        reward_timeout_fraction=batch.timeout_fraction,
        pass_at={k: float(np.mean(each)) if len(each) else None for k, each in passed.items()},
        pass_at_se={k: standard_error(each) for k, each in passed.items()},
        time_s=time_s,
        billed={},
        unscored_fraction=batch.unscored_fraction,
    )


@dataclass(frozen=True)
class Seen:
    """An evaluation: each question's mean reward, and the training reward before it."""

    step: int
    scores: Mapping[str, float]  # by question; a text, since checkpoints are JSON
    reward: float  # mean of the last steps

    @property
    def score(self) -> float:
        return float(np.mean(list(self.scores.values())))


@dataclass
class Falling:
    """Compares each evaluation with the best one before it, question by question."""

    # the state of a checkpoint
    rewards: list[float] = field(default_factory=list)  # of the recent steps
    best: dict[str, Seen] = field(default_factory=dict)  # by evaluation
    falling: dict[str, str] = field(default_factory=dict)  # what fell, in words

    def trained(self, reward: float) -> None:
        """Take the mean reward of a step; the first one is that of the policy before all steps."""
        if not self.rewards:
            self.best = {name: replace(start, reward=reward) for name, start in self.best.items()}
        self.rewards = [*self.rewards, reward][-RECENT:]

    def evaluated(self, name: str, step: int, scores: Mapping[int, float], looks: int) -> None:
        """Take an evaluation, of the policy after the last step: one of so many that the run makes."""
        reward = float(np.mean(self.rewards[-WINDOW:])) if self.rewards else 0.0
        now = Seen(step, {str(question): score for question, score in scores.items()}, reward)
        best = self.best.setdefault(name, now)
        self.falling.pop(name, None)
        if now.score >= best.score:
            self.best[name] = now
        elif self._has_risen(best.reward, now.reward) and _is_worse(now, best, looks):
            self.falling[name] = (
                f"{name} fell from a reward of {best.score:.2f} at step {best.step} "
                f"to {now.score:.2f} at step {step}"
            )

    def _has_risen(self, before: float, now: float) -> bool:
        return now > before and now - before > RISEN * _noise(np.array(self.rewards))

    def watch(self) -> EvalWatch:
        """Return the evaluations that fall, in words."""
        return EvalWatch(falling="; ".join(self.falling.values()))


def _noise(rewards: Floats) -> float:
    """Return the standard deviation of the difference of two windows' mean rewards where nothing changes.

    With an autocorrelation of 0.9; of noise with less, neighbouring windows differ as much as distant ones.
    """
    if len(rewards) < TELLING:
        return FROM_STEPS * deviation(np.diff(rewards))
    return FROM_NEIGHBOURS * deviation(window_rises(rewards, WINDOW))


def _is_worse(now: Seen, best: Seen, looks: int) -> bool:
    """Whether the questions that both had cannot differ so by chance in any of so many looks."""
    from retrain.control.rules.sequential.rejection import (  # not at the top: 15 ms of each worker
        NORMAL,
        score,
    )

    gains = np.array([value - best.scores[q] for q, value in now.scores.items() if q in best.scores])
    limit = max(CERTAIN, -NORMAL.inv_cdf(ERROR / math.comb(max(looks, 2), 2)))
    return bool(gains.sum() < 0) and score(gains) > limit
