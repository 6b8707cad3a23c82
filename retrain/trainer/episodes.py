"""Plays episodes: each is a task of an event loop, and the caller's thread samples their turns.

It waits for plain functions, so a seed gives the same episodes; other environments answer meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from retrain.backends import Sampling
from retrain.backends.progress import EpisodeProgress
from retrain.base.event_loop import RUNAWAYS, EventLoopThread
from retrain.base.rollouts import (
    CallForm,
    Episode,
    FirstTurn,
    Group,
    NextTurn,
    Parts,
    Prompt,
    Rollout,
    next_prompt,
)
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.calls import CoroutineLoop, InTurn
from retrain.plugins.environments.episode import (
    EpisodeError,
    EpisodeLostError,
    EpisodeTimeoutError,
    LiveEpisode,
    finite,
    told,
    within,
)
from retrain.plugins.environments.hosts import Hosts, at_once
from retrain.records.step_row import EpisodeSummary
from retrain.trainer.turn_sampling import (
    Ask,
    Asked,
    PlayMeter,
    PlayTurnFeed,
    SampleTurns,
    TurnCalls,
    TurnQueue,
    of_its_own,
)

if TYPE_CHECKING:
    from retrain.trainer.programs import Programs


log = logging.getLogger(__name__)

PROCESSES = 4  # that play episodes after a thread did not end
MOVED = "%s computed on after its time was over; processes play the episodes now"
SampleLive: TypeAlias = Callable[[PlayTurnFeed, Sampling], object]


@dataclass(slots=True)
class Played:
    """An episode so far."""

    rollout: Rollout
    rewards: list[float | None] = field(default_factory=list)
    parts: list[Parts] = field(default_factory=list)  # of each turn's reward
    done: bool = False
    others: list[Rollout] = field(default_factory=list)  # earlier turns, if each is a sample of its own
    cut_turns: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Sampled ones, of all turns."""
        return sum(len(rollout.tokens) for rollout in (*self.others, self.rollout))

    def take(self, rollout: Rollout) -> None:
        if self.rollout.tokens and rollout.prompt is not self.rollout.prompt:
            self.others.append(self.rollout)
        self.rollout = rollout


