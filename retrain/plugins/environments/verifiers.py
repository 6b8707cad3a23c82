"""Environments of the package verifiers, unchanged: their agents call the policy at the worker's endpoint.

The number of a prompt is that of a task in the taskset. Agents run in processes of this machine, with the
harness `null`, a chat loop without tools of its own, unless the configuration, the taskset or its environment
names others; its first use downloads what it needs, with `uv`. An episode is worth the reward of its trace,
or the mean of several.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.rollouts import Prompt
from retrain.plugins.environments.episode import EpisodeError

EXTRA = "verifiers"
PACKAGES = ("verifiers",)
BRINGS_LOOP = True


def open_episode(*, taskset: str, config: Mapping[str, Any] | None = None) -> Program:
    """Return an episode.

    Args:
        taskset: id of an installed taskset.
        config: the `[env]` table of verifiers, such as { agent = { max_turns = 4 } }.

    Raises:
        ConfigError: the package or the taskset is not installed, or the configuration is wrong.
    """
    table = {**(config or {})}
    table["taskset"] = {**table.get("taskset", {}), "id": taskset}
    return Program(_source(json.dumps(table, sort_keys=True)))


class Program:
    """One episode."""

    def __init__(self, source: Source) -> None:
        self._source = source

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> float:
        """Play the prompt's task; raise EpisodeError with the reason if verifiers could not."""
        v1, task = self._source.v1, self._source.task(prompt.id)
        variable = f"RETRAIN_API_KEY_{secrets.token_hex(8)}"  # verifiers reads keys from variables only
        os.environ[variable] = api_key
        try:
            client = v1.clients.EvalClientConfig(base_url=base_url, api_key_var=variable)
            sampling = v1.types.SamplingConfig()
            context = v1.clients.ModelContext(client=client, model="policy", sampling=sampling)
            async with self._source.serving() as env:
                (slot,) = env.slots(task)
                return _worth(await env.run_slot(slot, context))
        finally:
            del os.environ[variable]


class Source:
    """A taskset, and what plays its tasks."""

    def __init__(self, v1: Any, config: Any) -> None:
        self.v1, self._config = v1, config
        self._coming = iter(self._environment().taskset)
        self._tasks: list[Any] = []
        self._shared: dict[asyncio.AbstractEventLoop, _Shared] = {}

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        """Yield an environment whose servers run; all episodes of an event loop share it."""
        loop = asyncio.get_running_loop()
        if (shared := self._shared.get(loop)) is None:
            shared = self._shared[loop] = _Shared(self._environment())
        shared.episodes += 1
        try:
            yield await asyncio.shield(shared.serving)
        finally:
            shared.episodes -= 1
            if not shared.episodes:
                del self._shared[loop]
                await shared.end()

    def _environment(self) -> Any:
        return self.v1.utils.loaders.load_environment(self._config)

    def task(self, number: int) -> Any:
        """Return a task; raise EpisodeError if the taskset has fewer."""
        while len(self._tasks) <= number:
            try:
                self._tasks.append(next(self._coming))
            except StopIteration:
                taskset, count = self._config.taskset.id, len(self._tasks)
                what = f"taskset {taskset!r} has {count} tasks; set [data.options].count = {count}"
                raise EpisodeError(what) from None
        return self._tasks[number]


class _Shared:
    """An environment, and the task that holds its servers: others may not end them."""

    def __init__(self, env: Any) -> None:
        self.episodes = 0
        self.serving: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._is_over = asyncio.Event()

        async def hold() -> None:
            try:
                async with env.serving():
                    self.serving.set_result(env)
                    await self._is_over.wait()
            except Exception as error:  # noqa: BLE001 - carried to the episodes that wait
                if not self.serving.done():
                    self.serving.set_exception(error)

        self._holder = asyncio.create_task(hold())

    async def end(self) -> None:
        """End the servers; an error of it is ignored, because the episodes are over."""
        self._is_over.set()
        if not self.serving.done():
            self._holder.cancel()
        await asyncio.wait({self._holder})


@cache
def _source(written: str) -> Source:
    v1 = load("verifiers.v1", EXTRA, "verifiers")
    for part in ("clients", "configs.agent", "runtimes", "types", "utils.loaders"):
        load(f"verifiers.v1.{part}", EXTRA, "verifiers")
    table, loaders = json.loads(written), v1.utils.loaders
    taskset = table["taskset"]["id"]
    try:
        filled, kind = dict(table), loaders.env_config_type(taskset, table.get("id", ""))
        for role, spec in v1.configs.agent.agent_config_fields(kind()).items():
            agent = dict(table.get(role, {}))  # which needs no runtime and no harness if it names none
            if isinstance(spec.runtime, v1.runtimes.PrimeConfig):  # a cloud's, the default
                agent.setdefault("runtime", {"type": "subprocess"})
            if spec.harness is None and loaders.default_harness_id(taskset) == "bash":
                agent.setdefault("harness", {"id": "null"})
            filled[role] = agent
        return Source(v1, loaders.resolve_env_config(filled))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"taskset: verifiers cannot play {taskset!r} as configured: {error}") from error


def _worth(episode: Any) -> float:
    errors = [error for part in (episode, *episode.traces) for error in part.errors]
    if not episode.ok:
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode is not complete"
        raise EpisodeError(f"verifiers: {why}")
    rewards = [trace.reward for trace in episode.traces if trace.agent.trainable]
    if not rewards:
        raise EpisodeError("verifiers: no agent of the episode is trainable, so there is no reward")
    return float(sum(rewards) / len(rewards))
