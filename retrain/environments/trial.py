"""Plays an episode, or runs a program, with completions that no policy chose, to try it out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np

from retrain.environments.endpoint import Endpoint
from retrain.environments.endpoint.running import run_program
from retrain.environments.endpoint.session import EpisodeLimits, EpisodeSession, Rendering
from retrain.environments.episode import EpisodeError, LiveEpisode, within
from retrain.environments.plain_calls import InTurn
from retrain.rollouts import FirstTurn, NextTurn, Prompt, Rollout

TOKENS = 1 << 20  # more than a program asks for
LIMIT_S = 60.0  # of one call; the default of [environment].time_limit_s


def try_out(open_episode: Callable[[], Any], prompt: Prompt, completions: Sequence[str]) -> str:
    """Play until the episode ends or no completion is left; return what is wrong, "" if nothing."""
    thread = InTurn(LIMIT_S, is_own=True)
    talk = LiveEpisode(open_episode, LIMIT_S, thread.call, within, thread.close)
    return asyncio.run(_played(talk, prompt, completions))


async def _played(talk: LiveEpisode, prompt: Prompt, completions: Sequence[str]) -> str:
    try:
        await talk.start(prompt)
        for completion in completions:
            if (await talk.step(completion)).done:
                break
    except EpisodeError as error:
        return str(error)
    finally:
        await talk.close()
    return ""


def try_out_program(open_episode: Callable[[], Any], prompt: Prompt, completions: Sequence[str]) -> str:
    """Run a program until it ends or no completion is left; return what is wrong, "" if nothing."""
    return asyncio.run(_ran(open_episode, prompt, completions))


async def _ran(open_episode: Callable[[], Any], prompt: Prompt, completions: Sequence[str]) -> str:
    texts = iter(completions)

    async def ask(asked: FirstTurn | NextTurn) -> Rollout:
        return _answered(asked, texts)

    session = EpisodeSession(prompt, ask, EpisodeLimits(len(completions), TOKENS, TOKENS), Rendering())
    with closing(Endpoint()) as endpoint, endpoint.serving(session) as key:
        try:
            await run_program(open_episode, session, (prompt, endpoint.url, key), LIMIT_S, within)
        except EpisodeError as error:
            return "" if session.is_cut else str(error)
    return ""


def _answered(asked: FirstTurn | NextTurn, texts: Iterator[str]) -> Rollout:
    text = next(texts)
    if isinstance(asked, FirstTurn):
        return Rollout(asked.prompt, text, (0,), np.zeros(1), (text,), truncated=False)
    before = asked.rollout
    tokens, pieces = (*before.tokens, 0), (*before.pieces, text)
    return replace(before, text=text, tokens=tokens, logprobs=np.zeros(len(tokens)), pieces=pieces)
