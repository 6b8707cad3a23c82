"""Calls a function on many completions in killable processes, with a time limit per call.

The limit counts from the start of a call, not from its place in the queue, and holds even if the call
hangs in C: the process is killed and replaced, and other calls are not affected. Processes are fresh
interpreters, started when first needed; they end with the run, however it ends.

concurrent.futures cannot kill a single call. It and pebble unpickle what a worker writes, and their
replies carry no token, so scored code that writes to the pipe could forge rewards.
"""

from __future__ import annotations

import secrets
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from retrain.errors import ConfigError, InfrastructureError
from retrain.rewards import Answer
from retrain.rewards.pool.message import GARBAGE, Message, only
from retrain.rewards.pool.process import PoolProcess
from retrain.system import cpu_capacity

STARTUP_S = 120.0  # imports on a cold network disk; only a broken machine takes longer
BACKSTOP_S = 1.0  # if the run is gone, a process ends itself this long after a call's limit


class ReplyKind(StrEnum):
    """How a call ended."""

    SCORED = "scored"  # with a number
    UNSCORED = "unscored"  # raised UnscoredError, or wrote something other than a reply
    TIMEOUT = "timeout"  # raised TimeoutError, or was killed at the limit
    RAISED = "raised"  # raised another exception
    DIED = "died"  # ended its process


@dataclass(frozen=True, slots=True)
class Reply:
    """A call's outcome, with its value or a message."""

    kind: ReplyKind
    value: float = 0.0
    message: str = ""


@dataclass(frozen=True, slots=True)
class _Call:
    index: int
    token: str  # repeated in the reply
    deadline: float


@dataclass(frozen=True, slots=True)
class _Batch:
    """Answers, and the replies so far by index."""

    answers: Sequence[Answer]
    waiting: deque[int]
    replies: dict[int, Reply] = field(default_factory=dict)
    died: set[int] = field(default_factory=set)  # retried because their process died


class ProcessPool:
    """Processes that call the function at a dotted path with a completion, its prompt and `params`."""

    def __init__(
        self,
        target: str,
        params: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int = 0,
    ) -> None:
        """Start no process yet; `workers` 0 is one per core, `memory_bytes` 0 is no limit."""
        self._setup = {
            "target": target,
            "params": dict(params),
            "memory_bytes": memory_bytes,
            "limit_s": timeout_s + BACKSTOP_S,
        }
        self._timeout_s = timeout_s
        self._most = workers or max(1, round(cpu_capacity()))
        self._idle: list[PoolProcess] = []
        self._starting: dict[PoolProcess, float] = {}
        self._busy: dict[PoolProcess, _Call] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, answers: Sequence[Answer]) -> list[Reply]:
        """Call the function for every answer; replies come in the answers' order.

        Raises:
            ConfigError: the function cannot be loaded.
            InfrastructureError: processes do not start.
        """
        batch = _Batch(answers, deque(range(len(answers))))
        while len(batch.replies) < len(answers):
            while batch.waiting and self._idle:
                self._begin(batch)
            self._start(len(batch.waiting))
            for key, _ in self._selector.select(self._next_deadline_s()):
                self._receive(key.fileobj, batch)  # type: ignore[arg-type]
            self._expire(batch.replies)
        return [batch.replies[index] for index in range(len(answers))]

    def close(self) -> None:
        """End all processes; safe to call twice."""
        for process in [*self._idle, *self._starting, *self._busy]:
            self._drop(process)
        self._idle.clear()
        self._starting.clear()
        self._busy.clear()
        self._selector.close()

    def _start(self, wanted: int) -> None:
        running = len(self._starting) + len(self._busy) + len(self._idle)
        for _ in range(min(wanted - len(self._starting), self._most - running)):
            process = PoolProcess(self._setup)
            self._starting[process] = time.monotonic() + STARTUP_S
            self._selector.register(process, selectors.EVENT_READ)

    def _begin(self, batch: _Batch) -> None:
        process, index = self._idle.pop(), batch.waiting.popleft()
        answer = batch.answers[index]
        prompt, token = answer.prompt, secrets.token_hex(8)
        if process.send([token, answer.completion, prompt.id, prompt.text, prompt.answer]):
            self._busy[process] = _Call(index, token, time.monotonic() + self._timeout_s)
        else:  # it died while idle, not because of this answer
            self._drop(process)
            batch.waiting.appendleft(index)

    def _receive(self, process: PoolProcess, batch: _Batch) -> None:
        messages = process.receive()
        if messages == []:
            return
        if process in self._starting:
            del self._starting[process]
            self._started(process, only(messages, "") if messages else None)
        elif process in self._busy:
            call = self._busy.pop(process)
            self._finish(process, call.index, only(messages, call.token) if messages else None, batch)
        else:
            self._idle.remove(process)
            self._drop(process)

    def _finish(self, process: PoolProcess, index: int, message: Message | None, batch: _Batch) -> None:
        if message is not None and message.kind == GARBAGE:  # its later lines cannot be trusted either
            self._drop(process)
            batch.replies[index] = Reply(ReplyKind.UNSCORED, message=str(message.content))
            return
        if message is not None:
            batch.replies[index] = _reply(message)
            self._idle.append(process)
            return
        ending = self._drop(process)
        if index in batch.died:
            batch.replies[index] = Reply(ReplyKind.DIED, message=ending)
        else:
            batch.died.add(index)
            batch.waiting.append(index)

    def _started(self, process: PoolProcess, message: Message | None) -> None:
        if message is not None and message.kind == "ready":
            self._idle.append(process)
            return
        ending = self._drop(process)
        if message is not None and message.kind == "failed":
            raise ConfigError(str(message.content))
        what = ending if message is None else str(message.content)
        raise InfrastructureError(f"a scoring process did not start: {what}")

    def _expire(self, replies: dict[int, Reply]) -> None:
        now = time.monotonic()
        for process, call in list(self._busy.items()):
            if call.deadline <= now:
                del self._busy[process]
                self._drop(process)
                replies[call.index] = Reply(ReplyKind.TIMEOUT, message=f"took over {self._timeout_s:g} s")
        if any(deadline <= now for deadline in self._starting.values()):
            raise InfrastructureError(f"scoring processes did not start in {STARTUP_S:g} s")

    def _drop(self, process: PoolProcess) -> str:
        self._selector.unregister(process)
        return process.kill()

    def _next_deadline_s(self) -> float:
        deadlines = [*self._starting.values(), *(call.deadline for call in self._busy.values())]
        return max(0.0, min(deadlines, default=0.0) - time.monotonic())


def _reply(message: Message) -> Reply:
    if isinstance(message.content, float):
        return Reply(ReplyKind.SCORED, value=message.content)
    return Reply(ReplyKind(message.kind), message=message.content)
