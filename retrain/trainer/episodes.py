"""Plays episodes: each is a task of an event loop, and turns are sampled in batches as they come.

The caller's thread samples whatever is asked for when it looks, while other environments answer. It waits
for plain functions, so all their episodes take their turns together, and a seed gives the same episodes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from retrain.backends import EpisodeProgress, Sampling, ignore_progress, never
from retrain.config.schema import Environment
from retrain.demonstrations import next_prompt
from retrain.environments.episode import (
    MOST_RETRIES,
    Conversation,
    EpisodeError,
    EpisodeLostError,
    EpisodeTimeoutError,
    finite,
    in_own_thread,
    within,
)
from retrain.environments.hosts import Hosts, at_once
from retrain.environments.in_turn import InTurn
from retrain.environments.own_loop import OwnLoop
from retrain.errors import PromptError
from retrain.event_loop import EventLoopThread
from retrain.records.step_row import EpisodeSummary
from retrain.rollouts import CallForm, Episode, FirstTurn, Group, NextTurn, Prompt, Rollout
from retrain.trainer.desk import Asked, Desk, Taken
from retrain.trainer.played import Played
from retrain.trainer.turn_calls import TurnCalls

if TYPE_CHECKING:
    from retrain.trainer.programs import Programs

T = TypeVar("T")
SampleTurns: TypeAlias = Callable[[Sequence[Asked], Sampling], Sequence[Taken]]
SampleGroups: TypeAlias = Callable[[Sequence[Prompt], Sampling], list[Group]]


@dataclass(frozen=True)
class TurnSampler:
    """Samples turns with a backend."""

    backend: Any  # `extend` is optional in the protocol
    calls: EventLoopThread
    max_turn_tokens: int  # 0: `max_tokens` alone is the limit

    def __call__(self, asked: Sequence[Asked], how: Sampling) -> list[Taken]:
        """Sample the first turns, then the others; an error in place of one that cannot be read."""
        limit = min(how.max_tokens, self.max_turn_tokens or how.max_tokens)
        first = [FirstTurn(one, limit) if isinstance(one, Prompt) else one for one in asked]
        begun = [one for one in first if isinstance(one, FirstTurn)]
        further = [one for one in first if isinstance(one, NextTurn)]

        part = count()

        def begin(some: Sequence[FirstTurn]) -> list[Taken]:
            """Sample with one call for each limit."""
            taken: dict[int, Taken] = {}
            for most in sorted({one.max_tokens for one in some}):
                alike = [number for number, one in enumerate(some) if one.max_tokens == most]
                own = replace(_of_its_own(how, next(part)), max_tokens=most)
                groups = self.calls.wait_for(self.backend.sample([some[n].prompt for n in alike], own))
                taken |= zip(alike, (group.rollouts[0] for group in groups), strict=True)
            return [taken[number] for number in range(len(some))]

        def extend(some: Sequence[NextTurn]) -> list[Taken]:
            return list(self.calls.wait_for(self.backend.extend(some, _of_its_own(how, next(part)))))

        opening, extended = iter(_readable(begun, begin)), iter(_readable(further, extend))
        return [next(extended if isinstance(one, NextTurn) else opening) for one in asked]


def _of_its_own(how: Sampling, part: int) -> Sampling:
    """Return how to sample a part: with random numbers of its own, where a seed determines them."""
    if how.seed is None:
        return how
    return replace(how, seed=int(np.random.SeedSequence([how.seed, part]).generate_state(1)[0]))


def _readable(asked: Sequence[T], sample: Callable[[Sequence[T]], list[Taken]]) -> list[Taken]:
    """Sample what the model can read; halves are tried until an unreadable one is alone."""
    if not asked:
        return []
    try:
        return sample(asked)
    except PromptError as error:
        if len(asked) == 1:
            return [error]
    half = len(asked) // 2
    return [*_readable(asked[:half], sample), *_readable(asked[half:], sample)]


class Episodes:
    """The environment of a run."""

    def __init__(
        self,
        table: Environment,
        open_episode: Callable[[], Any],
        sample: SampleTurns,
        programs: Programs | None = None,
        *,
        form: CallForm | None = None,
        has_template: bool = False,
        calls_at_once: int = 1,
        observe: Callable[[EpisodeProgress], None] = ignore_progress,
        is_leaving: Callable[[], bool] = never,
    ) -> None:
        """Prepare.

        Args:
            open_episode: opens one episode of the environment; not called if processes do.
            form: how the model writes calls of the environment's functions.
            sample: returns a rollout for each prompt, and the rollout with another turn for each NextTurn;
                None where there is no room for one, and an error where the messages cannot be read.
            programs: of an environment that brings its own loop, which play its episodes.
            has_template: the backend renders conversations; without, their texts follow each other.
            calls_at_once: of `sample`, by threads; more than one only if a server samples.
            observe: called with how far a play is, from any thread.
            is_leaving: whether the run is to stop, which interrupts a play that waits.
        """
        self._programs = programs
        self._table, self._open, self._sample = table, open_episode, sample
        self._has_template = has_template
        self._calls_at_once, self._observe = calls_at_once, observe
        self._is_leaving = is_leaving
        self._loop = EventLoopThread()
        self._in_turn = InTurn(table.time_limit_s)
        self._own_loop = OwnLoop(table.time_limit_s)
        self._hosts = Hosts(table, form) if table.processes else None

    def play(self, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        """Play `how.group_size` episodes of each prompt; callable from several threads."""
        desk = Desk(self._is_leaving)
        single, episodes = replace(how, group_size=1), len(prompts) * how.group_size
        calls = TurnCalls(
            desk, lambda asked, call: self._sample(asked, _of_its_own(single, call)), episodes, self._observe
        )
        playing = self._loop.begin(self._all(desk, calls, prompts, how))
        playing.add_done_callback(lambda _: desk.close())
        try:
            calls.serve(self._calls_at_once)
            return [_with_idle(group, calls.idle_s / episodes) for group in playing.result()]
        finally:
            playing.cancel()

    def close(self) -> None:
        """Cancel what is left of episodes."""
        if self._hosts is not None:
            self._loop.begin(self._hosts.close()).result()
        self._loop.close()
        self._own_loop.close()
        self._in_turn.close()
        if self._programs is not None:
            self._programs.close()

    async def _all(
        self, desk: Desk, calls: TurnCalls, prompts: Sequence[Prompt], how: Sampling
    ) -> list[Group]:
        async def one(prompt: Prompt) -> Rollout:
            rollout = await self._one(desk, prompt, how)
            calls.episode_ended()
            return rollout

        size = how.group_size
        rollouts = await asyncio.gather(*(one(prompt) for prompt in prompts for _ in range(size)))
        return [
            Group(prompt, tuple(rollouts[number * size : (number + 1) * size]))
            for number, prompt in enumerate(prompts)
        ]

    async def _one(self, desk: Desk, prompt: Prompt, how: Sampling) -> Rollout:
        if self._programs is not None:
            return await self._programs.play(desk.ask, prompt, how, self._own_loop.call)
        began_s = time.perf_counter()
        for retries in count():
            talk = self._conversation(desk)
            played = Played(Rollout(prompt, "", (), np.zeros(0), (), truncated=False))
            error: EpisodeError | None = None
            try:
                await self._take_turns(desk, talk, played, how)
            except EpisodeError as failure:
                error = failure
            finally:
                await talk.close()
            if not isinstance(error, EpisodeLostError) or retries == MOST_RETRIES:
                break
        is_whole = played.done and not (played.rollout.truncated and played.tokens >= how.max_tokens)
        try:
            reward = self._worth(played, is_whole, error)
        except EpisodeError as failure:
            error, reward = failure, self._table.error_reward
        calls, errors = talk.counts
        episode = Episode(
            rewards=tuple(played.rewards),
            reward=reward,
            error="" if error is None else f"prompt {prompt.id}: {error}",
            timed_out=isinstance(error, EpisodeTimeoutError),
            retries=retries,
            time_s=time.perf_counter() - began_s,
            environment_s=talk.time_s,
            tool_calls=calls,
            tool_errors=errors,
            others=tuple(played.others),
        )
        return replace(played.rollout, truncated=not (is_whole or error), episode=episode)

    def _conversation(self, desk: Desk) -> Conversation:
        limit_s = self._table.time_limit_s
        if self._hosts is not None:  # a process counts the time of each of its calls
            return Conversation(self._hosts.open, None, at_once, within)
        plain = partial(in_own_thread, limit_s)
        if not self._table.threads:
            plain = partial(desk.held, self._in_turn.call)
        return Conversation(self._open, limit_s, plain, self._own_loop.call)

    async def _take_turns(self, desk: Desk, talk: Conversation, played: Played, how: Sampling) -> None:
        """Take turns until the environment, `max_turns` or a number of tokens ends the episode."""
        asked: Asked = await talk.start(played.rollout.prompt)
        while rollout := await desk.ask(asked):
            played.take(rollout)
            answered = await talk.step(rollout.text)
            played.rewards.append(answered.reward)
            played.done = answered.done
            left = how.max_tokens - played.tokens
            if answered.done or left <= 0 or len(played.rewards) >= self._table.max_turns:
                return
            limit = min(left, self._table.max_turn_tokens or left)
            asked = NextTurn(rollout, answered.messages, limit)
            if self._table.separate_turns:
                asked = self._anew(asked)

    def _anew(self, turn: NextTurn) -> FirstTurn:
        """Return the same turn, after the conversation so far as a prompt."""
        prompt = turn.rollout.prompt
        before = prompt.messages or (("user", prompt.text),)
        said = (*before, ("assistant", turn.rollout.text), *turn.messages)
        whole, told = (
            next_prompt(prompt, part, has_template=self._has_template) for part in (said, turn.messages)
        )
        return FirstTurn(whole, turn.max_tokens, told)

    def _worth(self, played: Played, is_whole: bool, error: EpisodeError | None) -> float | None:
        """Return an episode's reward; None if it failed, or `[reward]` scores it."""
        table = self._table
        if error is not None:
            return table.error_reward
        if not is_whole and table.truncated_reward is not None:
            return table.truncated_reward
        last = played.rewards[-1] if played.rewards else 0.0
        if table.turn_reward == "final" or last is None:
            return last
        return finite(
            "all turns", sum(table.discount**turn * (one or 0.0) for turn, one in enumerate(played.rewards))
        )


