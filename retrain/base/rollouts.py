"""The data of a training step, from task to backend to reward to loss.

Frozen and independent of any backend: a token sequence is a tuple of ints everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # planning reads prompts only, and numpy takes a tenth of a second to import
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Ints: TypeAlias = NDArray[np.int64]
else:
    Floats = Ints = Any


CORRECT = 1.0 - 1e-9  # a reward of 1, up to rounding
Messages: TypeAlias = tuple[tuple[str, str], ...]  # (role, content) of each
Parts: TypeAlias = Mapping[str, float | None]  # numbers beside a reward, by name; None is unscored


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: the policy's input, and the answer that a reward compares with."""

    id: int  # stable within its task, for the data cursor and the held-out split
    text: str
    answer: str
    # (role, content) of each message before the completion, for a chat template; empty: only `text`
    messages: Messages = ()
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)  # columns of its data, for a reward
    tools: str = ""  # JSON schemas of functions that a chat template shows besides the messages
    ids: tuple[int, ...] = ()  # token ids in place of text and messages, from a program that renders itself
    source: str = ""  # name of the `[[data.source]]` that it comes from, where there are several

    @property
    def tokens_at_most(self) -> int:
        """A token for each byte, of a prompt that is not given as tokens."""
        texts = [content for _, content in self.messages] or [self.text]
        return len(self.ids) or sum(len(text.encode()) for text in (*texts, self.tools))

    def hinted(self, template: str, feedback: str = "") -> Prompt:
        """Return the prompt with a template around its text; in a talk, around the user's last."""
        fill = partial(template.format, answer=self.answer, feedback=feedback)
        if not self.messages:
            return replace(self, text=fill(prompt=self.text))
        asks = [number for number, (role, _) in enumerate(self.messages) if role == "user"]
        last = asks[-1] if asks else len(self.messages) - 1
        role, content = self.messages[last]
        message = role, fill(prompt=content)
        return replace(self, messages=(*self.messages[:last], message, *self.messages[last + 1 :]))

    @property
    def in_json(self) -> list[Any]:
        """What code of a user's in another process gets of it, for `prompt_of` there."""
        return [self.id, self.text, self.answer, self.messages, dict(self.row), self.source]

    @property
    def shown(self) -> str:
        """The prompt as people read it: the functions by their parameters, and who said what."""
        functions = [tool["function"] for tool in json.loads(self.tools or "[]")]
        lines = [f"function {one['name']}({', '.join(_parameters(one))})" for one in functions]
        if not self.messages:
            return "\n".join([*lines, self.text])
        return "\n".join([*lines, *(f"{role}: {content}" for role, content in self.messages)])


def _parameters(function: Mapping[str, Any]) -> Iterable[str]:
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else ()


def prompt_of(
    number: int,
    text: str,
    answer: str,
    messages: Sequence[Sequence[str]],
    row: Mapping[str, Any],
    source: str,
) -> Prompt:
    """Return the prompt of which another process was told, in JSON."""
    conversation = tuple((role, content) for role, content in messages)
    return Prompt(number, text, answer, conversation, row, source=source)


def as_prompt(messages: Messages, answer: str) -> tuple[str, str, Messages]:
    """Return a prompt's text, answer and messages; a user's only message is a prompt like any other."""
    if len(messages) == 1 and messages[0][0] == "user":
        return messages[0][1], answer, ()
    return json.dumps(messages, ensure_ascii=False), answer, messages


def next_prompt(prompt: Prompt, said: Messages, *, has_template: bool) -> Prompt:
    """Return a prompt that continues a task's conversation; without a template, texts follow each other."""
    if not has_template:
        return replace(prompt, text="".join(content for _, content in said), messages=())
    text, _, messages = as_prompt(said, prompt.answer)
    return replace(prompt, text=text, messages=messages)


@dataclass(frozen=True, slots=True)
class Given:
    """Tokens that an environment put into a rollout: the context of later tokens, never trained on."""

    at: int  # number of sampled tokens before them
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Episode:
    """What an environment made of a rollout."""

    rewards: tuple[float | None, ...] = ()  # of each turn; None: not given
    reward: float | None = None  # of the episode; None: `[reward]` scores the last turn
    parts: Parts = field(default_factory=dict)  # beside the reward
    error: str = ""  # why it failed, "" if it did not
    timed_out: bool = False  # the failure is a call that took too long
    retries: int = 0  # 1: it was played again, because what it shared with others ended
    time_s: float = 0.0
    environment_s: float = 0.0  # part of it that was spent in the environment
    idle_s: float = 0.0  # its share of the time in which all episodes waited, and nothing was sampled
    others: tuple[Rollout, ...] = ()  # further conversations of a program, trained on with its advantage
    runaway: str = ""  # what computed on after its time, so that a process played this one; "" if nothing
    tool_calls: int = 0
    tool_errors: int = 0  # calls that failed
    cut_turns: tuple[int, ...] = ()  # numbers, from 0, of the turns that were cut at `max_turn_tokens`


