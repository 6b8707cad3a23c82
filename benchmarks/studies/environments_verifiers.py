"""Verifiers' own loop over tool calls, on the sampler and the tool of `benchmarks.environments`.

    python -m benchmarks.studies.environments_verifiers [--episodes 32] [--at-once 128] [--json]

A taskset with a tool is played as `vf-eval` plays it: one tool server for all episodes, up to 128 episodes at
once, and for each a process with the harness `null`, which takes seconds of processor time. It fails if it
cannot reach the tool server within 60 s, so few cores need fewer at once. Their model is the simulated
sampler behind HTTP. Before it, the product plays as many episodes.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1 import clients, types
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.utils import loaders

from benchmarks.environments import AT_ONCE as CALLS_AT_ONCE
from benchmarks.environments import TURNS, Tool, measured, play, shown
from benchmarks.simulated_samplers import Sampler
from benchmarks.suite import script_parser

AT_ONCE = 128  # episodes, as of `vf-eval`
MODEL, KEY = "policy", "RETRAIN_BENCHMARK_API_KEY"
TASKSET = "questions_v1"  # verifiers loads tasksets from modules without a package
MAX_EPISODES = 4096


class Tools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):  # type: ignore[misc,unused-ignore]
    """The tool of the benchmark."""

    TOOL_PREFIX = None

    @vf.tool  # type: ignore[untyped-decorator,unused-ignore]
    async def tool(self) -> str:
        """Take some time."""
        answer, _, _ = await Tool().step("")
        return answer


class Questions(vf.Taskset[vf.Task[vf.TaskData]]):  # type: ignore[misc,unused-ignore]
    """Tasks that are all the same."""

    def load(self) -> Iterator[vf.Task[vf.TaskData]]:
        for _ in range(MAX_EPISODES):
            yield vf.Task(vf.TaskData(prompt="question"), self.config.task)

    def toolsets(self, config: Any) -> list[Any]:
        return [Tools(vf.SharedToolsetConfig())]


def play_with_verifiers(sampler: Sampler, count: int, most: int) -> float:
    """Play episodes with verifiers' loop, so many at once at most; return the seconds that they took."""
    return asyncio.run(_played(sampler, count, most))


async def _played(sampler: Sampler, count: int, most: int) -> float:
    os.environ |= {KEY: "none", "PYTHONPATH": str(Path(__file__).parents[2])}  # for the tool server
    sys.modules[TASKSET] = importlib.import_module("benchmarks.studies.environments_verifiers")
    on_this_machine = AgentConfig(runtime={"type": "subprocess"}, harness={"id": "null"})
    table = {"taskset": {"id": TASKSET}, "agent": on_this_machine}
    env = loaders.load_environment(loaders.resolve_env_config(table))
    server = web.AppRunner(_application(sampler))
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        url = f"http://127.0.0.1:{server.addresses[0][1]}/v1"
        client = clients.EvalClientConfig(base_url=url, api_key_var=KEY)
        context = clients.ModelContext(client=client, model=MODEL, sampling=types.SamplingConfig())
        tasks, at_once = iter(env.taskset), asyncio.Semaphore(most)
        async with env.serving():
            await _episode(env, next(tasks), context, at_once)  # prepares the harness
            sampler.row_s = 0.0
            began_s = time.perf_counter()
            await asyncio.gather(*(_episode(env, next(tasks), context, at_once) for _ in range(count)))
            return time.perf_counter() - began_s
    finally:
        await server.cleanup()


async def _episode(env: Any, task: Any, context: Any, at_once: asyncio.Semaphore) -> None:
    (slot,) = env.slots(task)
    episode = await env.run_slot(slot, context, at_once)
    assert episode.ok, [error.message for one in (episode, *episode.traces) for error in one.errors]
    assert episode.traces[0].num_turns == TURNS


def _application(sampler: Sampler) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        await sampler.take_row()
        chosen = {"index": 0, "delta": _message(turn, body.get("tools"))}
        ended = {"index": 0, "delta": {}, "finish_reason": "stop" if turn == TURNS - 1 else "tool_calls"}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choices in ([{**chosen, "finish_reason": None}], [ended]):
            await response.write(_event({**CHUNK, "created": int(time.time()), "choices": choices}))
        await response.write(b"data: [DONE]\n\n")
        return response

    application = web.Application()
    application.router.add_post("/v1/chat/completions", answer)
    return application


CHUNK = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": MODEL}


def _message(turn: int, tools: Any) -> dict[str, Any]:
    if turn == TURNS - 1:
        return {"role": "assistant", "content": "done"}
    function = {"name": tools[0]["function"]["name"], "arguments": "{}"}
    call = {"index": 0, "id": f"call_{turn}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="episodes of verifiers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [
        measured("episodes", options.episodes, lambda sampler, n: play(sampler, n, Tool, CALLS_AT_ONCE)),
        measured("verifiers' loop", options.episodes, partial(play_with_verifiers, most=options.at_once)),
    ]
    print(json.dumps(rows, indent=2) if options.json else "\n".join(map(shown, rows)))


__all__ = ["Questions"]

if __name__ == "__main__":
    if "VF_CONFIG" in os.environ:  # verifiers starts the tool server so
        Tools.run()
    else:
        main()
