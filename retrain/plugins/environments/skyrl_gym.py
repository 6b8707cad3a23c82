"""Environments of the package skyrl-gym, or any class with `init(messages)` and `step(text)` as it has them.

`init` gets the prompt's conversation. The environment's `extras` are those of the options and the columns of
the prompt's row; `reward_spec` and `reward_model` hold the answer as `ground_truth`, unless a column has that
name.

Source: SkyRL-Gym of SkyRL-v0, github.com/NovaSky-AI/SkyRL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.rollouts import Prompt
from retrain.plugins.environments.single_turn import spoken

EXTRA = "skyrl-gym"
PACKAGES = ("skyrl_gym", "omegaconf")


def open_episode(
    *, name: str, config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None
) -> Episode:
    """Return an episode.

    Args:
        name: an environment's name in skyrl-gym, such as "gsm8k", or the dotted path of a class.
        config: table that the environment gets as `env_config`.
        extras: table of what it gets besides the columns of the row.

    Raises:
        ConfigError: the package is not installed, or has no such environment.
    """
    gym = load("skyrl_gym", EXTRA, "skyrl_gym")
    table = load("omegaconf", EXTRA, "skyrl_gym").OmegaConf.create(dict(config or {}))
    if "." in name:
        constructor = registry.function_of_option("name", name)
        return Episode(partial(constructor, env_config=table), extras or {})
    if name not in gym.registry:
        some = f"known: {', '.join(gym.registry)}, or the dotted path of a class"
        raise ConfigError(f"name: skyrl-gym has no {name!r}; {registry.hint(name, gym.registry, some)}")
    return Episode(partial(gym.make, name, env_config=table), extras or {})


class Episode:
    """One episode; its environment is made at the start, because it needs the prompt's row."""

    def __init__(self, make: Callable[..., Any], extras: Mapping[str, Any]) -> None:
        self._make, self._extras = make, extras
        self._env: Any = None

    def start(self, prompt: Prompt) -> list[dict[str, str]]:
        answer = {"ground_truth": prompt.answer}
        row = {"reward_spec": answer, "reward_model": answer, **self._extras, **prompt.row}
        self._env = self._make(extras=row)
        messages = spoken(prompt.messages) or [{"role": "user", "content": prompt.text}]
        told: list[dict[str, str]] = self._env.init(messages)[0]
        return told

    def step(self, completion: str) -> tuple[list[dict[str, str]], float, bool]:
        result = self._env.step(completion)
        return result["observations"], result["reward"], result["done"]

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
