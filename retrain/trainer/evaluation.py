"""Evaluations: the run's own and each `[[eval]]`, when they are made, and which of them fall.

They change nothing that they measure: a run takes the same steps with them as without.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Sampling
from retrain.backends.metering import tally
from retrain.base.errors import BackendMemoryError, InterruptedRunError
from retrain.base.rollouts import CORRECT, Floats, Group, Prompt
from retrain.config.resolve import as_played, longest_played
from retrain.config.schema import Config, EvalSection
from retrain.control.rules import StateDict
from retrain.control.rules.signs import deviation, window_rises
from retrain.records.files import record_of
from retrain.records.row_parts import Evaluation, EvalWatch, NamedEvaluation, Value, columns
from retrain.records.samples import Rewards
from retrain.records.spending import Tokens
from retrain.records.step_row import StepRow
from retrain.trainer.batch import SampleGroups, ScoredBatch, mean_of
from retrain.trainer.budget import Budget
from retrain.trainer.journal import Journal, choose_held_out
from retrain.trainer.part import Due, Loop, Part, TakenStep, is_due
from retrain.trainer.starts import Starts

EVALUATION_BATCH = 256  # prompts sampled at a time
EVALUATION_STREAM = 0x6576616C  # keeps its random numbers apart from all others of the run
AnyEvaluation: TypeAlias = Evaluation | NamedEvaluation
ScoreGroups: TypeAlias = Callable[[Sequence[Group], int], ScoredBatch]


@dataclass(frozen=True)
class HeldOut:
    """The run's own evaluation, on prompts that it is not trained on: greedy accuracy and pass@k."""

    config: Config
    prompts: Sequence[Prompt]
    score: ScoreGroups
    sample: SampleGroups
    name: ClassVar[str] = ""

    def is_due(self, step: int) -> bool:
        if not step:
            return self.config.evaluates_at_start()
        return is_due(self.config.training.eval_every, step)

    def due(self) -> Due:
        several = self.config.data.eval_samples
        samples, longest = 1 + (several if several > 1 else 0), self.config.training.max_tokens
        return Due(self.name, self.prompts, samples, longest, longest_played(self.config), self.config)

    def evaluate(self, step: int) -> tuple[Evaluation, ScoredBatch]:
        """Evaluate the policy after `step` steps; return the greedy completions as well."""
        started, several = time.perf_counter(), self.config.data.eval_samples
        pass_at: dict[str, float | None] = {}
        with tally() as billed:
            greedy = self._scored(step, samples=1, temperature=0.0)
            if several > 1:
                sampled = self._scored(step, several, self.config.training.temperature)
                correct = sampled.rewards >= CORRECT
                pass_at = {str(k): pass_at_k(correct, k, sampled.scored) for k in (1, several)}
        evaluation = Evaluation(
            reward=mean_of(greedy.known_rewards),
            correct_rate=greedy.correct_rate,
            prompts=len(self.prompts),
            reward_error_fraction=greedy.error_fraction,
            reward_timeout_fraction=greedy.timeout_fraction,
            pass_at=pass_at,
            time_s=time.perf_counter() - started,
            billed=billed.by_kind(),
            unscored_fraction=greedy.unscored_fraction,
            sources={name: mean_of(part.known_rewards) for name, part in greedy.by_source.items()},
            parts=greedy.part_means,
            parts_unscored=greedy.parts_unscored,
        )
        return evaluation, greedy

    def _scored(self, step: int, samples: int, temperature: float) -> ScoredBatch:
        training = self.config.training
        how = Sampling(group_size=samples, max_tokens=training.max_tokens, temperature=temperature)
        return self.score(sample_all(self.sample, self.prompts, how, (training.seed, step)), step)


