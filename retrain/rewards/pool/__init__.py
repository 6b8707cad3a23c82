"""Calls a function on many completions in killable processes, with a time limit per call.

The limit counts from the start of a call, not from its place in the queue, and holds even if the call
hangs in C: the process is killed and replaced, and other calls are not affected. Processes are fresh
interpreters, started when first needed; they end with the run, however it ends.

A reply is one line of JSON, which repeats the call's token. Scored code may write to the pipe too: anything
but exactly one valid line is garbage, and nothing that arrives with it counts as a reward.

concurrent.futures cannot kill a single call. It and pebble unpickle what a worker writes, and their
replies carry no token, so scored code that writes to the pipe could forge rewards.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, ClassVar

from retrain.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.line_process import LineProcess
from retrain.rewards import Answer, Outcome, Score
from retrain.rewards.threads import ScoringThreads

STARTUP_S = 120.0  # imports on a cold network disk; only a broken machine takes longer
BACKSTOP_S = 1.0  # if the run is gone, a process ends itself this long after a call's limit
LONGEST_LINE = 1 << 16  # bytes; a message is cut at 2,000 characters, each at most six bytes of JSON
SHOWN = 80  # bytes of garbage that are shown


class ReplyKind(StrEnum):
    """What a process replies at its start (the first two) and to a call, or why there is no reply."""

    READY = "ready"
    FAILED = "failed"  # the function cannot be loaded
    SCORED = "scored"  # with a number
    UNSCORED = "unscored"  # raised UnscoredError
    TIMEOUT = "timeout"  # raised TimeoutError
    RAISED = "raised"  # raised another exception
    LATE = "late"  # did not reply in time
    DIED = "died"  # ended its process
    GARBAGE = "garbage"  # wrote something other than one reply


AT_THE_START = (ReplyKind.READY, ReplyKind.FAILED)
OF_A_CALL = (ReplyKind.SCORED, ReplyKind.UNSCORED, ReplyKind.TIMEOUT, ReplyKind.RAISED)


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a call or a start, with the number or a message."""

    kind: ReplyKind
    content: float | str


def line_of(token: str, reply: Reply) -> bytes:
    """Return the line that replies to a call ("" for the start)."""
    return json.dumps([token, reply.kind, reply.content]).encode() + b"\n"


def reply_in(received: bytes, token: str) -> Reply:
    """Return the reply to a call; GARBAGE unless that is all that was received."""
    line, _, more = received.partition(b"\n")
    try:
        of, kind, content = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        of, kind, content = None, "", None
    known = AT_THE_START if of == "" else OF_A_CALL
    wanted = float if kind == ReplyKind.SCORED else str
    if not (isinstance(of, str) and isinstance(kind, str) and kind in known and type(content) is wanted):
        return Reply(ReplyKind.GARBAGE, f"the scoring process wrote {line[:SHOWN]!r} instead of a reply")
    if more or of != token:
        return Reply(ReplyKind.GARBAGE, "the scoring process sent a reply that belongs to no call")
    return Reply(ReplyKind(kind), content)


def _reply(process: LineProcess, token: str, limit_s: float) -> Reply:
    """Wait for the reply to a call; LATE or DIED if there is none."""
    try:
        received = process.receive(limit_s, LONGEST_LINE)
    except TimeoutError:
        return Reply(ReplyKind.LATE, f"took over {limit_s:g} s")
    return reply_in(received, token) if received else Reply(ReplyKind.DIED, "")


