"""Where the rewards of a plan run programs of the policy, found by a self-test on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain import registry
from retrain.config.schema import Config


def sandboxes_of(configs: Sequence[Config]) -> dict[str, str]:
    """Return name -> weakness, "" for none, of every sandbox that runs use; empty if no reward runs programs.

    Raises:
        ConfigError: a sandbox cannot be used here.
    """
    found: dict[str, str] = {}
    for config in configs:
        reward = config.reward
        if runs_programs(config):
            opened = registry.find("sandbox", reward.sandbox)(**reward.sandbox_options)
            found[opened.name] = opened.weakness
    return found


def sandbox_warnings(configs: Sequence[Config], sandboxes: Mapping[str, str]) -> Iterator[str]:
    """Iterate over the warnings about sandboxes and about rewards' own settings, each once."""
    for name, weakness in sandboxes.items():
        if weakness:
            yield f'sandbox "{name}": {weakness}'
    advice: dict[str, None] = {}
    for config in configs:
        for name, params in rewards_of(config.reward.reward, config.reward.params):
            advise = registry.hook("rewards", name, "advise_params")
            advice.update(dict.fromkeys(advise(params) if advise else ()))
    yield from advice


def rewards_of(name: str, params: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over the name and parameters of a reward or, if it consists of others, of those."""
    made_of = registry.hook("rewards", name, "made_of")
    if made_of is None:
        yield name, params
        return
    for part, its_params in made_of(params):
        yield from rewards_of(part, its_params)


def runs_programs(config: Config) -> bool:
    """Whether a run's reward runs programs that a policy wrote: it takes a sandbox."""
    names = [name for name, _ in rewards_of(config.reward.reward, config.reward.params)]
    taken = [registry.plugin("rewards", name).parameters() or () for name in names]
    return any(known.name == "sandbox" for parameters in taken for known in parameters)
