"""Scores many completions by a function in killable processes, with a time limit per call.

The limit counts from the start of a call, not from its place in the queue, and holds even if the call
hangs in C: the process is killed and replaced, and other calls are not affected. Processes are fresh
interpreters, started when first needed; they end with the run, however it ends.

A reply is one line of JSON, which repeats the call's token. Scored code may write to the pipe too: anything
but exactly one valid line is garbage, and nothing that arrives with it counts as a reward. A process ends,
with all of its children, as soon as its standard input closes; one whose call cannot be interrupted (a C
function that holds the GIL), by a kernel timer.

concurrent.futures cannot kill a single call. It and pebble unpickle what a worker writes, and their
replies carry no token, so scored code that writes to the pipe could forge rewards.
"""

from __future__ import annotations

import json
import resource
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

from retrain.base.errors import ConfigError, InfrastructureError, RunFailedError
from retrain.base.event_loop import result_of
from retrain.base.line_process import LineProcess, lines_of, private_pipes
from retrain.base.registry import find_function, takes
from retrain.base.rollouts import Parts, prompt_of
from retrain.base.user_code import fault_of, told_by
from retrain.plugins.rewards import (
    SPEC,
    Answer,
    MetricLog,
    Outcome,
    Score,
    TrainerState,
    UnscoredError,
    call_for_one,
    call_with_columns,
    one_each,
    score_of,
)
from retrain.plugins.rewards.threads import ThreadedScorer
from retrain.plugins.sandbox import with_sandbox

STARTUP_S = 120.0  # imports on a cold network disk; only a broken machine takes longer
BACKSTOP_S = 1.0  # if the run is gone, a process ends itself this long after a call's limit
LONGEST_MESSAGE = 2000  # characters of an error that are passed on
LONGEST_LINE = 1 << 16  # bytes; each of these characters is at most six bytes of JSON
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
    parts: Parts = field(default_factory=dict)  # of a reward


def line_of(token: str, reply: Reply) -> bytes:
    """Return the line that replies to a call ("" for the start)."""
    return json.dumps([token, reply.kind, reply.content, reply.parts]).encode() + b"\n"


def reply_in(received: bytes, token: str) -> Reply:
    """Return the reply to a call; GARBAGE unless that is all that was received."""
    line, _, more = received.partition(b"\n")
    try:
        of, kind, content, parts = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        of, kind, content, parts = None, "", None, {}
    kinds = AT_THE_START if of == "" else OF_A_CALL
    content_type = float if kind == ReplyKind.SCORED else str
    has_parts = isinstance(parts, dict) and all(
        type(value) in (float, type(None)) for value in parts.values()
    )
    is_form = isinstance(of, str) and isinstance(kind, str) and kind in kinds
    if not (is_form and has_parts and type(content) is content_type):
        return Reply(ReplyKind.GARBAGE, f"the scoring process wrote {line[:SHOWN]!r} instead of a reply")
    if more or of != token:
        return Reply(ReplyKind.GARBAGE, "the scoring process sent a reply that belongs to no call")
    return Reply(ReplyKind(kind), content, parts)


def _reply(process: LineProcess, token: str, limit_s: float) -> Reply:
    """Wait for the reply to a call; LATE or DIED if there is none."""
    try:
        received = process.receive(limit_s, LONGEST_LINE)
    except TimeoutError:
        return Reply(ReplyKind.LATE, f"took over {limit_s:g} s")
    return reply_in(received, token) if received else Reply(ReplyKind.DIED, "")


@dataclass(frozen=True)
class Setup:
    """What a process is told at its start."""

    target: str
    params: Mapping[str, Any]
    limit_s: float  # after which a call ends its process
    memory_bytes: int
    is_factory: bool
    sandbox: Mapping[str, Any]


