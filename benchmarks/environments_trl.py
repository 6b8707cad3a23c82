"""TRL's loop over tool calls, on the sampler and the tool of `benchmarks.environments`.

The loop is `GRPOTrainer._tool_call_loop` as TRL ships it. What it needs around it is replaced: generation by
the simulated sampler, and parsing by a call of the tool after each turn but the last.
"""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

from benchmarks.environments import TURNS, Tool
from benchmarks.simulated_samplers import Sampler

CALL = {"type": "function", "function": {"name": "tool", "arguments": {}}}
TURN = [1]  # a turn's tokens


async def tool() -> str:
    """Call a tool of the benchmark's environment."""
    answer, _, _ = await Tool().step("")
    return answer


def play_with_trl(sampler: Sampler, count: int) -> float:
    """Play episodes with TRL's loop; return the seconds that they took."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.trainer import grpo_trainer
    from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon

    class Loop(grpo_trainer.GRPOTrainer):  # type: ignore[misc,unused-ignore]
        """The trainer's methods, without a model."""

        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            self.async_loop, self.tools = loop, [tool]
            self._sync_tool_dicts: list[dict[str, Any]] = [{} for _ in range(count)]
            self._async_tool_dicts = [{"tool": tool} for _ in range(count)]
            self.max_tool_calling_iterations = TURNS - 1
            self.max_completion_length = 10**6
            self.use_vllm = self._is_vlm = False
            self.model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6))
            self.environment_factories = self._tokenizer = None

        def _get_tool_suffix_ids(self, tool_messages: Any) -> list[int]:
            return [2]

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            async def turns() -> None:
                await asyncio.gather(*(sampler.take_row() for _ in prompt_ids))

            asyncio.run_coroutine_threadsafe(turns(), self.async_loop).result()
            return [list(TURN) for _ in prompt_ids], None

    def parsed(*_: Any, **__: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": "", "tool_calls": [CALL]}

    thread, loop, is_ready = start_event_loop_in_daemon("tools")
    is_ready.wait()
    given, grpo_trainer.parse_response = grpo_trainer.parse_response, parsed
    try:
        began_s = time.perf_counter()
        trainer = Loop(loop)
        first, _ = trainer._generate_single_turn([[0]] * count)
        prompts: list[Any] = [[{"role": "user", "content": "question"}] for _ in range(count)]
        completions = [[parsed()] for _ in range(count)]
        trainer._tool_call_loop(prompts, [[0] for _ in range(count)], first, completions, None, None, {})
        return time.perf_counter() - began_s
    finally:
        grpo_trainer.parse_response = given
        shutdown_event_loop_in_daemon(thread, loop)
