"""Plugins that tests name by dotted path, as users do."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

from retrain import Prompt, Task, UnscoredError


def always_right(completion: str, prompt: Prompt) -> float:
    return 1.0


def never_right(completion: str, prompt: Prompt) -> float:
    return 0.0


def not_a_number(completion: str, prompt: Prompt) -> float:
    return float("nan")


def unreachable(completion: str, prompt: Prompt) -> float:
    address = f"http://me:{os.environ['PASSWORD']}@127.0.0.1/judge"
    raise ConnectionError(f"no answer from {address}")


def quoting(completion: str, prompt: Prompt) -> float:
    key = os.environ["PASSWORD"]
    print("asking with Bearer", key)
    print("asking with", key, file=sys.stderr)
    raise RuntimeError(
        f"401 for https://judge/v1?api_key={key}&n=1, headers {{'Authorization': 'Bearer {key}'}}"
    )


def quoting_unscored(completion: str, prompt: Prompt) -> float:
    key = os.environ["PASSWORD"]
    if completion.startswith("1"):
        return 1.0
    print(f"HTTP 401 with token={key}")
    raise UnscoredError(f"refused: https://judge/v1?api_key={key}")


def broken(completion: str, prompt: Prompt) -> float:
    raise RuntimeError("this reward is broken [bold]on purpose[/bold]\x1b[31m")


def slow(completion: str, prompt: Prompt) -> float:
    time.sleep(0.02)
    return float(completion == prompt.answer)


def held(completion: str, prompt: Prompt, *, gate: str) -> float:
    """Return no answer before somebody has made a file."""
    while not Path(gate).exists():
        time.sleep(0.05)
    return float(completion == prompt.answer)


def slow_until(completion: str, prompt: Prompt, *, gate: str, wait_s: float = 0.1) -> float:
    """Take some time before somebody has made a file."""
    if not Path(gate).exists():
        time.sleep(wait_s)
    return float(completion == prompt.answer)


def killed_once(completion: str, prompt: Prompt, *, flag: str) -> float:
    """End the process as the kernel does when memory runs out, the first time only."""
    try:
        Path(flag).touch(exist_ok=False)
    except FileExistsError:
        return float(completion == prompt.answer)
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def noted(completion: str, prompt: Prompt) -> float:
    """Write down which prompt was scored."""
    with Path(os.environ["NOTES"]).open("a") as notes:
        notes.write(f"{prompt.id}\n")
    return float(completion == prompt.answer)


def idle() -> float:
    return 0.0


def loads_from_a_file() -> float:
    return float(Path(os.environ["LOAD_FILE"]).read_text())


def hangs_once(completion: str, prompt: Prompt, *, flag: str) -> float:
    """Never answer, the first time only, and take no notice of a polite request to leave."""
    try:
        Path(flag).touch(exist_ok=False)
    except FileExistsError:
        return 0.0
    while True:
        time.sleep(3600)


def held_out_secrets(*, seed: int = 0) -> Task:
    secrets = tuple(Prompt(number, "?", str(number)) for number in range(3))
    return Task(train=secrets, held_out=secrets, alphabet="012<=>?", longest_answer=1)


def doubled(number: int) -> int:
    """Return twice a number."""
    return 2 * number


def nothing_held_out(*, seed: int = 0) -> Task:
    return Task(train=(Prompt(0, "1", "2"),), held_out=(), alphabet="12", longest_answer=1)


def umlauts(*, seed: int = 0) -> Task:
    return Task(train=(), held_out=(Prompt(0, "ä", "ö"),), alphabet="äö", longest_answer=1)


def longest_once_there(completion: str, prompt: Prompt, *, gate: str) -> float:
    """Return how long a completion is; the server that would say it does not answer before a file is made."""
    if gate and not Path(gate).exists():
        raise ConnectionError("no answer")
    return float(len(completion))


class AsksToStop:
    """An episode of two turns, during which the run is asked to stop."""

    STOP = threading.Event()

    def start(self, prompt: Prompt) -> str:
        self.turns = 0
        return prompt.text

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.STOP.set()
        self.turns += 1
        return "=", 0.0, self.turns == 2


CALLS_LEFT: list[None] = []  # of the reward below, until the run is asked to stop


def asks_to_stop(completion: str, prompt: Prompt) -> float:
    if CALLS_LEFT:
        CALLS_LEFT.pop()
        if not CALLS_LEFT:
            AsksToStop.STOP.set()
    return float(len(completion) % 2)
