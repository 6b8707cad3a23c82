"""Evaluation on held-out prompts: greedy accuracy and pass@k, and what an evaluation may cost."""

from __future__ import annotations

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
from retrain.config.prices import Price
from retrain.config.schema import Config, EnvironmentSection
from retrain.control.rules import StateDict
from retrain.records.row_parts import Evaluation, NamedEvaluation
from retrain.records.spending import Tokens
from retrain.trainer.batch import ScoredBatch

EVALUATION_BATCH = 256  # prompts sampled at a time
AnyEvaluation: TypeAlias = Evaluation | NamedEvaluation
EVALUATION_STREAM = 0x6576616C  # keeps its random numbers apart from all others of the run


class Newest:
    """The newest evaluations of a run by name, "" for its own, so that none is made twice of a policy."""

    def __init__(self, config: Config) -> None:
        self._config_hash = config.run.config_hash if config.run else ""
        self._found: dict[
            str, tuple[int, str, AnyEvaluation]
        ] = {}  # after which step, of which configuration

    def of(self, name: str, step: int) -> AnyEvaluation | None:
        """Return the evaluation after `step` steps; None if it was not made, or of another configuration."""
        found = self._found.get(name)
        return found[2] if found and found[:2] == (step, self._config_hash) else None

    def keep(self, name: str, step: int, made: AnyEvaluation) -> None:
        """Keep an evaluation in place of an earlier one of its name."""
        self._found[name] = step, self._config_hash, made

    def state_dict(self) -> StateDict:
        return {
            name: {"step": step, "config_hash": config_hash, "evaluation": asdict(made)}
            for name, (step, config_hash, made) in self._found.items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned; another version's evaluations are not used."""
        for name, one in state.items():
            kind: type[AnyEvaluation] = NamedEvaluation if name else Evaluation
            if one["evaluation"].keys() == {field.name for field in fields(kind)}:
                self._found[name] = one["step"], one["config_hash"], kind(**one["evaluation"])


@dataclass(frozen=True)
class HeldOut:
    """The run's own evaluation, on prompts that it is not trained on; without prompts it is never made."""

    config: Config
    prompts: Sequence[Prompt]
    sample: Callable[[Sequence[Prompt], Sampling], list[Group]]
    reward: Callable[[Sequence[Group], int], ScoredBatch]
    name: ClassVar[str] = ""

    def due(self) -> Due:
        """Return what it asks for."""
        several = self.config.data.eval_samples
        samples, longest = 1 + (several if several > 1 else 0), self.config.training.max_tokens
        return Due(self.name, self.prompts, samples, longest, self.config.environment, self.config)

    def evaluate(self, step: int) -> Evaluation:
        """Evaluate the policy after `step` steps."""
        started, several = time.perf_counter(), self.config.data.eval_samples
        pass_at: dict[str, float | None] = {}
        with tally() as billed:
            greedy = self._scored(step, samples=1, temperature=0.0)
            if several > 1:
                sampled = self._scored(step, several, self.config.training.temperature)
                correct = sampled.rewards >= CORRECT
                pass_at = {str(k): pass_at_k(correct, k, sampled.scored) for k in (1, several)}
        return Evaluation(
            reward=float(greedy.known_rewards.mean()),
            correct_rate=greedy.correct_rate,
            prompts=len(self.prompts),
            reward_error_fraction=greedy.error_fraction,
            reward_timeout_fraction=greedy.timeout_fraction,
            pass_at=pass_at,
            time_s=time.perf_counter() - started,
            billed=billed.by_kind(),
            unscored_fraction=greedy.unscored_fraction,
        )

    def _scored(self, step: int, samples: int, temperature: float) -> ScoredBatch:
        training = self.config.training
        how = Sampling(group_size=samples, max_tokens=training.max_tokens, temperature=temperature)
        return self.reward(Stream(self.sample, self.prompts, how, (training.seed, step)).groups(), step)


@dataclass(frozen=True)
class Stream:
    """Samples all prompts of an evaluation, with random numbers of its own."""

    sample: Callable[[Sequence[Prompt], Sampling], list[Group]]
    prompts: Sequence[Prompt]
    how: Sampling
    place: tuple[int, int]  # seed of the run, and step: the same after a resume
    name: str = ""  # keeps it apart from other evaluations of the step

    def groups(self) -> list[Group]:
        """Return the groups of all prompts, in order."""
        every, starts = range(len(self.prompts)), range(0, len(self.prompts), EVALUATION_BATCH)
        parts = (self._in_parts(every[first : first + EVALUATION_BATCH]) for first in starts)
        return [group for part in parts for group in part]

    def _in_parts(self, numbers: range) -> list[Group]:
        """Sample; halve what does not fit in memory."""
        seed, step = self.place
        entropy = [EVALUATION_STREAM, seed % 2**32, step, numbers.start, *self.name.encode()]
        drawn = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        try:
            return self.sample(
                [self.prompts[n] for n in numbers], replace(self.how, seed=drawn, evaluates=True)
            )
        except BackendMemoryError:
            if len(numbers) == 1:
                raise
        half = len(numbers) // 2
        return self._in_parts(numbers[:half]) + self._in_parts(numbers[half:])


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
    each = each_pass_at_k(correct, k, scored)
    return float(np.mean(each)) if len(each) else None


def each_pass_at_k(correct: NDArray[np.bool_], k: int, scored: NDArray[np.bool_] | None = None) -> Floats:
    """Return `pass_at_k` of each prompt with enough scored samples."""
    prompts, samples = correct.shape
    if prompts == 0 or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {prompts} prompts x {samples} samples; needs 1 <= k <= samples")
    known = np.ones_like(correct) if scored is None else scored
    enough = known.sum(axis=1) >= k
    tries = known[enough].sum(axis=1)
    wrong = tries - (correct & known)[enough].sum(axis=1)
    drawn = np.arange(k)  # chance that k draws without replacement are all wrong
    all_wrong = np.prod(np.clip(wrong[:, None] - drawn, 0, None) / (tries[:, None] - drawn), axis=1)
    return np.asarray(1.0 - all_wrong)


def standard_error(values: Floats) -> float | None:
    """Return the standard error of a mean over questions; None below two.

    A question's samples are no independent draws of questions, so each question counts once, by its mean.

    Source: Miller 2024, arXiv:2411.00640, equations 1 and 4.
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None


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
        table, own = self.trained.training, self.trained.environment
        each_usd = rollout_usd * max(1.0, self.max_tokens / table.max_tokens)
        longest_usd = Tokens(sample=self.max_tokens).usd(price)
        if not rollout_usd:
            each_usd = longest_usd * (1 if self.played.is_single_turn else self.played.max_turns)
        elif self.played.is_single_turn:
            each_usd = min(each_usd, longest_usd)
        elif self.played != own:
            each_usd *= self.played.max_turns
        system = len(str(self.trained.backend.options.get("system_prompt", "")).encode())
        read = Tokens(prefill=sum(one.tokens_at_most + system for one in self.prompts)).usd(price)
        return self.samples * (read + len(self.prompts) * each_usd)