def _with_idle(group: Group, idle_s: float) -> Group:
    """Return a group with the time of each episode in which nothing was sampled."""

    def shared(rollout: Rollout) -> Rollout:
        episode = rollout.episode
        return rollout if episode is None else replace(rollout, episode=replace(episode, idle_s=idle_s))

    return replace(group, rollouts=tuple(map(shared, group.rollouts)))


def summary_of(rollouts: Sequence[Rollout]) -> EpisodeSummary | None:
    """Return the environment's part of a step's row; None without an environment."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return None
    return EpisodeSummary(
        turns_mean=float(np.mean([len(episode.rewards) for episode in episodes])),
        observation_tokens=sum(
            one.length - len(one.tokens) for rollout in rollouts for one in rollout.samples
        ),
        episode_errors=sum(bool(episode.error) for episode in episodes),
        episode_retries=sum(episode.retries for episode in episodes),
        separate_samples=sum(len(episode.others) for episode in episodes),
        tool_calls=sum(episode.tool_calls for episode in episodes),
        tool_errors=sum(episode.tool_errors for episode in episodes),
        episode_time_s=float(np.mean([episode.time_s for episode in episodes])),
        environment_time_s=float(np.mean([episode.environment_s for episode in episodes])),
        environment_wait_s=sum(episode.idle_s for episode in episodes),
    )
