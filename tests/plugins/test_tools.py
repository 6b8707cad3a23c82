"""Functions as tools: their schemas, calls of them, and what the policy reads of a call."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import CallForm, Prompt, Rollout
from retrain.config.load import parse
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments import opened
from retrain.plugins.environments.tools import ToolBox, ToolCall, ToolError, calls_in, open_episode, tool_of
from retrain.trainer.episodes import Episodes, summary_of
from tests.plugins.test_environments import GUESS, HOW, write
from tests.semaphore_processes import wait_until

HERMES = CallForm("<tool_call>", "name", "arguments")
LLAMA = CallForm("", "name", "parameters")
ONCE = "write each argument once, by its place or as name=value"


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", hours: list[int] | None = None) -> str:
    """Forecast the weather.

    It is always the same.

    Args:
        city: where.
        days (int): how far ahead.

    Returns:
        A text.
    """
    return f"{city} {days} {unit} {hours}"


def test_a_signature_and_its_docstring_are_a_schema() -> None:
    schema = tool_of("weather", weather).schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast the weather.\n\nIt is always the same.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where."},
                    "days": {"type": "integer", "default": 1, "description": "how far ahead."},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
                    "hours": {
                        "anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["city"],
            },
        },
    }


def test_parameters_may_have_any_name() -> None:
    def odd(_a: int, schema: str = "s", model_config: int = 1) -> str:
        """Return its arguments."""
        return f"{_a} {schema} {model_config}"

    tool = tool_of("odd", odd)
    assert list(tool.schema["function"]["parameters"]["properties"]) == tool.parameters
    assert tool.function(**tool.bound({"_a": 3, "model_config": 2})) == "3 s 2"
    with pytest.raises(ToolError, match="odd: _a: Field required"):
        tool.bound({})


def test_arguments_are_checked_by_the_type_hints() -> None:
    tool = tool_of("weather", weather)
    assert tool.bound({"city": "Rome", "hours": [1]}) == {
        "city": "Rome",
        "days": 1,
        "unit": "C",
        "hours": [1],
    }
    for wrong, said in [
        ({}, "weather: city: Field required"),
        ({"city": "Rome", "days": "2"}, "weather: days: Input should be a valid integer"),
        ({"city": "Rome", "when": 2}, "weather: when: Extra inputs are not permitted"),
        ({"city": "Rome", "unit": "K"}, "weather: unit: Input should be 'C' or 'F'"),
    ]:
        with pytest.raises(ToolError) as caught:
            tool.bound(wrong)
        assert str(caught.value) == said


@pytest.mark.parametrize(
    ("text", "form", "calls"),
    [
        ("the answer is 5", HERMES, []),
        ("the answer is 5", LLAMA, []),
        ("the answer is 5", None, []),
        (
            'I add.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
            '<tool_call>{"name": "g"}</tool_call>',
            HERMES,
            [ToolCall("f", {"x": 1}), ToolCall("g", {})],
        ),
        (
            '{"name": "f", "parameters": {"x": 1}}; {"name": "g"}',
            LLAMA,
            [ToolCall("f", {"x": 1}), ToolCall("g", {})],
        ),
        ('[{"name": "f", "parameters": "{\\"x\\": 1}"}]', LLAMA, [ToolCall("f", {"x": 1})]),
        ('<tool_call>{"function": {"name": "f", "arguments": {}}}', HERMES, [ToolCall("f", {})]),
        ("f(1, x=[2])\ng()", None, [ToolCall("f", {"x": [2]}, (1,)), ToolCall("g", {})]),
        ("f(1) is 5", None, []),
        ("f", None, []),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "<tool_call>{}"}}</tool_call>'
            '<tool_call>what<tool_call>{"name": "g"}',
            HERMES,
            [
                ToolCall("f", {"x": "<tool_call>{}"}),
                ToolCall(
                    "", {}, problem="the call is not valid JSON: Expecting value: line 1 column 1 (char 0)"
                ),
                ToolCall("g", {}),
            ],
        ),
        ("f(**{'a': 1})", None, [ToolCall("f", {}, problem=f"f: {ONCE}")]),
        ("f(a=1, a=2)", None, [ToolCall("f", {}, problem=f"f: {ONCE}")]),
        ("f(g())", None, [ToolCall("f", {}, problem="f: an argument is not a plain value")]),
        ('<tool_call>{"arguments": {}}', HERMES, [ToolCall("", {}, problem="the call has no 'name'")]),
        (
            '{"name": "f", "parameters": 3}',
            LLAMA,
            [ToolCall("f", {}, problem="'parameters' is not an object")],
        ),
    ],
)
def test_calls_are_found_in_what_a_policy_wrote(
    text: str, form: CallForm | None, calls: list[ToolCall]
) -> None:
    assert calls_in(text, form) == calls


def test_a_call_that_is_cut_off_is_not_valid_json() -> None:
    (call,) = calls_in('<tool_call>{"name": "f", "argum', HERMES)
    assert call.problem.startswith("the call is not valid JSON: ")


@pytest.mark.parametrize("wrapped", ["{}", '{{"name": "f", "arguments": "{}"}}'])
def test_a_call_that_is_nested_too_deeply_is_not_valid_json(wrapped: str) -> None:
    (call,) = calls_in("<tool_call>" + wrapped.format("[" * 200_000), HERMES)
    assert "is not valid JSON: maximum recursion depth" in call.problem


OWN = '''
import asyncio
import os
import sys
import threading

both = threading.Barrier(2)
over = threading.Event()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def meet() -> str:
    """Wait for another call."""
    both.wait(30)
    return ""


async def wait() -> None:
    """Wait for nothing."""


def stuck() -> None:
    """Never return."""
    over.wait()


def leave() -> None:
    """Exit."""
    sys.exit(3)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def give(what: str) -> object:
    """Return something odd."""
    loop = []
    loop.append(loop)
    given = {"digits": 10**5000, "keys": {(1, 2): 3}, "loop": loop, "mute": Mute(), "half": "\\ud800"}
    return given[what]


def raise_mute() -> None:
    """Raise an exception without a text."""
    raise Mute


async def cancel() -> None:
    """Be cancelled."""
    raise asyncio.CancelledError


async def cancel_itself() -> None:
    """Cancel the task that runs it."""
    asyncio.current_task().cancel()
    await asyncio.sleep(60)


async def exit_later() -> None:
    """Exit."""
    sys.exit(3)


at_once = most_at_once = 0


async def count() -> int:
    """Return how many calls have run at once."""
    global at_once, most_at_once
    at_once += 1
    most_at_once = max(most_at_once, at_once)
    await asyncio.sleep(0.001)
    at_once -= 1
    return most_at_once


def bare(a, b: int) -> int:
    """Add."""


def silent(a: int) -> int:
    return a


def many(*numbers: int) -> int:
    """Add."""


def odd(where: threading.Event) -> int:
    """Wait."""


number = 3


def fork() -> int:
    """Return the number of a copy."""
    return os.fork()


async def fork_later() -> int:
    """Return the number of a copy."""
    return os.fork()
'''


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with functions of one's own, which Python finds."""
    monkeypatch.syspath_prepend(str(here))
    name = f"own_tools_{abs(hash(str(here))):x}"
    (here / f"{name}.py").write_text(OWN)
    return name