@dataclass(frozen=True)
class OpenEval:
    """An `[[eval]]` that is ready: its table, its held-out prompts, its reward and how they are sampled."""

    config: Config
    table: EvalSection
    prompts: Sequence[Prompt]
    score: ScoreGroups
    sample: SampleGroups  # completions, or whole episodes
    further: Sequence[Prompt] = ()  # that `[decision]` has asked as well at a run's end
    is_last: bool = False  # it is made at a run's end

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def asked(self) -> Sequence[Prompt]:
        return [*self.prompts, *self.further] if self.is_last else self.prompts

    @property
    def questions(self) -> int | None:
        """How many it asks instead of its table's; None if it asks these."""
        return len(self.asked) if self.is_last and self.further else None

    def is_due(self, step: int) -> bool:
        """Whether it comes after so many steps; 0 is before the first."""
        return is_due(self.table.every, step) if step else self.config.evaluates_at_start(self.table)

    def count(self, steps: int) -> int:
        """Return how often a run of so many steps makes it."""
        later = math.ceil(steps / self.table.every) if self.table.every else 1
        return self.config.evaluates_at_start(self.table) + later

    def due(self) -> Due:
        table, played = self.table, longest_played(self.config)
        if table.environment or table.task:
            played = as_played(self.config, table).environment
        longest = table.max_tokens or self.config.training.max_tokens
        return Due(table.name, self.asked, table.samples, longest, played, self.config)

    def evaluate(self, step: int) -> tuple[NamedEvaluation, ScoredBatch]:
        """Evaluate the policy after `step` steps; return the completions as well."""
        table, training, started = self.table, self.config.training, time.perf_counter()
        how = Sampling(
            group_size=table.samples,
            max_tokens=table.max_tokens or training.max_tokens,
            temperature=table.temperature,
        )
        with tally() as billed:
            groups = sample_all(self.sample, self.asked, how, (training.seed, step), table.name)
        batch = self.score(groups, step)
        correct = batch.rewards >= CORRECT
        means, rates = batch.mean_by_group(batch.rewards), batch.mean_by_group(correct)
        tries = (1, table.samples) if table.samples > 1 else ()
        passed = {str(k): each_pass_at_k(correct, k, batch.scored) for k in tries}
        evaluation = NamedEvaluation(
            reward=mean_of(means),
            reward_se=standard_error(means),
            correct_rate=mean_of(rates),
            correct_rate_se=standard_error(rates),
            prompts=len(rates),
            reward_error_fraction=batch.error_fraction,
            reward_timeout_fraction=batch.timeout_fraction,
            pass_at={k: mean_of(each) for k, each in passed.items()},
            pass_at_se={k: standard_error(each) for k, each in passed.items()},
            time_s=time.perf_counter() - started,
            billed=billed.by_kind(),
            unscored_fraction=batch.unscored_fraction,
            parts=batch.part_means,
            parts_unscored=batch.parts_unscored,
            questions=self.questions,
        )
        return evaluation, batch


def sample_all(
    sample: SampleGroups, prompts: Sequence[Prompt], how: Sampling, place: tuple[int, int], name: str = ""
) -> list[Group]:
    """Return the groups of all prompts of an evaluation, sampled with random numbers of its own.

    Args:
        place: the run's seed and the step: the same after a resume.
        name: keeps it apart from other evaluations of the step.
    """

    def in_parts(numbers: range) -> list[Group]:
        """Sample; halve what does not fit in memory."""
        seed, step = place
        entropy = [EVALUATION_STREAM, seed % 2**32, step, numbers.start, *name.encode()]
        drawn = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        try:
            return sample([prompts[n] for n in numbers], replace(how, seed=drawn, evaluates=True))
        except BackendMemoryError:
            if len(numbers) == 1:
                raise
        half = len(numbers) // 2
        return in_parts(numbers[:half]) + in_parts(numbers[half:])

    numbers, starts = range(len(prompts)), range(0, len(prompts), EVALUATION_BATCH)
    parts = (in_parts(numbers[first : first + EVALUATION_BATCH]) for first in starts)
    return [group for part in parts for group in part]


def pass_at_k(correct: NDArray[np.bool_], k: int, scored: NDArray[np.bool_] | None = None) -> float | None:
    """Return an unbiased estimate of the chance that at least one of k completions is right.

    Args:
        correct: shape (prompts, samples), whether each completion is right.
        k: completions per try, from 1 to the number of samples.
        scored: same shape, whether each was scored; None: all were. Unscored ones do not count.

    Returns:
        The mean over prompts of 1 - C(n - c, k) / C(n, k), with c of n scored samples right; prompts with
        fewer than k scored samples are left out. None if no prompt is left.

    Raises:
        ValueError: there are no prompts, or fewer samples than k.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1; the product keeps large n from overflowing.
    """
    return mean_of(each_pass_at_k(correct, k, scored))


