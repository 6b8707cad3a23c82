"""Functions that a policy may call: what they return is its next observation; its answer ends the episode.

A turn without a call is the answer, which `[reward]` scores. Wrong calls, exceptions and calls that take too
long are observations, too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from retrain.base import registry
from retrain.base.errors import ConfigError, Problem
from retrain.base.event_loop import in_thread
from retrain.base.registry import Megabytes, Positive
from retrain.base.rollouts import CallForm, Prompt
from retrain.config.schema import Config
from retrain.plugins.environments import Episode
from retrain.plugins.environments.coroutine_loop import check_held_up
from retrain.plugins.environments.episode import awaited, outcome
from retrain.plugins.environments.single_turn import spoken
from retrain.plugins.environments.tools.calls import ToolCall, calls_in
from retrain.plugins.environments.tools.functions import PythonTool, Tool, ToolError, tool_of
from retrain.plugins.sandbox import choice_problems

PYTHON = "python"  # the name of the tool that runs programs
MOST_CALLS = 32  # of a turn: a policy that repeats itself must not keep the run
AT_ONCE = 8  # calls of a turn
CALL_LIMIT_S = 10.0
NOTHING = "(nothing)"  # what a policy reads of an empty result


def open_episode(
    box: ToolBox | None = None,
    *,
    tools: Sequence[str] = (PYTHON,),
    calls: Literal["template", "python"] = "template",
    call_limit_s: Positive = CALL_LIMIT_S,
    wrong_call: str = "",
    sandbox: str = "auto",
    sandbox_options: Mapping[str, Any] | None = None,
    memory_mb: Megabytes = 1024,
) -> ToolUse:
    """Return an episode in which the policy may call functions.

    Args:
        box: the functions, ready to be called; by default made of the options.
        tools: dotted paths of functions, and "python", which runs programs in a sandbox.
        calls: "template": as the model's chat template writes calls. "python": a turn that consists of calls
            such as add(2, b=3), for models without a template.
        call_limit_s: time that a call may take.
        wrong_call: what the policy reads if a call fails; by default what is wrong.
        sandbox: where programs of "python" run.
        sandbox_options: its options.
        memory_mb: limit of a program's memory (Linux).
    """
    if box is not None:
        return ToolUse(box)
    options = {"sandbox": sandbox, "sandbox_options": sandbox_options or {}, "memory_mb": memory_mb}
    table = {"tools": tools, "call_limit_s": call_limit_s, "wrong_call": wrong_call, **options}
    return ToolUse(prepare(table, None), closes=True)


def tools(options: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of the functions, for the model's template; none if it does not write the calls."""
    if options.get("calls", "template") != "template":
        return []
    return [tool.schema for tool in ToolBox(options, None).tools.values()]


def check_run(config: Config) -> Iterator[str]:
    """Iterate over the problems of a run's configuration."""
    limit_s, call_limit_s = config.environment.time_limit_s, _call_limit_s(config.environment.options)
    if call_limit_s >= limit_s:
        yield (
            f"[environment.options].call_limit_s: got {call_limit_s:g}; needs less than "
            f"[environment].time_limit_s = {limit_s:g}, which would end the whole episode"
        )


def prepare(options: Mapping[str, Any], form: CallForm | None) -> ToolBox:
    """Return what all episodes of a run share; ConfigError if programs have no sandbox here."""
    box = ToolBox(options, form)
    if PYTHON in box.tools:
        try:
            _ = box.programs.sandbox
        except ConfigError as error:
            raise ConfigError(f"sandbox: {error}") from error
    return box


def check_options(options: Mapping[str, Any]) -> Iterator[str | Problem]:
    """Iterate over the problems of a table, one line each, starting with the key."""
    if not options.get("tools", [PYTHON]):
        yield f'tools: got []; needs a list of dotted paths, such as ["my_tools.add"], or "{PYTHON}"'
        return
    try:
        ToolBox(options, None)
    except ConfigError as error:
        yield from error.problems
    yield from choice_problems({"sandbox": "auto", **options})