class ProcessPool:
    """Processes that call the function at a dotted path with a completion, its prompt and `params`.

    With `is_factory`, they call what the function at that path returns, which loads what it needs.
    """

    def __init__(
        self,
        target: str,
        params: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int = 0,
        is_factory: bool = False,
    ) -> None:
        """Start no process yet; `workers` 0 is one per core, `memory_bytes` 0 is no limit."""
        self._setup = {
            "target": target,
            "params": dict(params),
            "memory_bytes": memory_bytes,
            "limit_s": timeout_s + BACKSTOP_S,
            "is_factory": is_factory,
        }
        self._timeout_s = timeout_s
        self.threads = ScoringThreads(workers, "scoring")
        self._lock = threading.Lock()  # guards the next three attributes
        self._idle: list[LineProcess] = []
        self._running: set[LineProcess] = set()  # idle or not
        self._is_closed = False

    def run(self, answers: Sequence[Answer]) -> list[Reply]:
        """Call the function for every answer; replies come in the answers' order.

        Raises:
            ConfigError: the function cannot be loaded.
            InfrastructureError: processes do not start.
        """
        return self.threads.map(self._reply_to, answers)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()
        self.threads.close(wait=True)  # soon: each waits for a process that was killed
        while self._idle:
            self._drop(self._idle.pop())

    def _reply_to(self, answer: Answer) -> Reply:
        """Call the function; a process that ends during the call is replaced once."""
        reply = self._call(answer)
        return self._call(answer) if reply.kind is ReplyKind.DIED else reply

    def _call(self, answer: Answer) -> Reply:
        process, token, prompt = self._take(), secrets.token_hex(8), answer.prompt
        fields = (prompt.id, prompt.text, prompt.answer, prompt.messages, dict(prompt.row))
        process.send([token, answer.completion, answer.tokens, astuple(answer.state), *fields])
        reply = _reply(process, token, self._timeout_s)
        if reply.kind in OF_A_CALL:
            with self._lock:
                self._idle.append(process)
            return reply
        ending = self._drop(process)  # after garbage as well: its later lines cannot be trusted either
        return Reply(ReplyKind.DIED, ending) if reply.kind is ReplyKind.DIED else reply

    def _take(self) -> LineProcess:
        """Return a process that awaits a call: an idle one, unless it died or wrote something meanwhile."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None:
                return self._started()
            if process.is_silent():
                return process
            self._drop(process)

    def _started(self) -> LineProcess:
        with self._lock:
            if self._is_closed:
                raise InfrastructureError("closed while completions were scored")
            process = LineProcess("retrain.rewards.pool.worker")
            self._running.add(process)
        process.send(self._setup)
        reply = _reply(process, "", STARTUP_S)
        if reply.kind is ReplyKind.READY:
            return process
        ending = self._drop(process)
        if reply.kind is ReplyKind.FAILED:
            raise ConfigError(str(reply.content))
        why = ending if reply.kind is ReplyKind.DIED else reply.content
        raise InfrastructureError(f"a scoring process did not start: {why}")

    def _drop(self, process: LineProcess) -> str:
        """End a process that no other thread uses; return a description of how it ended."""
        with self._lock:
            self._running.discard(process)
        return process.end()


class VerifierScorer:
    """Scores with a built-in verifier: a completion that makes it fail or time out gets 0."""

    UNKNOWN: ClassVar = {ReplyKind.UNSCORED, ReplyKind.GARBAGE}  # replies that leave a completion unscored

    def __init__(self, pool: ProcessPool) -> None:
        self._pool = pool

    @property
    def scored(self) -> int:
        return self._pool.threads.scored

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        return [self._score_of(reply) for reply in self._pool.run(answers)]

    def close(self) -> None:
        self._pool.close()

    def _score_of(self, reply: Reply) -> Score:
        if isinstance(reply.content, float):
            return Score(reply.content)
        outcome = Outcome.TIMEOUT if reply.kind in (ReplyKind.TIMEOUT, ReplyKind.LATE) else Outcome.ERROR
        return Score(None if reply.kind in self.UNKNOWN else 0.0, outcome, reply.content)


class FunctionScorer(VerifierScorer):
    """Scores with a user's function: an exception is a bug, and a completion whose call hangs is unscored."""

    UNKNOWN: ClassVar = set(ReplyKind)

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        """Score every completion, in order.

        Raises:
            RunFailedError: the function raised; names the prompt.
        """
        replies = self._pool.run(answers)
        for answer, reply in zip(answers, replies, strict=True):
            if reply.kind is ReplyKind.RAISED:
                raise RunFailedError(f"{reply.content}, for prompt {answer.prompt.id}")
        return [self._score_of(reply) for reply in replies]
