"""Plays an episode as a run does, with completions that no policy chose, to try an environment out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np

from retrain.backends import Sampling
from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.event_loop import LeftBehindError, result_within
from retrain.base.rollouts import FirstTurn, NextTurn, Prompt, Rollout
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.endpoint.session import Rendering
from retrain.plugins.environments.episode import attribute
from retrain.trainer.episodes import Episodes
from retrain.trainer.programs import Programs
from retrain.trainer.turn_sampling import Asked

TOKENS = 1 << 20  # more than a program asks for


def check_opening(name: str, open_episode: Callable[[], Any]) -> None:
    """Open an episode and close it; ConfigError if that takes too long or it lacks what its kind requires."""
    limit_s = EnvironmentSection().time_limit_s
    try:
        episode = result_within(limit_s, open_episode)
    except LeftBehindError:
        raise ConfigError(f"opening an episode took longer than {limit_s:g} s") from None
    try:
        registry.check_made("environments", name, episode)
    finally:
        if close := attribute(episode, "close"):
            with suppress(Exception):  # ignored, as in a run
                result_within(limit_s, close)


def dry_run(
    open_episode: Callable[[], Any], prompt: Prompt, completions: Sequence[str], *, is_program: bool = False
) -> str:
    """Play until the episode ends or no completion is left; return what is wrong, "" if nothing."""
    table, texts = EnvironmentSection(max_turns=len(completions)), cycle(completions)
    programs = Programs(table, open_episode, Rendering()) if is_program else None

    def answered(turn: Asked) -> Rollout:
        """Return a rollout with another turn, of one token."""
        first = turn.prompt if isinstance(turn, FirstTurn) else turn
        before = first.rollout if isinstance(first, NextTurn) else Rollout(first)
        text, tokens = next(texts), (*before.tokens, 0)
        pieces, logprobs = (*before.pieces, text), np.zeros(len(tokens))
        return replace(before, text=text, tokens=tokens, logprobs=logprobs, pieces=pieces)

    def sample(asked: Sequence[Asked], how: Sampling) -> list[Rollout]:
        return list(map(answered, asked))

    with closing(Episodes(table, open_episode, sample, programs)) as episodes:
        ((rollout,),) = (group.rollouts for group in episodes.play([prompt], Sampling(1, TOKENS, 1.0)))
    return rollout.episode.error if rollout.episode else ""
