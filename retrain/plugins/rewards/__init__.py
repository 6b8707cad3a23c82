"""Rewards: scores of completions, from their text alone.

A plugin is one file or folder with one of two functions, whose keyword-only parameters are the keys of
[reward.params]:

- `score(completion, prompt, *, <params>) -> float`, plain or a coroutine function; a second parameter named
  `answer` gets the text of the prompt's reference answer in place of the prompt. It may also return
  `(reward, {"name": number})`, or a `Score`, with numbers for the step's row. A function that cannot
  score a completion raises `UnscoredError`, or TimeoutError if another attempt might; the completion is then
  counted, but not used in training. Any other exception is a bug and stops the run.
- `open_scorer(*, <params>) -> BatchScorer`, for a reward that needs processes, connections or the whole
  batch; `score = score_with(open_scorer)` makes it callable for a single completion too.

A function with a parameter `completions` has TRL's signature: it is called once for many completions, with
`completions`, `prompts`, `completion_ids`, `trainer_state`, `log_metric`, `log_extra` and columns as
keywords, and returns a list: for each what `score` returns, or None if it is unscored.

A reward of 1 or more counts as correct. `check_params` checks more than the types of parameters. A constant
`RANGE = (0.0, 1.0)` declares the range of the rewards: a completion with a reward outside it is unscored. One
that ends at 1 also says that a completion with a reward of 1 is right, and any other one wrong.

A constant `PURE = True` declares that a score depends on nothing but its completion, the prompt and the
parameters: each rank of a run may then open the reward and score a part of the completions. The rewards that
it consists of must declare it too. A function with TRL's signature gets all completions nevertheless.

Not plugins, but shared: `opening` (a reward by name), `threads` and `pool` (of processes) score completions,
`parts` has the names of a reward's parts.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec

from retrain.base.errors import ConfigError, Problem
from retrain.base.event_loop import result_of
from retrain.base.registry import LARGEST, PluginSpec, lacking_problem
from retrain.base.rollouts import Parts, Prompt
from retrain.plugins.rewards.parts import part_name

P = ParamSpec("P")


class UnscoredError(Exception):
    """A completion cannot be scored; the message says why."""


class Outcome(StrEnum):
    """Outcome of scoring a completion; a wrong answer is SCORED."""

    SCORED = "scored"
    ERROR = "error"
    TIMEOUT = "timeout"
    FAULT = "fault"  # did what no solution does, such as a forbidden system call


@dataclass(frozen=True, slots=True)
class Score:
    """One completion's reward and outcome.

    `value` is None if the reward is unknown through no fault of the completion (such as a judge that
    did not answer): it is excluded from means and from training. A completion that makes its own check
    hang or fail gets 0, and is also counted as a timeout or an error. Whether its program ran into a limit
    of memory or files is counted apart from that.

    A completion without a value is `unjudged` if no attempt could give it one, such as by tests that cannot
    be run. Otherwise the scorer failed or timed out: an outage, which counts for `training.max_unscored`.

    `parts` are numbers beside the reward, by name: those that it consists of and others. Each becomes the
    column `reward_<name>` of the step's row, its mean over the completions that have it; None is unscored.
    """

    value: float | None
    outcome: Outcome = Outcome.SCORED
    message: str = ""
    is_over_limit: bool = False
    is_unjudged: bool = False
    parts: Parts = field(default_factory=dict)

    @property
    def is_outage(self) -> bool:
        """Whether it has no value, and another attempt might give it one."""
        return self.value is None and not self.is_unjudged

    @property
    def sign(self) -> str:
        """What its completion did that may be a sign of cheating; "" if nothing."""
        if self.outcome is Outcome.FAULT:
            return f"broke a rule of the sandbox: {self.message}"
        if self.is_over_limit:
            return "ran out of memory or files"
        return "took too long" if self.outcome is Outcome.TIMEOUT and self.value is not None else ""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far a run is, by the names of `transformers.TrainerState`."""

    global_step: int = 0  # complete steps of the run; in an evaluation, those of the policy
    max_steps: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """A completion to score, and its prompt with the reference answer."""

    completion: str
    prompt: Prompt
    tokens: tuple[int, ...] = ()  # of the completion, its end token included; empty if not known
    state: TrainerState = TrainerState()


