"""What a reward may be: a number, or true and false; nothing that would have to be guessed."""

from __future__ import annotations

NOTHING = "must be a number; got None, as from a function that ends without `return`"


def number_of(reward: object) -> float:
    """Return a reward as a number; true is 1.

    Raises:
        TypeError: it is none, such as nothing at all or a text; the message goes on from "the reward".
    """
    if isinstance(reward, str | bytes | bytearray) or not hasattr(reward, "__float__"):
        raise TypeError(NOTHING if reward is None else f"must be a number; got {reward!r:.80}")
    return float(reward)