def answers(own: str, names: str, turn: str, **options: Any) -> tuple[list[str], int, int]:
    """Return what the policy reads of the calls of a turn, and how many there were and failed."""
    table = {"tools": [f"{own}.{name}" for name in names.split()], "calls": "python", **options}
    with opened(registry.plugin("environments", "tools"), table) as open_one:
        episode = open_one()
        observation, reward, done = _waited(episode.step(turn))
        assert (reward, done) == (None, False)
        assert {message["role"] for message in observation} == {"tool"}
        return [message["content"] for message in observation], episode.tool_calls, episode.tool_errors


def _waited(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def test_what_a_call_returns_is_what_the_policy_reads(own: str) -> None:
    assert answers(own, "add", "add(2, b=3)") == (["5"], 1, 0)


@pytest.mark.parametrize("name", ["fork", "fork_later"])
def test_a_fork_in_a_function_leaves_no_copy_of_the_worker(own: str, name: str) -> None:
    ((copy,), calls, errors) = answers(own, name, f"{name}()")
    assert (calls, errors) == (1, 0)
    wait_until(lambda: not is_copy(int(copy)))


def is_copy(process: int) -> bool:
    """Whether a child runs on; one that has ended did so of its own, before anything else ran in it."""
    found, status = os.waitpid(process, os.WNOHANG)
    assert found == 0 or os.waitstatus_to_exitcode(status) == 0
    return found == 0


def test_the_calls_of_a_turn_run_at_the_same_time(own: str) -> None:
    assert answers(own, "meet", "meet()\nmeet()") == (["(nothing)"] * 2, 2, 0)
    assert answers(own, "wait add", "wait()\nadd(1, 1)") == (["null", "2"], 2, 0)


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        ("sub(1, 2)", "error: there is no function 'sub'; there is add, stuck, leave"),
        ("add(1)", "error: add: b: Field required"),
        ("add(1, 2, 3)", "error: add: takes a, b, each once"),
        ("add(1, a=2)", "error: add: takes a, b, each once"),
        ('add(1, "2")', "error: add: b: Input should be a valid integer"),
        ("stuck()", "error: stuck took longer than 0.3 s"),
        ("leave()", "error: leave: SystemExit: 3"),
    ],
)
def test_what_is_wrong_with_a_call_is_what_the_policy_reads(own: str, turn: str, said: str) -> None:
    assert answers(own, "add stuck leave", turn, call_limit_s=0.3) == ([said], 1, 1)
    assert answers(own, "add stuck leave", turn, call_limit_s=0.3, wrong_call="!")[0] == ["!"]


