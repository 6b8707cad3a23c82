"""Samplers that take time and compute nothing, for the benchmark `environments`."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from retrain.backends import Backend, Sampling, UpdateStats
from retrain.backends.rows import LiveTurn, Taken, TurnFeed
from retrain.base.event_loop import EventLoopThread
from retrain.base.rollouts import FirstTurn, Given, Group, NextTurn, Prompt, Rollout

ROWS = 32
TOKEN_S, TOKENS = 0.004, (10, 70)
WRITTEN = "x"


class Sampler:
    """A server with so many rows, and how long they were in use."""

    def __init__(self, seed: int = 0) -> None:
        self._free = asyncio.Semaphore(ROWS)
        self._chance = random.Random(seed)
        self.row_s = 0.0

    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        rollouts = (Rollout(prompt, WRITTEN, (), np.zeros(0), (), truncated=False) for prompt in prompts)
        written = await asyncio.gather(*map(self._write, rollouts))
        return [Group(prompt, (one,)) for prompt, one in zip(prompts, written, strict=True)]

    async def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        told = (replace(one.rollout, given=(*one.rollout.given, said(one))) for one in turns)
        return await asyncio.gather(*map(self._write, told))

    async def _write(self, rollout: Rollout) -> Rollout:
        await self.take_row()
        return with_token(rollout)

    async def take_row(self) -> None:
        """Use a row for as long as a turn takes."""
        took_s = TOKEN_S * self._chance.randint(*TOKENS)
        async with self._free:
            began_s = time.perf_counter()
            await asyncio.sleep(took_s)
            self.row_s += time.perf_counter() - began_s


class Once:
    """A feed of the turns of one call."""

    def __init__(self, turns: Sequence[FirstTurn | NextTurn]) -> None:
        self._due = [LiveTurn(turn, number) for number, turn in enumerate(turns)]
        self.found: dict[int, Rollout] = {}

    def take(self, under_way: int) -> Sequence[LiveTurn]:
        due, self._due = self._due, []
        return due

    def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
        self.found |= {live.stream: one for live, one in taken if isinstance(one, Rollout)}


class InProcess(Sampler):
    """A sampler in the process of the run, with so many rows, which draws a token of each at a time."""

    async def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        found = self._at_once([FirstTurn(prompt, sampling.max_tokens) for prompt in prompts], sampling)
        return [Group(prompt, (one,)) for prompt, one in zip(prompts, found, strict=True)]

    async def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        return [*self._at_once(turns, sampling)]

    def _at_once(self, turns: Sequence[FirstTurn | NextTurn], sampling: Sampling) -> list[Rollout]:
        self.sample_turns(call := Once(turns), sampling)
        return [call.found[number] for number in range(len(turns))]

    def sample_turns(self, feed: TurnFeed, sampling: Sampling) -> None:
        waiting: deque[LiveTurn] = deque()
        running: dict[LiveTurn, int] = {}  # tokens that are left
        while True:
            waiting.extend(feed.take(len(running) + len(waiting)))
            if not (running or waiting):
                return
            while waiting and len(running) < ROWS:
                running[waiting.popleft()] = self._chance.randint(*TOKENS)
            began_s = time.perf_counter()
            time.sleep(TOKEN_S)
            self.row_s += (time.perf_counter() - began_s) * len(running)
            running = {turn: left - 1 for turn, left in running.items()}
            if ended := [turn for turn, left in running.items() if not left]:
                running = {turn: left for turn, left in running.items() if left}
                feed.answer([(turn, written(turn)) for turn in ended])


class Instant(Sampler):
    """A sampler that takes no time, so that only what surrounds it is measured."""

    async def take_row(self) -> None:
        """Do nothing."""

    def sample_turns(self, feed: TurnFeed, sampling: Sampling) -> None:
        while asked := feed.take(0):
            feed.answer([(turn, written(turn)) for turn in asked])


class SimulatedBackend(Backend):
    """A sampler as a backend, which waits for the sampler's coroutines; it does not learn."""

    def __init__(self, sampler: Sampler, calls: EventLoopThread) -> None:
        self._sampler, self._calls = sampler, calls

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        return self._calls.wait_for(self._sampler.sample(prompts, sampling))

    def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        return self._calls.wait_for(self._sampler.extend(turns, sampling))

    def update(self, *args: object) -> UpdateStats:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        raise NotImplementedError

    def load(self, directory: Path) -> None:
        raise NotImplementedError


def written(live: LiveTurn) -> Rollout:
    """Return the rollout of a turn with a token more."""
    turn = live.turn
    if isinstance(turn, FirstTurn):
        return Rollout(turn.prompt, WRITTEN, (1,), np.zeros(1), (WRITTEN,), truncated=False)
    return with_token(replace(turn.rollout, given=(*turn.rollout.given, said(turn))))


def with_token(rollout: Rollout) -> Rollout:
    tokens, pieces = (*rollout.tokens, 1), (*rollout.pieces, WRITTEN)
    return replace(rollout, tokens=tokens, pieces=pieces, logprobs=np.zeros(len(tokens)))


def said(turn: NextTurn) -> Given:
    """Return what an environment said, as a backend would append it."""
    return Given(len(turn.rollout.tokens), (2,), turn.messages[0][1])