@dataclass(eq=False)
class Episodes:
    """The environment of a run."""

    table: EnvironmentSection
    open_episode: Callable[[], Any]  # not called if processes play episodes
    # returns a rollout for each prompt, and the rollout with another turn for each NextTurn; None where there
    # is no room for one, and an error where the messages cannot be read
    sample: SampleTurns
    programs: Programs | None = None  # of an environment that brings its own loop, which play its episodes
    form: CallForm | None = None  # how the model writes calls of the environment's functions
    has_template: bool = False  # the backend renders conversations; without, their texts follow each other
    calls_at_once: int = 1  # of `sample`, by threads; more than one only if a server samples
    sample_live: SampleLive | None = None  # samples turns of a feed, instead of `sample`
    observe: Callable[[EpisodeProgress], None] = lambda _: None  # gets how far a play is, from any thread
    is_leaving: Callable[[], bool] = lambda: False  # whether the run stops, which ends a play that waits

    def __post_init__(self) -> None:
        table = self.table
        self._loop = EventLoopThread()
        self._in_turn = InTurn(table.time_limit_s)
        self._own_loop = CoroutineLoop(table.time_limit_s)
        self._hosts = Hosts(table, self.form) if table.processes else None
        self._is_free = bool(self.programs or table.processes or table.threads)
        self._runaways, self._runaway = len(RUNAWAYS), ""

    def play(self, prompts: Sequence[Prompt], how: Sampling) -> list[Group]:
        """Play `how.group_size` episodes of each prompt; callable from several threads."""
        queue = TurnQueue(self.is_leaving, is_free=self._is_free)
        single, episodes = replace(how, group_size=1), len(prompts) * how.group_size
        meter = PlayMeter(episodes, self.observe)
        playing = self._loop.begin(self._all(queue, meter, prompts, how))
        playing.add_done_callback(lambda _: queue.close())
        try:
            self._serve(queue, single, meter)
            idle_s = meter.idle_s / episodes  # of each: the time in which nothing was sampled

            def with_idle(rollout: Rollout) -> Rollout:
                episode = rollout.episode
                return replace(rollout, episode=replace(episode, idle_s=idle_s)) if episode else rollout

            rollouts = map(with_idle, playing.result())
            return [Group(prompt, tuple(islice(rollouts, how.group_size))) for prompt in prompts]
        finally:
            playing.cancel()

    def _serve(self, queue: TurnQueue, how: Sampling, meter: PlayMeter) -> None:
        """Sample what is asked for until the queue is closed."""
        if (live := self.sample_live) is not None:
            PlayTurnFeed(queue, how, self.table.max_turn_tokens, meter).serve(lambda feed: live(feed, how))
        else:
            calls = TurnCalls(queue, lambda asked, call: self.sample(asked, of_its_own(how, call)), meter)
            calls.serve(self.calls_at_once)

    def close(self) -> None:
        """Cancel what is left of episodes."""
        if self._hosts is not None:
            self._loop.begin(self._hosts.close()).result()
        self._loop.close()
        self._own_loop.close()
        self._in_turn.close()
        if self.programs is not None:
            self.programs.close()

    async def _all(
        self, queue: TurnQueue, meter: PlayMeter, prompts: Sequence[Prompt], how: Sampling
    ) -> list[Rollout]:
        async def play(number: int) -> Rollout:
            """Play an episode; one that is lost is played again, alone, with the same random numbers."""
            began_s, prompt = time.perf_counter(), prompts[number // how.group_size]
            try:
                rollout = await self._once(queue, number, prompt, how, self._own_loop)
            except EpisodeLostError:
                alone = CoroutineLoop(self.table.time_limit_s, is_alone=True)
                try:
                    rollout = await self._once(queue, number, prompt, how, alone)
                finally:
                    threading.Thread(target=alone.close, daemon=True).start()
                assert rollout.episode is not None
                took_s = time.perf_counter() - began_s
                rollout = replace(rollout, episode=replace(rollout.episode, retries=1, time_s=took_s))
            meter.show(finished=1)
            return rollout

        return await asyncio.gather(*map(play, range(len(prompts) * how.group_size)))

    async def _once(
        self, queue: TurnQueue, number: int, prompt: Prompt, how: Sampling, loop: CoroutineLoop
    ) -> Rollout:
        """Play an episode; raise EpisodeLostError if what it shares with others ends."""
        ask = queue.of_episode(number)
        if self.programs is not None:
            return await self.programs.play(ask, prompt, how, loop)
        began_s = time.perf_counter()
        talk = self._opened(queue, loop)
        played = Played(Rollout(prompt))
        error: EpisodeError | None = None
        try:
            await self._take_turns(ask, talk, played, how)
        except EpisodeLostError:
            raise
        except EpisodeError as failure:
            error = failure
        finally:
            await talk.close()
        is_whole = played.done and not (played.rollout.truncated and played.tokens >= how.max_tokens)
        reward, parts, error = self._worth(played, is_whole, error)
        calls, errors = talk.counts
        episode = Episode(
            rewards=tuple(played.rewards),
            reward=reward,
            parts=parts,
            error=told(error, prompt),
            timed_out=isinstance(error, EpisodeTimeoutError),
            time_s=time.perf_counter() - began_s,
            environment_s=talk.time_s,
            tool_calls=calls,
            tool_errors=errors,
            others=tuple(played.others),
            cut_turns=tuple(played.cut_turns),
            runaway=self._runaway,
        )
        return replace(played.rollout, truncated=not (is_whole or error), episode=episode)

    def _opened(self, queue: TurnQueue, loop: CoroutineLoop) -> LiveEpisode:
        limit_s = self.table.time_limit_s
        if self._hosts is None and len(RUNAWAYS) > self._runaways:
            # which can be killed: a thread of this one slows down all
            self._runaway = RUNAWAYS[-1]
            self._is_free = True
            self._hosts = Hosts(replace(self.table, processes=PROCESSES), self.form)
            log.warning(MOVED, self._runaway)
        if self._hosts is not None:  # a process counts the time of each of its calls
            queue.is_free = True
            return LiveEpisode(partial(self._hosts.open, is_alone=loop.is_alone), None, at_once, within)
        call_async = partial(queue.free, loop.of_episode())
        if self.table.threads:
            thread = InTurn(limit_s, is_own=True)
            return LiveEpisode(self.open_episode, limit_s, thread.call, call_async, thread.close)
        return LiveEpisode(self.open_episode, limit_s, partial(queue.held, self._in_turn.call), call_async)

    async def _take_turns(self, ask: Ask, talk: LiveEpisode, played: Played, how: Sampling) -> None:
        """Take turns until the environment, `max_turns` or a number of tokens ends the episode."""
        asked: Asked = await talk.start(played.rollout.prompt)
        while rollout := await ask(asked):
            played.take(rollout)
            if rollout.truncated and played.tokens < how.max_tokens:  # at the limit of the turn alone
                played.cut_turns.append(len(played.rewards))
            answered = await talk.step(rollout.text)
            played.rewards.append(answered.reward)
            played.parts.append(answered.parts)
            played.done = answered.done
            left = how.max_tokens - played.tokens
            if answered.done or left <= 0 or len(played.rewards) >= self.table.max_turns:
                return
            limit = min(left, self.table.max_turn_tokens or left)
            if not self.table.separate_turns:
                asked = NextTurn(rollout, answered.messages, limit)
                continue
            prompt = rollout.prompt  # the next one is the conversation so far
            before = prompt.messages or (("user", prompt.text),)
            conversation = (*before, ("assistant", rollout.text), *answered.messages)
            whole, newest = (
                next_prompt(prompt, messages, has_template=self.has_template)
                for messages in (conversation, answered.messages)
            )
            asked = FirstTurn(whole, limit, newest)

    def _worth(
        self, played: Played, is_whole: bool, error: EpisodeError | None
    ) -> tuple[float | None, Parts, EpisodeError | None]:
        """Return an episode's reward with its parts, and why it failed; None if `[reward]` scores it."""
        table = self.table
        if error is not None:
            return table.error_reward, {}, error
        if not is_whole and table.truncated_reward is not None:
            return table.truncated_reward, {}, None
        last = played.rewards[-1] if played.rewards else 0.0
        if table.turn_reward == "final" or last is None:
            return last, played.parts[-1] if played.parts else {}, None
        names = dict.fromkeys(name for parts in played.parts for name in parts)

        def total(values: Iterable[float | None]) -> float:
            discounted = (table.discount**turn * (value or 0.0) for turn, value in enumerate(values))
            return finite("all turns", sum(discounted))

        try:
            parts = {name: total(parts.get(name) for parts in played.parts) for name in names}
            return total(played.rewards), parts, None
        except EpisodeError as failure:
            return table.error_reward, {}, failure


def summary_of(rollouts: Sequence[Rollout]) -> EpisodeSummary | None:
    """Return the environment's part of a step's row; None without an environment."""
    episodes = [rollout.episode for rollout in rollouts if rollout.episode is not None]
    if not episodes:
        return None

    def each(name: str) -> list[Any]:
        return [getattr(episode, name) for episode in episodes]

    return EpisodeSummary(
        turns_mean=float(np.mean(list(map(len, each("rewards"))))),
        observation_tokens=sum(
            sample.length - len(sample.tokens) for rollout in rollouts for sample in rollout.samples
        ),
        episode_errors=sum(map(bool, each("error"))),
        episode_retries=sum(each("retries")),
        separate_samples=sum(map(len, each("others"))),
        tool_calls=sum(each("tool_calls")),
        tool_errors=sum(each("tool_errors")),
        cut_turns=sum(map(len, each("cut_turns"))),
        episode_time_s=float(np.mean(each("time_s"))),
        environment_time_s=float(np.mean(each("environment_s"))),
        environment_wait_s=sum(each("idle_s")),
        runaway=next(filter(None, each("runaway")), None),
    )