def _no_numbers() -> Floats:
    import numpy as np  # here: planning reads prompts only

    return np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled completion, or the sampled turns of one episode; by default before its first token.

    `tokens` are the sampled token ids, each end-of-sequence token included when it was
    sampled; `logprobs` (same length) are the sampler's own log-probabilities of those tokens;
    `pieces` (same length) is each token's text, the end-of-sequence token's being "". What the policy read
    between its turns is in `given` only: losses, transforms and statistics see sampled tokens.
    """

    prompt: Prompt
    text: str = ""  # of the last turn
    tokens: tuple[int, ...] = ()
    logprobs: Floats = field(default_factory=_no_numbers)
    pieces: tuple[str, ...] = ()
    truncated: bool = False  # reached max_tokens without ending
    policy_version: int = 0  # number of updates of the sampling policy
    mean_entropy: float = float("nan")  # nats per token of the sampling distribution; NaN if unknown
    given: tuple[Given, ...] = ()  # in order; none in a single turn, and none after the last turn
    episode: Episode | None = None  # None: no environment

    @property
    def samples(self) -> tuple[Rollout, ...]:
        """The sequences to train on: this one, and the further conversations of its episode."""
        return (self, *self.episode.others) if self.episode else (self,)

    @property
    def turns(self) -> list[str]:
        """The text of each sampled turn."""
        ends = [given.at for given in self.given]
        return [
            "".join(self.pieces[start:end])
            for start, end in zip([0, *ends], [*ends, len(self.pieces)], strict=True)
        ]

    @property
    def length(self) -> int:
        """Sampled and given tokens."""
        return len(self.tokens) + sum(len(given.tokens) for given in self.given)

    def placed(self, unread: int | None = None) -> tuple[tuple[int, ...], Sequence[int]]:
        """Return sampled and given tokens as the policy read them, and the place of each sampled one.

        Args:
            unread: end token that the policy predicts but never reads before given tokens: its place is that
                of the token that follows it.
        """
        if not self.given:
            return self.tokens, range(len(self.tokens))
        read: list[int] = []
        places: list[int] = []
        start = 0
        for given in (*self.given, Given(len(self.tokens), (), "")):
            turn = self.tokens[start : given.at]
            places += range(len(read), len(read) + len(turn))
            read += turn[:-1] if given.tokens and turn[-1:] == (unread,) else turn
            read += given.tokens
            start = given.at
        return tuple(read), places


@dataclass(frozen=True, slots=True)
class FirstTurn:
    """A prompt, to be answered with a turn."""

    prompt: Prompt
    max_tokens: int
    told: Prompt | None = None  # what follows the last turn in `prompt`, if that is a conversation


@dataclass(frozen=True, slots=True)
class NextTurn:
    """What an environment said after a rollout's last turn, to be answered with another turn."""

    rollout: Rollout
    messages: Messages
    max_tokens: int  # of the turn
    tokens: tuple[int, ...] = ()  # those of the messages, from a program that renders itself


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model's chat template writes the call of a function: JSON, perhaps after an opening text."""

    opening: str  # before each call, or before a list of them; "": a turn with calls begins with the JSON
    name: str  # key of the function's name
    arguments: str  # key of its arguments


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TeacherScores:
    """What a teacher makes of the sampled tokens of one rollout, each after the same tokens before it."""

    logprobs: Floats  # (tokens,) of the sampled tokens, nats, at the sampler's temperature
    read: int  # tokens that the teacher processed
    likeliest: Ints | None = None  # (tokens,) the id that it finds likeliest; None if not known
    whole: Any = None  # its distributions, as the backend's own `update` takes them, with mode "jsd"
    weight: float = 0.0  # of the divergence between whole distributions in the loss; 0 where there is none
    beta: float = 1.0  # of that divergence


@dataclass(frozen=True, slots=True, eq=False)
class TrainingSample:
    """One rollout as the loss sees it.

    `advantages` has one value per completion token. `token_weight` multiplies each token's loss, so that the
    sum over all samples of the step is the normalised loss: cutting micro-batches anywhere leaves the
    gradient unchanged. `entropy_weight` is the weight of each token's entropy in the bonus, which is of the
    mean token entropy however the loss is normalised; None: `token_weight`. With a `teacher` in mode
    "reverse_kl", `advantages` have its part already.
    """

    rollout: Rollout
    advantages: Floats
    token_weight: float
    group: int = 0  # number of its group in this step, the independent unit of gradient noise
    entropy_weight: float | None = None
    teacher: TeacherScores | None = None

    @property
    def bonus_weight(self) -> float:
        return self.token_weight if self.entropy_weight is None else self.entropy_weight


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """Per token: loss, slope in the new log-probability, and whether the gradient was clipped."""

    value: Floats
    slope: Floats
    clipped: NDArray[np.bool_]


if TYPE_CHECKING:
    Evaluate: TypeAlias = Callable[[Floats, Floats, Floats, NDArray[np.int64]], LossTerms]
else:
    Evaluate = Any

SUPERVISED = "supervised"  # name of the warm-up's loss, the cross-entropy


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by name with its parameters, and the function that evaluates it (see `plugins/losses`)."""

    name: str
    evaluate: Evaluate  # parameters already bound
    params: Mapping[str, Any] = field(default_factory=dict)
    is_capped: bool = False  # importance ratios are limited by `evaluate`