DEEP = "(" * 90 + "1" + ",)" * 90  # a tuple of a tuple


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        *(
            (f"add({value}, 2)", "error: add: an argument is not a plain value")
            for value in ("b'x'", "{1, 2}", "1j", "...", "{(1, 2): 3}", "0x" + "f" * 5000)
        ),
        (f"add({DEEP}, 2)", "error: add: a: Input should be a valid integer"),
        ("give('\\ud800')", "error: give: Invalid JSON: "),
        ("give('digits')", "error: give: what it returned cannot be written as JSON (ValueError)"),
        ("give('keys')", "error: give: what it returned cannot be written as JSON (TypeError)"),
        ("give('loop')", "error: give: what it returned cannot be written as JSON (ValueError)"),
        ("give('mute')", "error: give: what it returned cannot be written as JSON (RuntimeError)"),
        ("raise_mute()", "error: raise_mute: Mute"),
        ("cancel()", "error: cancel: CancelledError"),
        ("cancel_itself()", "error: cancel_itself: CancelledError"),
        ("exit_later()", "error: exit_later: SystemExit: 3"),
    ],
)
def test_nothing_that_a_call_takes_or_returns_ends_the_episode(own: str, turn: str, said: str) -> None:
    ((read,), calls, errors) = answers(own, "add give raise_mute cancel cancel_itself exit_later", turn)
    assert read.startswith(said)
    assert (calls, errors) == (1, 1)


def test_half_a_character_is_replaced(own: str) -> None:
    assert answers(own, "give", "give('half')") == (["?"], 1, 0)