def each_pass_at_k(correct: NDArray[np.bool_], k: int, scored: NDArray[np.bool_] | None = None) -> Floats:
    """Return `pass_at_k` of each prompt with enough scored samples."""
    prompts, samples = correct.shape
    if prompts == 0 or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {prompts} prompts x {samples} samples; needs 1 <= k <= samples")
    counts = np.ones_like(correct) if scored is None else scored
    enough = counts.sum(axis=1) >= k
    tries = counts[enough].sum(axis=1)
    wrong = tries - (correct & counts)[enough].sum(axis=1)
    drawn = np.arange(k)  # chance that k draws without replacement are all wrong
    all_wrong = np.prod(np.clip(wrong[:, None] - drawn, 0, None) / (tries[:, None] - drawn), axis=1)
    return np.asarray(1.0 - all_wrong)


def standard_error(values: Floats) -> float | None:
    """Return the standard error of a mean over questions; None below two.

    A question's samples are no independent draws of questions, so each question counts once, by its mean.

    Source: Miller 2024, arXiv:2411.00640, equations 1 and 4.
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


class EvalSchedule(Part):
    """The run's own evaluation and every `[[eval]]`, each when it is due and once per step."""

    name = "evals"
    changes_between_steps = True

    def __init__(
        self,
        config: Config,
        evaluators: Sequence[HeldOut | OpenEval],
        journal: Journal,
        budget: Budget,
        stop: threading.Event,
        starts: Starts,
    ) -> None:
        self._max_steps, self._evaluators = config.training.max_steps, evaluators
        self._journal, self._budget, self._stop, self._starts = journal, budget, stop, starts
        self._config_hash, self._kept = (
            config.run.config_hash if config.run else "",
            config.logging.samples_per_step,
        )
        # by name, with the step after which they were made, so that none is made twice of a policy
        self._newest: dict[str, tuple[int, AnyEvaluation]] = {}
        self._falling = Falling()
        self._owes = False  # a stop came before the newest row had its evaluations

    def begin(self, loop: Loop) -> None:
        """Make those that an earlier attempt owes, or those that come before the first step."""
        if self._owes:
            if why := self._why_to_leave(loop):
                loop.leave(why)
            self._journal.complete(loop.step, self._columns(loop))
            self._owes = False
        if loop.step == 0:
            for evaluator in self._after(0):
                if self._made(evaluator, 0) is None:
                    self._start(loop, evaluator)

    def _start(self, loop: Loop, evaluator: HeldOut | OpenEval) -> None:
        """Make an evaluation before the first step, or take that of a run which starts alike."""
        name = evaluator.name

        def waiting() -> None:
            self._journal.phase(f"wait for another run to evaluate {name}".rstrip(), 0)

        began_s = time.perf_counter()
        with self._starts.turn(name, self._stop, waiting) as record:
            if record is None:
                loop.leave_if_due([evaluator.due()], is_step=False)
                with self._budget.evaluating():
                    self._evaluation(loop, evaluator)
                return
            kind: type[AnyEvaluation] = NamedEvaluation if name else Evaluation
            outcomes = {int(question): rewards for question, rewards in record.outcomes.items()}
            scores = {int(question): score for question, score in record.scores.items()}
            evaluation = kind(**record.evaluation)
            self._budget.evaluated(evaluator.due(), Tokens(**evaluation.billed))
            taken = replace(evaluation, billed={}, time_s=time.perf_counter() - began_s)
            self._take(loop, evaluator, taken, outcomes, scores, record.run)

    def due(self, loop: Loop, step: int) -> list[Due]:
        is_over = loop.is_over(step)
        coming = self._after(step, at_end=is_over, is_over=is_over)
        return [evaluator.due() for evaluator in coming if self._made(evaluator, step) is None]

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        """Add the evaluations that are due; after a stop, the next attempt adds them."""
        self._falling.trained(taken.rollouts.mean_reward)
        why = self._why_to_leave(loop)
        if not why:
            try:
                return replace(row, **self._of_step(loop))
            except InterruptedRunError as error:
                why = str(error)
        self._owes, taken.leave_with = True, why
        return row

    def finish(self, loop: Loop) -> dict[str, Value]:
        return self._columns(loop, at_end=True)

    def state_dict(self) -> StateDict:
        newest = {
            name: {"step": step, "config_hash": self._config_hash, "evaluation": asdict(evaluation)}
            for name, (step, evaluation) in self._newest.items()
        }
        return {"newest": newest, "falling": asdict(self._falling), "owes": self._owes}

    def load_state_dict(self, state: StateDict) -> None:
        self._falling = record_of(Falling, state["falling"])
        self._owes = state["owes"]
        for name, entry in state["newest"].items():
            kind: type[AnyEvaluation] = NamedEvaluation if name else Evaluation
            is_alike = entry["evaluation"].keys() == {field.name for field in fields(kind)}  # of this version
            if is_alike and entry["config_hash"] == self._config_hash:
                self._newest[name] = entry["step"], kind(**entry["evaluation"])

    def _made(self, evaluator: HeldOut | OpenEval, step: int) -> AnyEvaluation | None:
        """Return the evaluation after `step` steps; None if it was not made, or asked fewer or more."""
        step_made, evaluation = self._newest.get(evaluator.name, (-1, None))
        if isinstance(evaluator, OpenEval) and isinstance(evaluation, NamedEvaluation):
            evaluation = evaluation if evaluation.questions == evaluator.questions else None
        return evaluation if step_made == step else None

    def _why_to_leave(self, loop: Loop) -> str:
        """Return why the next attempt makes the evaluations that are due; "" if this one does."""
        due = self.due(loop, loop.step)
        if due and self._stop.is_set():  # they may take longer than this process has left
            return "its evaluations are left to the next attempt"
        return self._budget.why_to_stop(loop.step, due, is_step=False)

    def _columns(self, loop: Loop, *, at_end: bool = False) -> dict[str, Value]:
        parts = self._of_step(loop, at_end=at_end).values()
        return {key: value for part in parts for key, value in columns(part).items()}

    def _of_step(self, loop: Loop, *, at_end: bool = False) -> dict[str, Any]:
        """Make those after the newest step, at a run's end all; return their parts of the step's row."""
        with self._budget.evaluating():
            evaluations = {
                evaluator.name: self._evaluation(loop, evaluator)
                for evaluator in self._after(loop.step, at_end=at_end, is_over=loop.is_over(loop.step))
            }
        has_evals = any(evaluator.name for evaluator in self._evaluators)
        return {
            "evaluation": evaluations.pop(HeldOut.name, None),
            "evals": evaluations,
            "eval_watch": self._falling.watch() if has_evals else None,
        }

    def _after(
        self, step: int, *, at_end: bool = False, is_over: bool = False
    ) -> Iterator[HeldOut | OpenEval]:
        """Iterate over those that come after so many steps, at a run's end all.

        Args:
            is_over: after the last step, whether with its row or with the run's end.
        """
        for evaluator in self._evaluators:
            if at_end or evaluator.is_due(step):
                yield replace(evaluator, is_last=is_over) if isinstance(evaluator, OpenEval) else evaluator

    def _evaluation(self, loop: Loop, evaluator: HeldOut | OpenEval) -> AnyEvaluation:
        """Return an evaluation, the newest if it is of this step; raise if more are due after a stop."""
        name, step = evaluator.name, loop.step
        if evaluation := self._made(evaluator, step):
            return evaluation
        self._journal.phase(f"evaluate {name}".rstrip(), step)
        evaluation, batch = evaluator.evaluate(step)
        outcomes: Rewards = {}
        scores: dict[int, float] = {}
        if isinstance(evaluator, OpenEval):
            outcomes = batch.outcomes()
            questions = [batch.groups[number].prompt.id for number in batch.scored_groups.tolist()]
            scores = dict(zip(questions, batch.mean_by_group(batch.rewards).tolist(), strict=True))
        if step == 0:
            self._starts.share(name, evaluation, outcomes, scores)
            self._budget.ledger.leave_out(Tokens(**evaluation.billed))
        self._budget.evaluated(evaluator.due(), Tokens(**evaluation.billed))
        self._journal.held_out(step, choose_held_out(batch, name, self._kept))
        self._take(loop, evaluator, evaluation, outcomes, scores)
        if self._stop.is_set() and self.due(loop, step):
            raise InterruptedRunError("a stop was requested between evaluations")
        return evaluation

    def _take(
        self,
        loop: Loop,
        evaluator: HeldOut | OpenEval,
        evaluation: AnyEvaluation,
        outcomes: Rewards,
        scores: Mapping[int, float],
        maker: str = "",
    ) -> None:
        """Record an evaluation of the newest step, made by this run or by another."""
        name, step = evaluator.name, loop.step
        if isinstance(evaluator, OpenEval):
            self._journal.evaluated(name, step, outcomes, maker)
            own = {prompt.id for prompt in evaluator.prompts}  # which all evaluations share
            shared = {question: score for question, score in scores.items() if question in own}
            is_first = name not in self._newest or self._newest[name][0] != step
            if shared and is_first:
                self._falling.evaluated(name, step, shared, evaluator.count(self._max_steps))
        if step == 0:
            self._starts.keep(name, evaluation, maker)
        self._newest[name] = step, evaluation
        loop.amend()  # a kill would cost it again