class BatchScorer(ABC):
    """Scores many completions at once; used by one thread at a time.

    A class of your own needs not derive from it, but only one that does has more than the two methods.
    """

    sandbox: str = ""  # name of the sandbox where it runs programs of the policy
    uses_all_cores: bool = False  # so that further processes of its machine would not score sooner

    @property
    def scored(self) -> int | None:
        """How many completions are done, of all calls together; None if not known. From any thread."""
        return None

    @abstractmethod
    def score_all(self, answers: Sequence[Answer]) -> list[Score] | Awaitable[list[Score]]:
        """Score every completion, in order."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release processes and connections; safe to call twice."""


class RewardPlugin:
    """What the file of a reward may define beside `score`, each as here without it.

    `params` is the table `[reward.params]`.
    """

    @staticmethod
    def open_scorer(**params: Any) -> BatchScorer:
        """Return a scorer, in place of `score`; its keyword-only parameters are the keys of the table."""
        raise NotImplementedError

    @staticmethod
    def check_params(params: Mapping[str, Any]) -> Iterable[Problem | str]:
        """Return the problems of the table, each as `key: what is wrong`."""
        return ()

    @staticmethod
    def advise_params(params: Mapping[str, Any]) -> Iterable[str]:
        """Return warnings for `explain`, one line each."""
        return ()

    @staticmethod
    def made_of(params: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]] | None:
        """Return the name and table of each reward that it consists of; None: of no others."""
        return None

    @staticmethod
    def part_weights(params: Mapping[str, Any]) -> Mapping[str, float]:
        """Return the weight of each of `Score.parts` that the reward is the sum of; none: it has no parts."""
        return {}

    @staticmethod
    def outcome(params: Mapping[str, Any]) -> str:
        """Return the name of the part that is 1 for a right completion; "": RANGE says it of the reward."""
        return ""

    @staticmethod
    def servers(params: Mapping[str, Any]) -> Mapping[str, str]:
        """Return the address of each server that must answer before a run, with the key that names it."""
        return {}


SPEC = PluginSpec(
    "reward",
    "score",
    ("completion", "prompt"),
    members=("score_all", "close"),  # of what `open_scorer` returns
    returns=BatchScorer,
    functions=RewardPlugin,
    judge="check_params",
    by_name="completions",
    by_name_given=(
        *("completions", "prompts", "completion_ids", "trainer_state", "answer"),
        *("log_metric", "log_extra"),
    ),
    opener="open_scorer",
)


def is_number(value: object) -> bool:
    """Whether a value is a finite number; true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def number_of(reward: object) -> float:
    """Return a reward as a float; true is 1. A TypeError is meant to follow "the reward"."""
    if isinstance(reward, str | bytes | bytearray) or not hasattr(reward, "__float__"):
        raise TypeError(
            "must be a number; got None: does the function end without `return`?"
            if reward is None
            else f"must be a number; got {reward!r:.80}"
        )
    try:
        return float(reward)
    except (TypeError, ValueError, OverflowError) as error:  # such as of an array of several
        raise TypeError(f"must be a number; got {reward!r:.80}") from error


def score_of(reward: object) -> Score:
    """Return what a function returned for a completion as its score; a TypeError as of `number_of`."""
    if isinstance(reward, Score):
        value = None if reward.value is None else number_of(reward.value)
        return replace(reward, value=value, parts=numbers_of(reward.parts))
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], Mapping):
        return Score(number_of(reward[0]), parts=numbers_of(reward[1]))
    return Score(number_of(reward))


def numbers_of(parts: Mapping[Any, Any]) -> Parts:
    """Return the parts of a reward with floats as values; a TypeError as of `number_of`."""
    numbers: dict[str, float | None] = {}
    for name, value in parts.items():
        try:
            numbers[name] = None if value is None else number_of(value)
        except TypeError as error:
            raise TypeError(f"has a part {name!r:.80}, which {error}") from error
    return numbers


class MetricLog:
    """What a function of TRL's signature logs in one call, by TRL's functions."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def log_metric(self, name: str, value: object) -> None:
        """Keep a number, a part of each completion of the call; several of a name become their mean."""
        try:
            self._values.setdefault(part_name(name), []).append(number_of(value))
        except TypeError as error:
            raise TypeError(f"log_metric({name!r:.80}, ...): the value {error}") from error

    def log_extra(self, column: str, values: object) -> None:
        """Accept a column of TRL's table of completions, which no file here has."""

    def added_to(self, score: Score) -> Score:
        """Return a completion's score with the means of what was logged beside its own parts."""
        if not self._values:
            return score
        means = {name: sum(values) / len(values) for name, values in self._values.items()}
        return replace(score, parts={**means, **score.parts})


