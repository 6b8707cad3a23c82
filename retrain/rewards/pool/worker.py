"""A scoring process of `retrain.rewards.pool`: calls one function for each line that it receives.

It ends, with all of its children, as soon as its standard input closes, so nothing is left behind however
the run ends. A call that cannot be interrupted (a C function that holds the GIL) is ended by a kernel
timer.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from retrain.errors import ConfigError
from retrain.event_loop import result_of
from retrain.line_process import lines_of, private_pipes
from retrain.registry import fault_of, find_function, takes
from retrain.registry.code import told_by
from retrain.rewards import SPEC, Answer, TrainerState, UnscoredError, number_of
from retrain.rewards.columns import call_for_one, call_with_columns
from retrain.rewards.pool import Reply, ReplyKind, line_of
from retrain.rollouts import Prompt

LONGEST_MESSAGE = 2000  # characters of an error that are passed on


def main() -> None:
    """Serve until standard input closes."""
    requests, replies = private_pipes()
    setup = json.loads(requests.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run handles Ctrl-C
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    if setup["memory_bytes"] and sys.platform == "linux":  # other kernels do not enforce this limit
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], resource.RLIM_INFINITY))
    try:
        function = find_function("rewards", setup["target"])
        if setup["is_factory"]:
            function = function()
    except (ImportError, AttributeError, ConfigError) as error:
        replies.write(line_of("", Reply(ReplyKind.FAILED, f"{setup['target']!r} cannot be loaded: {error}")))
        return
    replies.write(line_of("", Reply(ReplyKind.READY, "")))
    for request in lines_of(requests):
        token, completion, tokens, state, number, text, answer, messages, row = json.loads(request)
        prompt = Prompt(number, text, answer, tuple(map(tuple, messages)), row)
        signal.setitimer(signal.ITIMER_REAL, setup["limit_s"])
        scored = Answer(completion, prompt, tuple(tokens), TrainerState(*state))
        reply = _call(function, scored, setup["params"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(line_of(token, reply))


def _call(function: Callable[..., Any], answer: Answer, params: Mapping[str, Any]) -> Reply:
    result: Any
    try:
        if takes(function, SPEC.by_name):
            (result,) = result_of(call_with_columns(function, [answer], params))
            if result is None:
                return Reply(ReplyKind.UNSCORED, "the reward is None")
        else:
            result = call_for_one(function, answer, params)
        return Reply(ReplyKind.SCORED, number_of(result_of(result)))
    except UnscoredError as error:
        return Reply(ReplyKind.UNSCORED, told_by(error)[:LONGEST_MESSAGE])
    except TimeoutError as error:
        return Reply(ReplyKind.TIMEOUT, told_by(error)[:LONGEST_MESSAGE])
    except Exception as error:  # noqa: BLE001 - this process's edge: the run handles it
        told = fault_of(error) or f"{type(error).__name__}: {error}"
        return Reply(ReplyKind.RAISED, told[:LONGEST_MESSAGE])


if __name__ == "__main__":
    main()