class ToolBox:
    """The functions of a run."""

    def __init__(self, options: Mapping[str, Any], form: CallForm | None) -> None:
        """Load them; a ConfigError names each that cannot be a tool, and why."""
        self.form = form
        self._limit_s = _call_limit_s(options)
        self._wrong = str(options.get("wrong_call", ""))
        self.programs = PythonTool(
            options.get("sandbox", "auto"),
            options.get("sandbox_options") or {},
            self._limit_s,
            int(options.get("memory_mb", 1024)) << 20,
        )
        self.tools: dict[str, Tool] = {}
        problems = [wrong for path in options.get("tools", (PYTHON,)) if (wrong := self._add(path))]
        if problems:
            raise ConfigError(problems)

    def close(self) -> None:
        self.programs.close()

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """Return what a call returns, and whether it is an error.

        Raises:
            EpisodeLostError: it is one, perhaps because calls of other episodes blocked the event loop.
        """
        began_s = time.monotonic()
        try:
            read, is_error = _written(call.name, await self._result(call)) or NOTHING, False
        except ToolError as error:
            check_held_up(began_s, self._limit_s)
            read, is_error = self._wrong or f"error: {error}", True
        return read.encode(errors="replace").decode(), is_error  # half a character cannot be tokenized

    async def _result(self, call: ToolCall) -> Any:
        tool, arguments = self._bound(call)
        function, failure = partial(tool.function, **arguments), partial(_told, tool)
        try:
            async with asyncio.timeout(self._limit_s):
                result = await (
                    asyncio.ensure_future(awaited(function, failure))
                    if tool.is_async
                    else in_thread(partial(outcome, function, failure), runaway=f"the tool {tool.name}")
                )
        except TimeoutError as error:
            raise ToolError(f"{tool.name} took longer than {self._limit_s:g} s") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the episode's end
                raise
            raise _told(tool, error) from error
        if isinstance(result, ToolError):
            raise result
        return result

    def _bound(self, call: ToolCall) -> tuple[Tool, dict[str, Any]]:
        """Return the function that is called, and its arguments; a ToolError if the call is wrong."""
        if call.problem:
            raise ToolError(call.problem)
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no function {call.name!r}; there is {', '.join(self.tools)}")
        names = tool.parameters
        if len(call.positional) > len(names) or call.arguments.keys() & set(names[: len(call.positional)]):
            raise ToolError(f"{call.name}: takes {', '.join(names) or 'nothing'}, each once")
        return tool, tool.bound({**dict(zip(names, call.positional, strict=False)), **call.arguments})

    def _add(self, path: str) -> str:
        """Add a function; return what is wrong with it, "" if nothing."""
        try:
            function = self.programs.python if path == PYTHON else registry.find_function("a function", path)
            name = path.rpartition(".")[2]
            if name in self.tools:
                return f"tools: two functions are called {name!r}"
            self.tools[name] = tool_of(name, function)
        except ConfigError as error:
            return f"tools: {error}"
        except (ValueError, NameError) as error:
            return f"tools: {path!r}: {error}"
        return ""


def _call_limit_s(options: Mapping[str, Any]) -> float:
    return float(options.get("call_limit_s", CALL_LIMIT_S))


def _told(tool: Tool, error: BaseException) -> ToolError:
    if isinstance(error, ToolError):
        return error
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - its class says enough
        message = ""
    return ToolError(": ".join(filter(None, (tool.name, type(error).__name__, message))))


def _written(name: str, result: Any) -> str:
    """Return a result as a text; ToolError if JSON cannot hold it."""
    if isinstance(result, str):
        return result
    try:
        return json.dumps(result, default=str)
    except Exception as error:  # a __str__ of the user's may raise anything
        what = type(error).__name__
        raise ToolError(f"{name}: what it returned cannot be written as JSON ({what})") from error


class ToolUse(Episode):
    """A prompt to answer, with the help of functions."""

    def __init__(self, box: ToolBox, *, closes: bool = False) -> None:
        """Open; `closes` if the functions are this episode's own."""
        self._box, self._closes = box, closes
        self.tool_calls = self.tool_errors = 0

    def start(self, prompt: Prompt) -> str | list[dict[str, str]]:
        return spoken(prompt.messages) or prompt.text

    async def step(self, completion: str) -> tuple[str | list[dict[str, str]], None, bool]:
        calls = calls_in(completion, self._box.form)
        if not calls:
            return "", None, True
        if len(calls) > MOST_CALLS:
            why = f"only the first {MOST_CALLS} of the turn's {len(calls)} calls were made"
            calls = [*calls[:MOST_CALLS], ToolCall("", {}, problem=why)]
        return await self._answered(calls)

    def close(self) -> None:
        if self._closes:
            self._box.close()

    async def _answered(self, calls: Sequence[ToolCall]) -> tuple[list[dict[str, str]], None, bool]:
        free = asyncio.Semaphore(AT_ONCE)

        async def answer(call: ToolCall) -> tuple[str, bool]:
            async with free:
                return await self._box.answer(call)

        answers = await asyncio.gather(*map(answer, calls))
        self.tool_calls += len(answers)
        self.tool_errors += sum(is_error for _, is_error in answers)
        return [{"role": "tool", "content": content} for content, _ in answers], None, False
