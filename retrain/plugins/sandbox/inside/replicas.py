"""Data with an identity that an object of one sandbox holds, and of which the other sandbox has a copy.

Before each message, both sides tell what was changed in their copies since the last one. So a list that
tests append to, as in `basket.items.append(1)`, is the list that the object of the program holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from retrain.plugins.sandbox.inside import values

MOST = 64  # that are looked at before each message; the latest
LONGEST = 10_000  # items of one: larger ones are only copied


class Replicas:
    """The data with an identity of one side."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[bool, int]] = {}  # by identity
        self._held: dict[tuple[bool, int], tuple[Any, Any]] = {}  # with its content when last looked at

    def add(self, value: Any, number: int, *, is_mine: bool) -> None:
        """Keep data that the other side has as well; `is_mine`: an object of this side holds it."""
        old = self._held.pop((is_mine, number), None)
        if old is not None:
            del self._places[id(old[0])]
        self._places[id(value)] = (is_mine, number)
        self._held[is_mine, number] = (value, values.content_of(value))
        places = [place for place in self._held if place[0] == is_mine]
        if len(places) > MOST:  # on both sides; no more than a copy from here on
            value, _ = self._held.pop(places[0])
            del self._places[id(value)]

    def place_of(self, value: Any) -> tuple[bool, int] | None:
        """Return whose data it is and its number there; None if it is not kept."""
        return self._places.get(id(value))

    def find(self, number: int) -> Any:
        """Return the copy of data of the other side; raise KeyError if there is none."""
        return self._held[False, number][0]

    def changes(self, content: Callable[[Any], Any]) -> list[Any]:
        """Return what was changed since the last look: whose it is, its number, its content."""
        found: list[Any] = []
        for (is_mine, number), (value, before) in list(self._held.items()):
            if not values.has_content(value, before):
                self._held[is_mine, number] = (value, values.content_of(value))
                found.append([is_mine, number, content(value)])
        return found

    def change(self, changes: Iterable[Any], decode: Callable[[Any], Any]) -> None:
        """Change what the other side has changed.

        Raises:
            FrameError: what it says makes no sense.
        """
        for is_theirs, number, content in changes:
            if (place := (not is_theirs, number)) in self._held:
                value, _ = self._held[place]
                values.fill(value, decode(content))
                self._held[place] = (value, values.content_of(value))
