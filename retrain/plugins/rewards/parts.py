"""The parts of a reward: numbers by name beside it, which become columns of a step's row.

A part `format` is `reward_format` there and `eval_reward_format` in evaluations, and `reward_format_unscored`
is the share of completions without it. So a name is one that no other column of a reward has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from retrain.base import registry
from retrain.base.errors import ConfigError

if TYPE_CHECKING:  # a scoring process needs no schema
    from retrain.config.schema import Config

NAME = re.compile(r"[a-z0-9_]{1,64}")
MOST_PARTS = 32  # of a reward: each is a column of every row
UNSCORED = "_unscored"


def part_name(label: str) -> str:
    """Return the name for a text of a user's, such as `my_rewards_brevity` for "my_rewards.brevity"."""
    return re.sub("[^a-z0-9]+", "_", label.lower()).strip("_")


def name_problem(names: Iterable[str]) -> str:
    """Return why names cannot be those of parts, "" if they can."""
    known = list(names)
    if len(known) > MOST_PARTS:
        return f"{len(known)} parts; a reward has at most {MOST_PARTS}, as each is a column of every row"
    for name in known:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            return f"the part {name!r:.80}; a name has up to 64 of the characters a-z, 0-9 and _"
        if name in _taken() or name.endswith(UNSCORED):
            return f"the part {name!r}, whose column another one has: reward_{name}; choose another name"
    return ""


def part_weights(config: Config) -> Mapping[str, float]:
    """Return the weights of the parts of a run's reward, none without; a ConfigError if sources disagree."""
    from retrain.config.resolve import by_source  # not at the top: a scoring process needs no configuration

    merged: dict[str, float] = {}
    for source in by_source(config).values():
        for part, weight in _weights_of(source).items():
            if merged.setdefault(part, weight) != weight:
                what = f"two sources weigh the part {part!r} differently: {merged[part]:g} and {weight:g}"
                raise ConfigError(f"{what}; give it another name in one of them")
    return merged


def _weights_of(config: Config) -> Mapping[str, float]:
    played, table = config.environment, config.reward
    for kind, name, params in (
        ("environments", played.environment, played.options),
        ("rewards", table.reward, table.params),
    ):
        weights: Mapping[str, float] = registry.ask(kind, name, "part_weights", params)
        if not isinstance(weights, Mapping):
            raise ConfigError(f"{name!r}: part_weights returned {weights!r:.80}, not weights by name")
        for part, weight in weights.items():
            if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
                what = f"has {weight!r:.80} for {part!r}; a weight is a finite number"
                raise ConfigError(f"{name!r}: part_weights {what}")
        if wrong := name_problem(weights):
            raise ConfigError(f"{name!r}: part_weights has {wrong}")
        if weights:
            return weights
    return {}


@cache
def _taken() -> frozenset[str]:
    # not at the top: most rewards have no parts
    from retrain.records.row_parts import Evaluation, NamedEvaluation, keys_of
    from retrain.records.step_row import RolloutSummary, Timing

    keys = [key for kind in (Timing, RolloutSummary, Evaluation) for _, key, *_ in keys_of(kind)]
    # also those of an `[[eval]]` that is called "reward"
    of_evals = {key.removeprefix("eval_NAME_") for _, key, *_ in keys_of(NamedEvaluation)}
    return frozenset(of_evals.union(key.partition("reward_")[2] for key in (*keys, *of_evals))) - {""}