def one_each(given: Any, completions: int) -> Sequence[Any]:
    """Return what a function returned for completions: a reward for each; a TypeError as of `number_of`."""
    try:
        count = len(given)
    except TypeError as error:  # also of an array without dimensions
        raise TypeError(f"returned {given!r:.80}, not a list of rewards") from error
    if count != completions:
        raise TypeError(f"returned {count} rewards for {completions} completions")
    rewards: Sequence[Any] = given
    return rewards


def score_with(open_scorer: Callable[P, BatchScorer]) -> Callable[Concatenate[str, Prompt, P], float]:
    """Return a function that opens a scorer for a single completion; its parameters are the opener's."""

    def score(completion: str, prompt: Prompt, *args: P.args, **params: P.kwargs) -> float:
        """Return the reward of one completion.

        Raises:
            ConfigError: the scorer cannot be opened.
            RunFailedError: a retry would fail in the same way.
            TimeoutError: scoring took too long.
            UnscoredError: the reward is unknown.
        """
        scorer = open_scorer(*args, **params)
        try:
            (found,) = result_of(scorer.score_all([Answer(completion, prompt)]))
        finally:
            scorer.close()
        if found.outcome is Outcome.TIMEOUT:
            raise TimeoutError(found.message)
        if found.value is None or found.outcome is Outcome.ERROR:
            raise UnscoredError(found.message)
        return found.value

    keys = inspect.signature(open_scorer).parameters.values()
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in SPEC.arguments]
    score.__signature__ = inspect.Signature([*first, *keys])  # type: ignore[attr-defined]
    return score  # type: ignore[return-value]  # its first two arguments may be named, too


def call_for_one(function: Callable[..., Any], answer: Answer, params: Mapping[str, Any]) -> Any:
    """Return what a function returns for a completion and its prompt, or the answer if it names that."""
    reference = answer.prompt.answer if _names_answer(function) else answer.prompt
    return function(answer.completion, reference, **params)


@lru_cache
def _names_answer(function: Callable[..., Any]) -> bool:
    try:
        return list(inspect.signature(function).parameters)[1:2] == ["answer"]
    except (TypeError, ValueError):  # written in C
        return False


def call_with_columns(
    function: Callable[..., Any], answers: Sequence[Answer], params: Mapping[str, Any], log: MetricLog
) -> Any:
    """Return what a function returns for the names in `SPEC.by_name_given` and the columns of prompts' rows.

    It gets all of them if it takes any keyword, else those that it names, and `params`.

    Raises:
        ConfigError: it needs a column that the task has not.
    """
    prompts = [answer.prompt for answer in answers]
    shared = set(prompts[0].row).intersection(*(prompt.row for prompt in prompts))
    arguments = {  # as TRL passes them, one value per completion, messages in the form that TRL has for them
        "answer": [prompt.answer for prompt in prompts],
        **{name: [prompt.row[name] for prompt in prompts] for name in shared},
        "completion_ids": [list(answer.tokens) for answer in answers],
        "trainer_state": answers[0].state,
        "log_metric": log.log_metric,
        "log_extra": log.log_extra,
        "prompts": [_said(prompt, prompt.messages, prompt.text) for prompt in prompts],
        "completions": [_said(a.prompt, [("assistant", a.completion)], a.completion) for a in answers],
        **params,
    }
    if wrong := lacking_problem(function, arguments):
        raise ConfigError(f"the reward {wrong}")
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return function(**arguments)
    return function(**{p.name: arguments[p.name] for p in parameters if p.name in arguments})


def _said(prompt: Prompt, messages: Iterable[tuple[str, str]], text: str) -> list[dict[str, str]] | str:
    return [{"role": role, "content": said} for role, said in messages] if prompt.messages else text