def test_the_calls_of_a_turn_are_bounded(own: str) -> None:
    read, calls, errors = answers(own, "count", "count();" * 40)
    assert read[-1] == "error: only the first 32 of the turn's 40 calls were made"
    assert max(map(int, read[:-1])) == 8
    assert (calls, errors) == (33, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"tools": ["OWN.bare"]},
            "'OWN.bare': its parameter 'a' has no type hint; write one, such as a: int",
        ),
        ({"tools": ["OWN.silent"]}, "'OWN.silent': it has no docstring"),
        ({"tools": ["OWN.many"]}, "'OWN.many': its parameter 'numbers' is variadic positional; a call gives"),
        ({"tools": ["OWN.odd"]}, "'OWN.odd': its parameters cannot be written as JSON"),
        ({"tools": ["OWN.number"]}, "is of type int, not a function"),
        ({"tools": ["OWN.ad"]}, "tools: 'OWN.ad' cannot be loaded as a function"),
        ({"tools": ["OWN.add", "OWN.add"]}, "two functions are called 'add'"),
        ({"tools": []}, "tools: got []; needs a list of dotted paths"),
        ({"tools": [1]}, "tools: got [1]; needs a list of strings"),
        ({"sandbox_options": 3}, "sandbox_options: got 3; needs a table"),
        ({"calls": "xml"}, "calls: got 'xml'; needs one of 'template', 'python'"),
        ({"tool": []}, "did you mean 'tools'?"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_an_error_before_the_run(
    own: str, options: Mapping[str, Any], said: str
) -> None:
    given = json.loads(json.dumps(options).replace("OWN", own))
    with pytest.raises(ConfigError) as caught:
        parse({**GUESS, "environment": {"environment": "tools", "options": given}}, "c.toml")
    assert said.replace("OWN", own) in str(caught.value)


def test_the_calls_of_different_episodes_run_at_the_same_time(own: str) -> None:
    options = {"tools": [f"{own}.meet"], "calls": "python"}
    with opened(registry.plugin("environments", "tools"), options) as open_one:
        table = EnvironmentSection("tools", options, max_turns=1)
        episodes = Episodes(table, open_one, write("meet()"))
        (group,) = episodes.play([Prompt(0, "?", "")], type(HOW)(2, 100, 1.0))
        episodes.close()
    counts = [(one.episode.tool_calls, one.episode.tool_errors) for one in group.rollouts if one.episode]
    assert counts == [(1, 0)] * 2


@pytest.mark.parametrize("processes", [0, 1])
def test_an_answer_ends_the_episode_and_rows_count_calls(own: str, processes: int) -> None:
    options = {"tools": [f"{own}.add"], "calls": "python"}
    turns = iter(["add(2, 3)", "add(2)", "5"])

    def sample(asked: Any, how: Any) -> list[Rollout | None]:
        policy: Callable[..., Any] = write(next(turns))
        (one,) = policy(asked, how)
        return [one]

    table = EnvironmentSection("tools", options, processes=processes)
    with opened(registry.plugin("environments", "tools"), options) as open_one:
        episodes = Episodes(table, open_one, sample)  # type: ignore[arg-type]
        (group,) = episodes.play([Prompt(0, "2+3?", "5")], type(HOW)(1, 100, 1.0))
        episodes.close()
    (rollout,) = group.rollouts
    assert rollout.turns == ["add(2, 3)", "add(2)", "5"]
    assert [given.text for given in rollout.given] == ["5", "error: add: b: Field required"]
    assert rollout.episode
    assert (rollout.episode.reward, rollout.episode.error, rollout.truncated) == (None, "", False)
    summary = summary_of([rollout])
    assert summary
    assert (summary.tool_calls, summary.tool_errors) == (2, 1)


def test_programs_run_in_a_sandbox() -> None:
    box = ToolBox({"tools": ["python"], "sandbox": "process", "call_limit_s": 5.0}, HERMES)
    episode = open_episode(box)
    programs = ["print(6 * 7)", "1 / 0"]
    written = (json.dumps({"name": "python", "arguments": {"program": one}}) for one in programs)
    observation, _, _ = _waited(episode.step("".join(f"<tool_call>{one}</tool_call>" for one in written)))
    assert observation[0]["content"] == "42\n"
    assert observation[1]["content"].endswith(
        '"program.py", line 1, in <module>\nZeroDivisionError: division by zero\n'
    )
    box.close()
    assert episode.tool_errors == 0


def test_a_program_that_does_not_end_is_stopped() -> None:
    box = ToolBox({"tools": ["python"], "sandbox": "process", "call_limit_s": 0.3}, HERMES)
    with pytest.raises(ToolError, match=r"the program took longer than 0\.3 s"):
        box.tools["python"].function("while True: pass")
    assert box.tools["python"].function("print(1)") == "1\n"
    box.close()


def test_a_program_that_crashes_is_an_error() -> None:
    box = ToolBox({"tools": ["python"], "sandbox": "process"}, HERMES)
    with pytest.raises(ToolError, match="the program was ended by signal 11"):
        box.tools["python"].function("print(1, flush=True)\nimport ctypes; ctypes.string_at(0)")
    with pytest.raises(ToolError, match="forbidden system call"):
        box.tools["python"].function("import ctypes; ctypes.CDLL(None).mount(None, None, None, 0, None)")
    assert box.tools["python"].function("print(1)") == "1\n"
    box.close()
