"""Functions that a policy may call: what they return is its next observation; its answer ends the episode.

A turn without a call is the answer, which `[reward]` scores. Wrong calls, exceptions and calls that take too
long are observations, too.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import re
import threading
import time
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import pydantic

from retrain.base import registry
from retrain.base.errors import ConfigError, Problem, first_line
from retrain.base.event_loop import in_thread
from retrain.base.registry import Megabytes, Positive
from retrain.base.rollouts import CallForm, Prompt
from retrain.config.schema import Config
from retrain.plugins.environments import Episode
from retrain.plugins.environments.calls import check_held_up
from retrain.plugins.environments.episode import awaited, outcome
from retrain.plugins.environments.single_turn import spoken
from retrain.plugins.sandbox import Limits, Sandbox, SandboxError, choice_problems, choose
from retrain.plugins.sandbox.cell import Cell

ARGUMENT = re.compile(r"^\s*(\w+)(?: \([^)]*\))?:\s*(.+)$")  # of a docstring's section
SECTION = re.compile(r"^\s*(Args|Arguments|Parameters|Returns|Raises|Yields|Example|Examples):\s*$")
PLAIN = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
LONGEST_OUTPUT = 1 << 16  # bytes
# what a program prints is what the policy reads, so its error is printed as well
SHOWING = """\
import traceback
try:
    exec(compile({program!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    error.__traceback__ = error.__traceback__.tb_next
    traceback.print_exception(error)
    print("".join(traceback.format_exception(error)), end="")
"""
BETWEEN = " \t\r\n;,"  # what may separate the calls of a turn
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


def check_run(config: Config) -> Iterator[str]:
    """Iterate over the problems of a run's configuration."""
    limit_s = config.environment.time_limit_s
    call_limit_s = float(config.environment.options.get("call_limit_s", CALL_LIMIT_S))
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
        free = asyncio.Semaphore(AT_ONCE)

        async def answer(call: ToolCall) -> tuple[str, bool]:
            async with free:
                return await self._box.answer(call)

        answers = await asyncio.gather(*map(answer, calls))
        self.tool_calls += len(answers)
        self.tool_errors += sum(is_error for _, is_error in answers)
        return [{"role": "tool", "content": content} for content, _ in answers], None, False

    def close(self) -> None:
        if self._closes:
            self._box.close()


class ToolBox:
    """The functions of a run."""

    def __init__(self, options: Mapping[str, Any], form: CallForm | None) -> None:
        """Load them; a ConfigError names each that cannot be a tool, and why."""
        self.form = form
        self._limit_s = float(options.get("call_limit_s", CALL_LIMIT_S))
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
        """Return what a call returns, and whether it is an error; EpisodeLostError if others caused it."""
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


class ToolError(Exception):
    """Why a call fails; the policy reads it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]  # as chat templates take it
    arguments: type[pydantic.BaseModel]

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def bound(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's arguments; a ToolError if they do not fit the function's type hints."""
        try:
            checked = self.arguments.model_validate_json(json.dumps(arguments))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ToolError(": ".join(filter(None, (self.name, where, first["msg"])))) from error
        except (TypeError, ValueError, RecursionError) as error:  # no JSON: bytes, a set, too many digits
            raise ToolError(f"{self.name}: an argument is not a plain value") from error
        return {one.alias or name: getattr(checked, name) for name, one in type(checked).model_fields.items()}

    @property
    def parameters(self) -> list[str]:
        return [one.alias or name for name, one in self.arguments.model_fields.items()]


def tool_of(name: str, function: Callable[..., Any]) -> Tool:
    """Return a function as a tool; a ValueError without a docstring or type hints, or if no JSON fits."""
    before: list[str] = []
    notes: dict[str, str] = {}  # of parameters
    section = ""
    for line in (inspect.getdoc(function) or "").splitlines():
        if heading := SECTION.match(line):
            section = heading[1]
        elif not section:
            before.append(line)
        elif section in ("Args", "Arguments", "Parameters") and (argument := ARGUMENT.match(line)):
            notes[argument[1]] = argument[2].strip()
    description = "\n".join(before).strip()
    if not description:
        raise ValueError("it has no docstring; the policy reads from it what the function does")
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, one in enumerate(inspect.signature(function).parameters.values()):
        if one.kind not in PLAIN:
            what = one.kind.description
            raise ValueError(f"its parameter {one.name!r} is {what}; a call gives each argument by name")
        if one.name not in hints:
            raise ValueError(
                f"its parameter {one.name!r} has no type hint; write one, such as {one.name}: int"
            )
        default = ... if one.default is one.empty else one.default
        described = pydantic.Field(alias=one.name, description=notes.get(one.name))
        fields[f"field{number}"] = Annotated[hints[one.name], described], default  # pydantic drops `_name`
    try:
        config = pydantic.ConfigDict(extra="forbid", strict=True)
        model = pydantic.create_model(name, __config__=config, **fields)
        parameters = _bare(model.model_json_schema())
    except (pydantic.errors.PydanticUserError, NameError, TypeError) as error:
        raise ValueError(f"its parameters cannot be written as JSON: {first_line(error)}") from error
    schema = {"name": name, "description": description, "parameters": parameters}
    return Tool(name, function, {"type": "function", "function": schema}, model)


def _bare(schema: Any, *, is_names: bool = False) -> Any:
    """Return a schema without titles, which repeat names, and without `additionalProperties`."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = () if is_names else ("title", "additionalProperties")
    return {
        key: _bare(value, is_names=key == "properties")
        for key, value in schema.items()
        if key not in left_out
    }


class PythonTool:
    """Runs programs in sandboxes that wait for them; they are opened when first needed."""

    def __init__(self, sandbox: str, options: Mapping[str, Any], limit_s: float, memory_bytes: int) -> None:
        self._name, self._options = sandbox, options
        self._limits = Limits(limit_s, memory_bytes)
        self._idle: list[Cell] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @cached_property
    def sandbox(self) -> Sandbox:
        """Where programs run; ConfigError if it cannot be used here."""
        return choose(self._name, self._options)

    def python(self, program: str) -> str:
        """Run a Python program, and return what it prints.

        Args:
            program: the source text; print what you want to know.
        """
        job = {"job": "stdio", "source": SHOWING.format(program=program), "input": ""}
        with self._lock:
            cell = self._idle.pop() if self._idle else None
        try:
            cell = cell or Cell(self.sandbox)
            ended, output = cell.run(self._limits, job, LONGEST_OUTPUT)
        except SandboxError as error:
            if cell is not None:
                cell.close()
            raise ToolError(f"the sandbox failed: {error}") from error
        with self._lock:
            if is_kept := not self._is_closed:
                self._idle.append(cell)
        if not is_kept:
            cell.close()
        if output is None:
            raise ToolError(f"the program printed more than {LONGEST_OUTPUT >> 10} KB")
        if not ended.in_time:
            raise ToolError(f"the program took longer than {self._limits.seconds:g} s")
        if ended.over:
            raise ToolError(f"the program ran out of {' and '.join(sorted(ended.over))}")
        if ended.broke:
            raise ToolError(f"the program {ended.broke}")
        if ended.code < 0:
            raise ToolError(f"the program was ended by signal {-ended.code}")
        return output.decode("utf-8", "replace")

    def close(self) -> None:
        """End all sandboxes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for cell in idle:
            cell.close()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a policy wrote."""

    name: str
    arguments: Mapping[str, Any]
    positional: tuple[Any, ...] = ()
    problem: str = ""  # why it cannot be made


def calls_in(text: str, form: CallForm | None) -> list[ToolCall]:
    """Return the calls of a turn; none if it is an answer. Without a form, calls are lines of Python."""
    if form is None:
        return _python_calls(text)
    if not form.opening:
        return _json_calls(text, form)[0] if text.lstrip()[:1] in ("{", "[") else []
    calls: list[ToolCall] = []
    rest = text.partition(form.opening)[2]
    while rest:
        following, rest = _json_calls(rest, form)
        calls += following
        rest = rest.partition(form.opening)[2]
    return calls


def _json_calls(text: str, form: CallForm) -> tuple[list[ToolCall], str]:
    """Return the calls that a text begins with, and the text after them."""
    calls: list[ToolCall] = []
    text = text.lstrip()
    while text:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", {}, problem=f"the call is not valid JSON: {error}")], text
        calls += [_call_of(each, form) for each in (value if isinstance(value, list) else [value])]
        text = text[end:].lstrip(BETWEEN)
        if text[:1] not in ("{", "["):
            break
    return calls, text


def _call_of(value: Any, form: CallForm) -> ToolCall:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get(form.name) if isinstance(value, dict) else None
    if not isinstance(name, str):
        return ToolCall("", {}, problem=f"the call has no {form.name!r}")
    arguments = value.get(form.arguments, {})
    if isinstance(arguments, str):  # some templates write them as a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, problem=f"{form.arguments!r} is not valid JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, problem=f"{form.arguments!r} is not an object")
    return ToolCall(name, arguments)


def _python_calls(text: str) -> list[ToolCall]:
    """Return the calls of a text that consists of nothing else."""
    calls: list[ToolCall] = []
    try:
        lines = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    for line in lines:
        call = line.value if isinstance(line, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            return []
        name, problem = call.func.id, ""
        try:
            positional = tuple(map(ast.literal_eval, call.args))
            keywords = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            calls.append(ToolCall(name, {}, problem=f"{name}: an argument is not a plain value"))
            continue
        named = {key: value for key, value in keywords.items() if key is not None}
        if len(named) < len(call.keywords):  # **{...}, or a name twice
            problem = f"{name}: write each argument once, by its place or as name=value"
            named, positional = {}, ()
        calls.append(ToolCall(name, named, positional, problem))
    return calls
