"""Rewards that tests name by dotted path: good ones, and ones that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from pathlib import Path

import numpy as np

from retrain import InfrastructureError, Prompt, Score, TrainerState, UnscoredError


def length(completion: str, prompt: Prompt, *, longest: int = 100) -> float:
    return min(len(completion), longest) / longest


def spelled(completion: str, prompt: Prompt, *, bonus: float = 0.0) -> float:
    return bonus + sum(map(ord, completion)) % 7 / 10


async def slowly_right(completion: str, prompt: Prompt) -> float:
    await asyncio.sleep(0)
    return float(completion == prompt.answer)


def by_command(completion: str, prompt: Prompt) -> float:
    """Do what the completion says."""
    print("a reward may print")
    match completion:
        case "raise":
            raise RuntimeError("asked to raise")
        case "unscored":
            raise UnscoredError("asked not to tell")
        case "late":
            raise TimeoutError("asked to be late")
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit(3)
        case "hang":
            re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter's lock for hours
        case "pause":
            ctypes.PyDLL(None).pause()  # holds the interpreter's lock, and no core
        case "nan":
            return float("nan")
        case "pid":
            return float(os.getpid())
    return float(completion == prompt.answer)


async def by_command_later(completion: str, prompt: Prompt) -> float:
    return by_command(completion, prompt)


def held(completion: str, prompt: Prompt, *, gate: str) -> float:
    """Hold a completion that says so until somebody has made a file."""
    while completion == "held" and not Path(gate).exists():
        time.sleep(0.01)
    return 1.0


async def held_later(completion: str, prompt: Prompt, *, gate: str) -> float:
    while completion == "held" and not Path(gate).exists():
        await asyncio.sleep(0.01)
    return 1.0


def with_child(completion: str, prompt: Prompt, *, pids: str) -> float:
    """Start a process that outlives everything, write down its pid and the own, and wait for ever."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(pids).write_text(f"{os.getpid()} {child.pid}")
    child.wait()
    return 0.0


def writing(completion: str, prompt: Prompt) -> float:
    """Write the completion, bytes as they are, to every pipe there is, as a library gone astray might."""
    for fd in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(fd, completion.encode("latin-1"))
    return 0.25


def a_million(completion: str, prompt: Prompt) -> float:
    return {"right": 1.0, "wrong": 0.0, "below": -0.5, "nan": float("nan")}.get(completion, 1_000_000.0)


def odd(completion: str, prompt: Prompt) -> object:
    """Return what no reward should."""
    values = {"none": None, "text": "0.5", "list": [1.0], "true": True, "large": 1e300}
    return np.array([0.5, 1.0]) if completion == "array" else values[completion]


async def odd_later(completion: str, prompt: Prompt) -> object:
    return odd(completion, prompt)


async def gives_up(completion: str, prompt: Prompt) -> float:
    """Fail as a client does that cancels, or whose surroundings failed."""
    if completion == "cancelled":
        raise asyncio.CancelledError
    if completion == "wrong":
        return 0.0
    raise InfrastructureError("the network is down")


def once_there(completion: str, prompt: Prompt, *, needs: str) -> float:
    """Score nothing until a file is there."""
    if not Path(needs).exists():
        raise TimeoutError("not there yet")
    return 1.0


def by_source(completion: str, prompt: Prompt) -> float:
    return {"sort": 0.25, "sums": 0.75}[prompt.source]


def by_answer(completion: str, answer: str) -> float:
    return float(answer.endswith(completion))


def with_parts(completion: str, prompt: Prompt, *, value: object = 1.0) -> object:
    """Score with a number beside the reward, which "odd" completions lack."""
    return float(completion == "right"), {"length": None if completion == "odd" else value, "even": 1}


def named(completion: str, prompt: Prompt, *, part: str) -> object:
    return Score(0.0, parts={part: 1.0})


def parts_as_in_trl(completions, **columns):
    return [None if c == "unscored" else (float(c == "right"), {"letters": len(c)}) for c in completions]


def as_in_trl(completions, solution, *, bonus: float = 0.0, **columns):
    """Score as TRL's functions do: once for all completions, None where it cannot tell."""
    assert columns.keys() == {
        "prompts",
        "answer",
        "level",
        "completion_ids",
        "trainer_state",
        "log_metric",
        "log_extra",
    }
    return [
        None if completion == "unscored" else float(completion == wanted) + bonus * level
        for completion, wanted, level in zip(completions, solution, columns["level"], strict=True)
    ]


async def as_in_trl_later(completions, answer):
    return [float(completion == wanted) for completion, wanted in zip(completions, answer, strict=True)]


def chatting_as_in_trl(prompts, completions):
    return [
        float(said[0]["content"] == asked[-1]["content"])
        for asked, said in zip(prompts, completions, strict=True)
    ]


def late_as_in_trl(prompts, completions, completion_ids, trainer_state, **columns):
    """Return progress, plus a hundredth of the first token of each completion."""
    done = trainer_state.global_step / trainer_state.max_steps
    assert all(type(ids) is list for ids in completion_ids)
    return [done + ids[0] / 100 for ids in completion_ids]


def playing_as_in_trl(completions, environments, level):
    return [0.0 for _ in completions]


def logging_as_in_trl(completions, log_metric, log_extra, level):
    """Log as TRL's functions do: a number per call, and a column of texts."""
    log_metric("Levels/mean", sum(level) / len(level))
    log_extra("words", completions)
    return [float(completion == "right") for completion in completions]


def alone_as_in_trl(completions, **columns):
    return 1.0


def mean_as_in_trl(completions, **columns):
    return np.array(1.0)


def too_few_as_in_trl(completions, **columns):
    return [1.0]


def nothing_as_in_trl(completions: list[str], **columns: object) -> None:
    """Forget to return the rewards."""


class Grader:
    """A reward that is an object."""

    async def __call__(self, completion: str, prompt: Prompt) -> float:
        return float(completion == prompt.answer)


grader = Grader()


def wrapped(completion: str, prompt: Prompt) -> Awaitable[float]:
    """Hand on a coroutine, as a decorator does."""
    return by_command_later(completion, prompt)


def in_main_thread(completion: str, prompt: Prompt) -> float:
    return float(threading.current_thread() is threading.main_thread())


async def waiting_for_ever(completion: str, prompt: Prompt) -> float:
    if completion == "hang":
        await asyncio.Event().wait()
    return float(completion == prompt.answer)


def at_random(completion: str, prompt: Prompt) -> float:
    """Score as a judge does that never says the same thing twice."""
    return int.from_bytes(os.urandom(4), "big") / 2**32


def better_and_better(completions: list[str], trainer_state: TrainerState, **columns: object) -> list[float]:
    return [trainer_state.global_step / 100] * len(completions)


def worse_and_worse(completions: list[str], trainer_state: TrainerState, **columns: object) -> list[float]:
    return [0.8 if trainer_state.global_step <= 2 else 0.2] * len(completions)  # never quite right


def away_after_two_steps(
    completions: list[str], trainer_state: TrainerState, answer: list[str], **columns: object
) -> list[float]:
    """Score as a judge does that leaves, and is back once somebody has removed the file that says so."""
    if trainer_state.global_step >= 2 and Path("the judge is away").exists():
        raise TimeoutError("the judge is away")
    return [float(one[:1] == right[:1]) for one, right in zip(completions, answer, strict=True)]


def in_a_sandbox_of_its_own(completion: str, prompt: Prompt, *, sandbox: bool = False) -> float:
    """Take a word that means something else here."""
    return float(sandbox is False)
