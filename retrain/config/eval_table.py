"""Tables `[[eval]]`: evaluations that are not the reward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from retrain.config.keys import Section, Table, count, key, plugin

if TYPE_CHECKING:
    from retrain.config.schema import Config


@dataclass(frozen=True)
class Eval(Section):
    """An evaluation that is not the reward: its own held-out prompts, reward and sampling.

    There may be several, each a table `[[eval]]`.
    """

    name: str = key("", "its rows' fields are `eval_<name>_*`, its file `evals/<name>.jsonl`", max_length=40)
    task: str = plugin("", "tasks", "options", "where its held-out prompts come from; default: [data]")
    options: Table = key(dict, "options of its task")
    reward: str = plugin("", "rewards", "params", "how its completions are scored; default: [reward]")
    params: Table = key(dict, "parameters of its reward")
    environment: str = plugin(
        "",
        "environments",
        "environment_options",
        "what its episodes are played in, with the other keys of [environment]; default: [environment]",
    )
    environment_options: Table = key(dict, "options of its environment")
    every: int = count(0, "steps between its evaluations; 0 evaluates at the end only", least=0)
    at_start: bool = key(False, "also evaluate before the first step, so that a fall from there is seen")
    prompts: int = count(256, "maximum number of its held-out prompts")
    samples: int = count(1, "completions per prompt")
    max_tokens: int | None = count(None, "upper bound on a completion's tokens; default: training.max_tokens")
    temperature: float = key(0.0, "sampling temperature; 0 takes the likeliest token", ge=0, le=10)


@dataclass(frozen=True)
class Evals(Section):
    """Evaluations that are not the reward."""

    tables: list[Eval] = key(list, "one per `[[eval]]`")


def as_played(config: Config, table: Eval) -> Config:
    """Return the configuration of a run with an evaluation's environment instead of its own."""
    if not table.environment:
        return config
    own = replace(config.environment, environment=table.environment, options=table.environment_options)
    return replace(config, environment=own)
