"""Plays an episode with completions that no policy chose, to try an environment out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from retrain.environments.episode import Conversation, EpisodeError, within
from retrain.environments.own_thread import OwnThread
from retrain.rollouts import Prompt

LIMIT_S = 60.0  # of one call; the default of [environment].time_limit_s


def try_out(open_episode: Callable[[], Any], prompt: Prompt, completions: Sequence[str]) -> str:
    """Play until the episode ends or no completion is left; return what is wrong, "" if nothing."""
    thread = OwnThread(LIMIT_S)
    talk = Conversation(open_episode, LIMIT_S, thread.call, within, thread.end)
    return asyncio.run(_played(talk, prompt, completions))


async def _played(talk: Conversation, prompt: Prompt, completions: Sequence[str]) -> str:
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