class VerifierScorer(ThreadedScorer):
    """Scores with a built-in verifier: a completion that makes it fail or time out gets 0.

    Processes call the function at a dotted path with a completion, its prompt and `params`. With
    `is_factory`, they call what the function at that path returns, which loads what it needs.
    """

    UNKNOWN: ClassVar = {ReplyKind.UNSCORED, ReplyKind.GARBAGE}  # replies that leave a completion unscored

    def __init__(
        self,
        target: str,
        params: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        memory_bytes: int = 0,
        is_factory: bool = False,
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        """Start no process yet; `workers` 0 is one per core, `memory_bytes` 0 is no limit."""
        super().__init__(workers, "scoring")
        limit_s = timeout_s + BACKSTOP_S
        self._setup = Setup(target, dict(params), limit_s, memory_bytes, is_factory, dict(sandbox or {}))
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards the next three attributes
        self._idle: list[LineProcess] = []
        self._running: set[LineProcess] = set()  # idle or not
        self._is_closed = False

    def score_one(self, answer: Answer) -> Score:
        """Score a completion; a process that ends during the call is replaced once."""
        reply = self._call(answer)
        return self._score_of(answer, self._call(answer) if reply.kind is ReplyKind.DIED else reply)

    def close(self) -> None:
        """End all processes; safe to call twice."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(cancel_futures=True)  # soon: each waits for a process that was killed
        while self._idle:
            self._drop(self._idle.pop())

    def _score_of(self, answer: Answer, reply: Reply) -> Score:
        if isinstance(reply.content, float):
            return Score(reply.content, parts=reply.parts)
        outcome = Outcome.TIMEOUT if reply.kind in (ReplyKind.TIMEOUT, ReplyKind.LATE) else Outcome.ERROR
        value = None if reply.kind in self.UNKNOWN else 0.0
        is_unjudged = reply.kind is ReplyKind.UNSCORED
        return Score(value, outcome, reply.content, is_unjudged=is_unjudged, parts=reply.parts)

    def _call(self, answer: Answer) -> Reply:
        process, token = self._take(), secrets.token_hex(8)
        prompt = answer.prompt.in_json
        process.send([token, answer.completion, answer.tokens, astuple(answer.state), prompt])
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
            process = LineProcess("retrain.plugins.rewards.pool")
            self._running.add(process)
        process.send(vars(self._setup))
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


class FunctionScorer(VerifierScorer):
    """Scores with a user's function: an exception is a bug, and a completion whose call hangs is unscored."""

    UNKNOWN: ClassVar = set(ReplyKind)

    def _score_of(self, answer: Answer, reply: Reply) -> Score:
        """Return the score; raise RunFailedError, which names the prompt, if the function raised."""
        if reply.kind is ReplyKind.RAISED:
            raise RunFailedError(f"{reply.content}, for prompt {answer.prompt.id}")
        return super()._score_of(answer, reply)


def main() -> None:
    """Call the function in this process for each line of its standard input, until that closes."""
    requests, replies = private_pipes()
    setup = Setup(**json.loads(requests.readline()))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if setup.memory_bytes and sys.platform == "linux":  # other kernels do not enforce this limit
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, resource.RLIM_INFINITY))
    try:
        function = find_function("rewards", setup.target)
        if setup.is_factory:
            function = function()
    except (ImportError, AttributeError, ConfigError) as error:
        replies.write(line_of("", Reply(ReplyKind.FAILED, f"{setup.target!r} cannot be loaded: {error}")))
        return
    params = setup.params
    if all(takes(function, key) for key in setup.sandbox):
        params = with_sandbox(params, setup.sandbox)
    replies.write(line_of("", Reply(ReplyKind.READY, "")))
    for request in lines_of(requests):
        token, completion, tokens, state, prompt = json.loads(request)
        signal.setitimer(signal.ITIMER_REAL, setup.limit_s)
        scored = Answer(completion, prompt_of(*prompt), tuple(tokens), TrainerState(*state))
        reply = _called(function, scored, params)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(line_of(token, reply))


def _called(function: Callable[..., Any], answer: Answer, params: Mapping[str, Any]) -> Reply:
    result: Any
    log = MetricLog()
    try:
        if takes(function, SPEC.by_name):
            (result,) = one_each(result_of(call_with_columns(function, [answer], params, log)), 1)
            if result is None:
                return Reply(ReplyKind.UNSCORED, "the reward is None")
        else:
            result = result_of(call_for_one(function, answer, params))
        score = log.added_to(score_of(result))
        if score.value is None:
            return Reply(ReplyKind.UNSCORED, score.message[:LONGEST_MESSAGE], score.parts)
        return Reply(ReplyKind.SCORED, float(score.value), score.parts)
    except UnscoredError as error:
        return Reply(ReplyKind.UNSCORED, told_by(error)[:LONGEST_MESSAGE])
    except TimeoutError as error:
        return Reply(ReplyKind.TIMEOUT, told_by(error)[:LONGEST_MESSAGE])
    except Exception as error:  # noqa: BLE001 - this process's edge: the run handles it
        message = fault_of(error) or f"{type(error).__name__}: {error}"
        return Reply(ReplyKind.RAISED, message[:LONGEST_MESSAGE])


if __name__ == "__main__":
    main()
