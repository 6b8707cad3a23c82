"""Plays episodes in processes, which are killed if a call takes too long, and replaced if they end.

A process plays several episodes, one call at a time. Which of them made it end is not known for sure: threads
of one may do so during a call of another. So each is played again in a process of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.line_process import command_of, how_ended, kill_group, lines_of, private_pipes, variables
from retrain.base.rollouts import CallForm, Prompt, prompt_of
from retrain.base.user_code import located
from retrain.plugins.environments import opened
from retrain.plugins.environments.episode import (
    EpisodeError,
    EpisodeLostError,
    EpisodeTimeoutError,
    copies_ended,
    counts_of,
)

if TYPE_CHECKING:  # a process needs no schema
    from retrain.config.schema import EnvironmentSection

STARTUP_S = 120.0  # imports on a cold network disk; only a broken machine takes longer
LONGEST_LINE = 1 << 26  # bytes of a reply
RETIRES_AFTER = 1000  # episodes of a process, so that what they leak does not add up


class _Host:
    """One process; used within one event loop."""

    def __init__(self, setup: Mapping[str, Any], limit_s: float, *, is_alone: bool = False) -> None:
        self._setup, self._limit_s, self.is_alone = setup, limit_s, is_alone
        self._in_turn = asyncio.Lock()
        self._process: Process | None = None
        self._calls = 0
        self.is_gone = False
        self.opened = self.playing = 0  # episodes

    async def ask(self, number: int, what: str, argument: Any = None) -> tuple[Any, Sequence[int]]:
        """Make a call of an episode; return its result, and the episode's counts so far.

        Raises:
            EpisodeError: it failed, or the process of this episode alone ended.
            EpisodeLostError: the process that it shared with others ended.
        """
        async with self._in_turn:
            if self.is_gone:
                raise EpisodeLostError("the process that it shared with others ended")
            try:
                process = self._process or await self._begin()
                self._calls += 1
                _write(process, [self._calls, number, what, argument])
                reply = await self._reply(process, what, self._limit_s)
            except BaseException:  # nobody would read a reply that comes later
                self.kill()
                raise
        if "error" in reply:
            raise EpisodeError(reply["error"])
        return tuple(reply["value"]) if reply["is_tuple"] else reply["value"], reply["counts"]

    def kill(self) -> None:
        """Kill the process and its children; safe to call twice."""
        self.is_gone = True
        if self._process is not None and self._process.returncode is None:
            kill_group(self._process.pid)

    async def ended(self) -> None:
        """Wait until it is gone."""
        if self._process is not None:
            await self._process.wait()

    async def _begin(self) -> Process:
        self._process = await asyncio.create_subprocess_exec(
            *command_of(__name__),
            stdin=PIPE,
            stdout=PIPE,
            limit=LONGEST_LINE,
            start_new_session=True,  # one group to kill, and no Ctrl-C from the terminal
            env=variables(),
        )
        _write(self._process, self._setup)
        reply = await self._reply(self._process, "starting its process", STARTUP_S)
        if "error" in reply:
            raise EpisodeError(f"its process cannot open the environment: {reply['error']}")
        return self._process

    async def _reply(self, process: Process, what: str, limit_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise EpisodeTimeoutError(f"{what} took longer than {limit_s:g} s") from error
        except ValueError as error:
            raise EpisodeError(f"{what} returned more than {LONGEST_LINE >> 20} MiB") from error
        if not line:
            how = how_ended(await process.wait())
            kind = EpisodeError if self.is_alone else EpisodeLostError
            raise kind(f"its process ended {how} during {what}")
        reply: dict[str, Any] = json.loads(line)
        if reply["call"] != self._calls:  # by a copy of the process, which a fork left
            raise EpisodeError(f"its process answered another call during {what}")
        return reply


def _write(process: Process, message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message, default=str).encode() + b"\n")


class Hosts:
    """The processes of a run, started when first needed; used within one event loop."""

    def __init__(self, table: EnvironmentSection, form: CallForm | None) -> None:
        shown = None if form is None else asdict(form)
        self._setup = {"environment": table.environment, "options": table.options, "form": shown}
        self._limit_s = table.time_limit_s
        self._hosts: list[_Host | None] = [None] * table.processes
        self._retired: list[_Host] = []  # which end with their last episode
        self._alone = asyncio.Semaphore(table.processes)  # so many more processes, of one episode each

    def open(self, *, is_alone: bool) -> HostedEpisode:
        """Return an episode, which gets its process at the start."""
        return HostedEpisode(self, is_alone=is_alone)

    async def admit_alone(self) -> _Host:
        """Return a process for one episode, once fewer than `processes` play such."""
        await self._alone.acquire()
        host = _Host(self._setup, self._limit_s, is_alone=True)
        host.opened = host.playing = 1
        self._retired.append(host)
        return host

    def admit(self) -> _Host:
        """Return the process that plays the fewest episodes, for another one."""
        place = min(range(len(self._hosts)), key=lambda n: 0 if (h := self._hosts[n]) is None else h.playing)
        host = self._hosts[place]
        if host is None or host.is_gone or host.opened >= RETIRES_AFTER:
            if host is not None:
                self._retired.append(host)
            host = self._hosts[place] = _Host(self._setup, self._limit_s)
        host.opened += 1
        host.playing += 1
        return host

    async def leave(self, host: _Host) -> None:
        """Let an episode go, and a process that retires after its last one."""
        host.playing -= 1
        if host in self._retired and not host.playing:
            self._retired.remove(host)
            host.kill()
            if host.is_alone:
                self._alone.release()
            await host.ended()

    async def close(self) -> None:
        """End all processes."""
        for host in (*self._hosts, *self._retired):
            if host is not None:
                host.kill()
                await host.ended()


class HostedEpisode:
    """An episode that a process plays."""

    def __init__(self, hosts: Hosts, *, is_alone: bool) -> None:
        self._hosts, self._is_alone = hosts, is_alone
        self._host: _Host | None = None
        self._number = 0
        self.tool_calls = self.tool_errors = 0

    async def start(self, prompt: Prompt) -> Any:
        self._host = await self._hosts.admit_alone() if self._is_alone else self._hosts.admit()
        self._number = self._host.opened
        return await self._ask("start", prompt.in_json)

    async def step(self, completion: str) -> Any:
        return await self._ask("step", completion)

    async def close(self) -> None:
        if (host := self._host) is not None:
            try:
                if not host.is_gone:
                    await host.ask(self._number, "close")
            finally:
                await self._hosts.leave(host)

    async def _ask(self, what: str, argument: Any) -> Any:
        assert self._host is not None
        value, (self.tool_calls, self.tool_errors) = await self._host.ask(self._number, what, argument)
        return value


async def at_once(function: Callable[[], Any], unwanted: Callable[[Any], object]) -> Any:
    """Return what a function returns that takes no time."""
    return function()


def main() -> None:
    """Play episodes in this process: one call for each line of its standard input, until that closes."""
    requests, replies = private_pipes()
    setup = json.loads(requests.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    form = CallForm(**setup["form"]) if setup["form"] else None
    environment = registry.plugin("environments", setup["environment"])
    try:
        with opened(environment, setup["options"], form) as open_episode, asyncio.Runner() as runner:
            replies.write(_line({"call": 0}))
            table = _Table(open_episode, runner)
            for line in lines_of(requests):
                replies.write(table.answer(*json.loads(line)))
    except ConfigError as error:
        replies.write(_line({"call": 0, "error": str(error)}))
    except BrokenPipeError:  # the run was killed
        return


class _Table:
    """The episodes that this process plays, by number."""

    def __init__(self, open_episode: Callable[[], Any], runner: asyncio.Runner) -> None:
        self._open, self._runner = open_episode, runner
        self._episodes: dict[int, Any] = {}

    def answer(self, call: int, number: int, what: str, argument: Any) -> bytes:
        """Make a call; return a line with its number and value, or why it failed."""
        try:
            with copies_ended():
                value = self._call(number, what, argument)
            counts = counts_of(self._episodes.get(number))
            is_tuple = isinstance(value, tuple)
            return _line({"call": call, "value": value, "is_tuple": is_tuple, "counts": counts})
        except BaseException as error:  # noqa: BLE001 - the end of an episode, not of the process
            return _line({"call": call, "error": located(error)})

    def _call(self, number: int, what: str, argument: Any) -> Any:
        if what == "start":
            self._episodes[number] = self._waited_for(self._open())
            return self._waited_for(self._episodes[number].start(prompt_of(*argument)))
        if what == "step":
            return self._waited_for(self._episodes[number].step(argument))
        close = getattr(self._episodes.pop(number, None), "close", None)
        return None if close is None else self._waited_for(close())

    def _waited_for(self, value: Any) -> Any:
        async def result() -> Any:
            return await value

        return self._runner.run(result()) if inspect.isawaitable(value) else value


def _line(reply: Mapping[str, Any]) -> bytes:
    def plain(value: Any) -> Any:
        return value.item() if getattr(value, "ndim", None) == 0 else repr(value)  # a number of numpy's

    return json.dumps(reply, default=plain).encode() + b"\n"


if __name__ == "__main__":
    main()
