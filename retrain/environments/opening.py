"""Opens an environment by name, with what its episodes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from retrain import registry
from retrain.rollouts import CallForm


@contextmanager
def opened(
    name: str, options: Mapping[str, Any], form: CallForm | None = None
) -> Iterator[Callable[[], Any]]:
    """Yield the function that opens an episode.

    Args:
        form: how the model writes calls of the environment's functions.
    """
    open_episode = registry.bound("environments", name, options)
    prepare = registry.hook("environments", name, "prepare")
    if prepare is None:
        yield open_episode
        return
    shared = prepare(options, form)
    try:
        yield partial(open_episode, shared)
    finally:
        shared.close()
