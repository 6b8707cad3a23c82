"""Parts of a row: dataclasses whose fields declare their keys in the file, their units and their meanings.

Here are those of evaluations, on held-out prompts, and of what a run calls: permits, what its API billed and
when it did not work, the server that samples. `step_row` has the others.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, TypeAlias, TypeVar, dataclass_transform

from retrain.records.text import count_of

Value: TypeAlias = str | int | float | None
Columns: TypeAlias = Mapping[str, Value]  # of a row, or of a finished run's result
T = TypeVar("T")
ITEM = re.compile(r"[A-Z]+(?!.*[A-Z])")  # the last capitals of a key


def column(
    unit: str,
    meaning: str,
    *,
    key: str = "",
    is_optional: bool = False,
    may_be_infinite: bool = False,
    **default: Any,
) -> Any:
    """Declare a field of a row; other fields of its class are not part of the row.

    Args:
        unit: of its value; "" for names and texts.
        meaning: one line for docs/metrics.md.
        key: its name in the file, with `{prefix}` for the part's; "" for that and the attribute's name. A
            mapping has one key per item, with the item's name in place of the last capitals.
        is_optional: whether a value of None leaves the key out instead of writing null.
        may_be_infinite: whether a value that is not finite is written as null; of others it is an error.
        default: as for `dataclasses.field`.
    """
    described = {
        "unit": unit,
        "meaning": meaning,
        "key": key,
        "is_optional": is_optional,
        "may_be_infinite": may_be_infinite,
    }
    return field(metadata=described, **default)


WRITERS: dict[Any, tuple[str, str]] = {}  # of each part: the module that writes it, and when


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(column,))
def row_part(writer: str = "", when: str = "always") -> Callable[[type[T]], type[T]]:
    """Make a class a part of a row; type checkers know which of its columns are required."""

    def make(kind: type[T]) -> type[T]:
        part = dataclass(frozen=True, slots=True, kw_only=True)(kind)
        WRITERS[part] = writer, when
        return part

    return make


def columns(part: Any) -> dict[str, Value]:
    """Return one part's keys and values as metrics.jsonl has them; none if the part is None.

    A mapping of parts has their names for the capitals in their prefix.
    """
    row: dict[str, Value] = {}
    if isinstance(part, Mapping):
        for name, one in part.items():
            row |= {key.replace("NAME", name): value for key, value in columns(one).items()}
        return row
    kind: Any = type(part)  # hashable, which mypy cannot infer for a dataclass's type
    for name, key, is_optional, may_be_infinite in () if part is None else keys_of(kind):
        value = getattr(part, name)
        if may_be_infinite and value is not None and not math.isfinite(value):
            value = None
        if isinstance(value, dict):
            row |= {ITEM.sub(item, key): each for item, each in value.items()}
        elif value is not None or not is_optional:
            row[key] = value
    return row


@cache
def keys_of(kind: Any) -> tuple[tuple[str, str, bool, bool], ...]:
    """Return a part's attributes: their keys in the file, `is_optional` and `may_be_infinite`."""
    prefix = getattr(kind, "PREFIX", "")
    declared = ((part.name, part.metadata) for part in dataclasses.fields(kind) if part.metadata)
    return tuple(
        (name, how["key"].format(prefix=prefix) or prefix + name, how["is_optional"], how["may_be_infinite"])
        for name, how in declared
    )


@row_part()
class EvaluationPart:
    """What every evaluation has."""

    reward: float | None = column("reward", "mean reward; null if no completion has a score")
    correct_rate: float | None = column("fraction", "share of completions with a reward of 1")
    prompts: int = column("prompts", "held-out prompts; of an `[[eval]]` those with a scored completion")
    reward_error_fraction: float = column("fraction", "share of completions whose scoring failed")
    reward_timeout_fraction: float = column("fraction", "share of completions whose scoring took too long")
    pass_at: Mapping[str, float | None] = column(
        "fraction", "chance that one of K samples is right, where there are several", key="{prefix}pass_at_K"
    )
    time_s: float = column("s", "how long it took; not part of `step_time_s`")
    billed: Mapping[str, int] = column(
        "tokens", "that it was billed, by kind: `prefill`, `cached`, `sample`", key="{prefix}billed_KIND"
    )
    unscored_fraction: float | None = column(
        "fraction", "share of completions without a score, if any", is_optional=True, default=None
    )
    parts: Mapping[str, float | None] = column(
        "reward", "mean of a part of the reward, by name", key="{prefix}reward_PART", default_factory=dict
    )
    parts_unscored: Mapping[str, float] = column(
        "fraction",
        "share of completions without it, if any",
        key="{prefix}reward_PART_unscored",
        default_factory=dict,
    )


