"""A process that plays episodes for `retrain.environments.hosts`: one call for each line that it receives."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
from collections.abc import Callable, Mapping
from typing import Any

from retrain.environments import opened
from retrain.environments.episode import copies_ended, counts_of
from retrain.errors import ConfigError
from retrain.line_process import lines_of, private_pipes
from retrain.registry.code import located
from retrain.rollouts import CallForm, Prompt


def main() -> None:
    """Serve until standard input closes."""
    requests, replies = private_pipes()
    setup = json.loads(requests.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    form = CallForm(**setup["form"]) if setup["form"] else None
    try:
        with (
            opened(setup["environment"], setup["options"], form) as open_episode,
            asyncio.Runner() as runner,
        ):
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
            return self._waited_for(self._episodes[number].start(_prompt(*argument)))
        if what == "step":
            return self._waited_for(self._episodes[number].step(argument))
        close = getattr(self._episodes.pop(number, None), "close", None)
        return None if close is None else self._waited_for(close())

    def _waited_for(self, value: Any) -> Any:
        async def result() -> Any:
            return await value

        return self._runner.run(result()) if inspect.isawaitable(value) else value


def _prompt(number: int, text: str, answer: str, messages: list[list[str]], row: dict[str, Any]) -> Prompt:
    return Prompt(number, text, answer, tuple((role, content) for role, content in messages), row)


def _line(reply: Mapping[str, Any]) -> bytes:
    return json.dumps(reply, default=_plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return what JSON can hold of a value: a number of numpy's, or else how it is shown."""
    return value.item() if getattr(value, "ndim", None) == 0 else repr(value)


if __name__ == "__main__":
    main()