WINDOW = 10  # steps whose mean reward is that of an evaluation's policy
RECENT = 320  # steps whose rewards are kept
TELLING = 60  # steps that show how much such a mean varies; fewer show how much each differs from the next
FROM_NEIGHBOURS, FROM_STEPS = 1.46, 2.7  # of distant windows over these, at an autocorrelation of 0.9
RISEN = 3.0  # standard deviations of the reward's rise
CERTAIN = 3.0  # normal score of Student's t, at least: the best of many evaluations is partly luck
ERROR = 0.05  # probability that any of a run's evaluations seems to fall, which all pairs of them share


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
    """Compares each evaluation with the best one before it, question by question.

    One that falls while the reward rises is a sign that the policy exploits its reward.
    """

    # the state of a checkpoint
    rewards: list[float] = field(default_factory=list)  # of the recent steps
    best: dict[str, Seen] = field(default_factory=dict)  # by evaluation
    falling: dict[str, str] = field(default_factory=dict)  # what fell, in words

    def trained(self, reward: float | None) -> None:
        """Take the mean reward of a step, if known; the first is that of the policy before all steps."""
        if reward is None:
            return
        if not self.rewards:
            self.best = {name: replace(start, reward=reward) for name, start in self.best.items()}
        self.rewards = [*self.rewards, reward][-RECENT:]

    def evaluated(self, name: str, step: int, scores: Mapping[int, float], looks: int) -> None:
        """Take an evaluation, of the policy after the last step: one of so many that the run makes."""
        reward = float(np.mean(self.rewards[-WINDOW:])) if self.rewards else 0.0
        newest = Seen(step, {str(question): score for question, score in scores.items()}, reward)
        best = self.best.setdefault(name, newest)
        rise = newest.reward - best.reward
        self.falling.pop(name, None)
        if newest.score >= best.score:
            self.best[name] = newest
        elif rise > 0 and rise > RISEN * _noise(np.array(self.rewards)) and _is_worse(newest, best, looks):
            self.falling[name] = (
                f"{name} fell from a reward of {best.score:.2f} at step {best.step} "
                f"to {newest.score:.2f} at step {step}"
            )

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


def _is_worse(newest: Seen, best: Seen, looks: int) -> bool:
    """Whether the questions that both had cannot differ so by chance in any of so many looks."""
    # not at the top: 15 ms of each worker
    from retrain.control.rules.sequential import NORMAL, score

    gains = np.array([value - best.scores[q] for q, value in newest.scores.items() if q in best.scores])
    limit = max(CERTAIN, -NORMAL.inv_cdf(ERROR / math.comb(max(looks, 2), 2)))
    return bool(gains.sum() < 0) and score(gains) > limit