@row_part("trainer/evaluation.py", "every `eval_every` steps")
class Evaluation(EvaluationPart):
    """The policy on held-out prompts, in steps that are evaluated: greedy completions, but for `pass_at`."""

    PREFIX: ClassVar[str] = "eval_"
    sources: Mapping[str, float | None] = column(
        "reward",
        "mean reward on a source's prompts, where there are several",
        key="{prefix}source_NAME_reward",
        default_factory=dict,
    )


@row_part("trainer/evaluation.py", "with `[[eval]]`")
class NamedEvaluation(EvaluationPart):
    """An `[[eval]]` called NAME, in steps in which it is due. Each prompt counts once, by its mean."""

    PREFIX: ClassVar[str] = "eval_NAME_"
    reward_se: float | None = column(
        "reward", "its standard error over prompts, whose samples are not independent; null for one prompt"
    )
    correct_rate_se: float | None = column("fraction", "that of `correct_rate`; null for one prompt")
    pass_at_se: Mapping[str, float | None] = column(
        "fraction", "that of `pass_at`", key="{prefix}pass_at_se_K"
    )
    questions: int | None = column(
        "prompts",
        "held-out prompts that were asked, where `[decision]` has more asked at a run's end",
        is_optional=True,
        default=None,
    )


@row_part("trainer/evaluation.py", "with `[[eval]]`")
class EvalWatch:
    """Every `[[eval]]` beside the reward."""

    PREFIX: ClassVar[str] = "eval_"
    falling: str = column(
        "", "those that fell although the reward rose, with figures; questions do not explain it"
    )


@row_part("trainer/permits.py")
class PermitUse:
    """Waiting for and holding permits, summed over concurrent calls."""

    wait_s: float = column("s", "waiting for permits, may exceed the step", key="permit_wait_s")
    held_s: float = column("s", "holding permits, of calls that ended in this step", key="permit_held_s")
    permits: int | None = column(
        "permits", 'how many there are; with `max_concurrent = "auto"`', is_optional=True
    )
    permits_fixed: str | None = column(
        "", "why their number cannot adapt, if it should and cannot", is_optional=True, default=None
    )


@row_part("trainer/budget.py", "where the API bills tokens, or they have a price")
class CostSummary:
    """What was billed since the row before: evaluations too, and steps that were repeated after a failure."""

    prefill_tokens: int = column("tokens", "of prompts that were read in full")
    cached_tokens: int = column("tokens", "of prompts that were read before, as for a group's other rollouts")
    sampled_tokens: int = column("tokens", "sampled")
    trained_tokens: int = column("tokens", "of prompts and completions, in each pass that trains on them")
    cost_usd: float | None = column("$", "what they cost; null where their price is not known")


@row_part("trainer/step_meter.py", "where the API says why it waits (`tinker`)")
class ApiPause:
    """Times in which the API had paused all calls of the run, or was down; estimates leave them out."""

    PREFIX: ClassVar[str] = "api_"
    pause_s: float = column("s", "part of `step_time_s` in which no call went on")
    pauses_s: float = column("s", "the same in this attempt so far, evaluations and checkpoints included")


@row_part("backends/engines/metrics.py", "where a server samples that has metrics")
class EngineUse:
    """The server that samples, as its metrics say, for all of its users; the most at once during the step."""

    PREFIX: ClassVar[str] = "engine_"
    running: int = column("requests", "completions in progress")
    waiting: int = column("requests", "waiting for a place")
    kv_fraction: float | None = column("fraction", "share of its key-value cache in use")
    tokens_per_s: float | None = column(
        "tokens/s", "tokens sampled per second; null until it was asked twice"
    )
    server: str = column("", "its log; its address if others started it")
    restarts: int | None = column(
        "",
        "times that it was started again after a crash, so far; of a server of ours",
        is_optional=True,
        default=None,
    )
    crash: str | None = column(
        "", "how it ended, and the last lines of its log; after a crash", is_optional=True, default=None
    )

    def __str__(self) -> str:
        again = f", restarted {count_of(self.restarts, 'time')}" if self.restarts else ""
        use = "" if self.kv_fraction is None else f", KV cache {self.kv_fraction:.0%}"
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.running} running, {self.waiting} waiting{use}{speed}{again}"
