"""Evaluations: the run's own and each `[[eval]]`, what they ask for, and what they may cost.

They change nothing that they measure: a run takes the same steps with them as without.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from retrain.backends import Sampling
from retrain.backends.metering import tally
from retrain.base.errors import BackendMemoryError
from retrain.base.rollouts import CORRECT, Floats, Group, Prompt
from retrain.config.campaign import EvalSection
from retrain.config.prices import Price
from retrain.config.resolve import as_played
from retrain.config.schema import Config, EnvironmentSection
from retrain.control.rules import StateDict
from retrain.records.row_parts import Evaluation, NamedEvaluation
from retrain.records.spending import Tokens
from retrain.trainer.batch import SampleGroups, ScoredBatch, mean_of
from retrain.trainer.step import is_due

EVALUATION_BATCH = 256  # prompts sampled at a time
EVALUATION_STREAM = 0x6576616C  # keeps its random numbers apart from all others of the run
AnyEvaluation: TypeAlias = Evaluation | NamedEvaluation
ScoreGroups: TypeAlias = Callable[[Sequence[Group], int], ScoredBatch]


@dataclass(frozen=True)
class Due:
    """An evaluation that is due."""

    name: str  # of its `[[eval]]`; "" for the run's own
    prompts: Sequence[Prompt]
    samples: int  # completions per prompt
    max_tokens: int
    played: EnvironmentSection
    trained: Config

    @property
    def size(self) -> str:
        """What it asks for, in words: another size costs something else."""
        turns = "" if self.played.is_single_turn else f", {self.played.max_turns} turns"
        read = sum(prompt.tokens_at_most for prompt in self.prompts)
        return (
            f"{len(self.prompts)} prompts of {read} bytes x {self.samples} x {self.max_tokens} tokens{turns}"
        )

    def at_most_usd(self, price: Price, rollout_usd: float) -> float:
        """Return what it costs if no completion is dearer than a rollout that a step also trained on.

        Where it allows more tokens or turns than a step, each completion may be as much dearer. Before the
        first step, with `rollout_usd` 0, each is as long as it may be; what further turns read is not known.
        """
        table, environment = self.trained.training, self.trained.environment
        each_usd = rollout_usd * max(1.0, self.max_tokens / table.max_tokens)
        longest_usd = Tokens(sample=self.max_tokens).usd(price)
        if not rollout_usd:
            each_usd = longest_usd * (1 if self.played.is_single_turn else self.played.max_turns)
        elif self.played.is_single_turn:
            each_usd = min(each_usd, longest_usd)
        elif self.played != environment:
            each_usd *= self.played.max_turns
        system = len(str(self.trained.backend.options.get("system_prompt", "")).encode())
        read = Tokens(prefill=sum(prompt.tokens_at_most + system for prompt in self.prompts)).usd(price)
        return self.samples * (read + len(self.prompts) * each_usd)


class Newest:
    """The newest evaluations of a run by name, "" for its own, so that none is made twice of a policy."""

    def __init__(self, config: Config) -> None:
        self._config_hash = config.run.config_hash if config.run else ""
        # with the step after which they were made, and the hash of the configuration
        self._evaluations: dict[str, tuple[int, str, AnyEvaluation]] = {}

    def of(self, name: str, step: int) -> AnyEvaluation | None:
        """Return the evaluation after `step` steps; None if it was not made, or of another configuration."""
        step_made, config_hash, evaluation = self._evaluations.get(name, (-1, "", None))
        return evaluation if (step_made, config_hash) == (step, self._config_hash) else None

    def keep(self, name: str, step: int, evaluation: AnyEvaluation) -> None:
        """Keep an evaluation in place of an earlier one of its name."""
        self._evaluations[name] = step, self._config_hash, evaluation

    def state_dict(self) -> StateDict:
        return {
            name: {"step": step, "config_hash": config_hash, "evaluation": asdict(evaluation)}
            for name, (step, config_hash, evaluation) in self._evaluations.items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; another version's evaluations are not used."""
        for name, entry in state.items():
            kind: type[AnyEvaluation] = NamedEvaluation if name else Evaluation
            if entry["evaluation"].keys() == {field.name for field in fields(kind)}:
                self._evaluations[name] = entry["step"], entry["config_hash"], kind(**entry["evaluation"])


@dataclass(frozen=True)
class HeldOut:
    """The run's own evaluation, on prompts that it is not trained on: greedy accuracy and pass@k."""

    config: Config
    prompts: Sequence[Prompt]
    score: ScoreGroups
    sample: SampleGroups
    name: ClassVar[str] = ""

    def is_due(self, step: int) -> bool:
        """Whether it comes after so many steps; 0 is before the first."""
        return step > 0 and is_due(self.config.training.eval_every, step)

    def due(self) -> Due:
        """Return what it asks for."""
        several = self.config.data.eval_samples
        samples, longest = 1 + (several if several > 1 else 0), self.config.training.max_tokens
        return Due(self.name, self.prompts, samples, longest, self.config.environment, self.config)

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

    @property
    def name(self) -> str:
        return self.table.name

    def is_due(self, step: int) -> bool:
        """Whether it comes after so many steps; 0 is before the first."""
        return is_due(self.table.every, step) if step else self.table.at_start

    def count(self, steps: int) -> int:
        """Return how often a run of so many steps makes it."""
        return self.table.at_start + (math.ceil(steps / self.table.every) if self.table.every else 1)

    def due(self) -> Due:
        """Return what it asks for."""
        table, played = self.table, as_played(self.config, self.table).environment
        longest = table.max_tokens or self.config.training.max_tokens
        return Due(table.name, self.prompts, table.samples, longest, played, self.config)

    def evaluate(self, step: int) -> tuple[NamedEvaluation, ScoredBatch]:
        """Evaluate the policy after `step` steps; return the completions as well."""
        table, training, started = self.table, self.config.training, time.perf_counter()
        how = Sampling(
            group_size=table.samples,
            max_tokens=table.max_tokens or training.max_tokens,
            temperature=table.temperature,
        )
        with tally() as billed:
            groups = sample_all(self.sample, self.prompts, how, (training.seed, step), table.name)
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
