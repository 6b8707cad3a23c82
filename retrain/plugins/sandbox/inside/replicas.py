"""Data with an identity that both sandboxes have: where one side changes it, the other changes it as well.

All that a call or an operation passes is such data while anything on the other side holds it. Before each
message a side tells what was changed since the last one, and which data of the other it no longer holds. So a
list that tests append to, as in `basket.items.append(1)`, is the list that the object of the program holds.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

from retrain.plugins.sandbox.inside import values

MOST = 128  # that are looked at before each message; the latest
LONGEST = 10_000  # items of one: larger ones are only copied, or shared for the time of a call
Place = tuple[bool, int]  # whether the data is this side's own, and its number


class Replica:
    """Data of both sides, as this one has it."""

    __slots__ = ("content", "may_change", "seen", "shown", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.content = values.content_of(value)  # when last looked at
        self.may_change = False  # by the other side, whatever that answers
        self.shown: Any = None  # in place of the value, where a change of the other side is concealed
        self.seen: Any = None  # the content of `shown` when it was last looked at

    def take(self, content: Any) -> None:
        """Give the data another content; FrameError if it cannot hold it."""
        values.fill(self.value, content)
        self.content = values.content_of(self.value)

    def reveal(self) -> None:
        """Show a change that was concealed."""
        if self.shown is not None:
            content, self.value, self.shown = values.content_of(self.value), self.shown, None
            self.take(content)

    def is_held(self) -> bool:
        """Whether anything else on this side holds the data."""
        if self.shown is None:
            return sys.getrefcount(self.value) > FREE
        # of these two, the judge keeps which belongs to which
        return sys.getrefcount(self.value) > FREE + 1 or sys.getrefcount(self.shown) > FREE + 1


UNHELD = Replica([])
FREE = sys.getrefcount(UNHELD.value)  # references to data that nothing else holds


class Replicas:
    """The data with an identity of one side."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}  # by identity
        self._replicas: dict[Place, Replica] = {}
        self._count = 0  # of its own
        self.used: set[Place] = set()  # in the message that is being made
        self._concealed: dict[int, Replica] = {}  # by what is shown, of those that were dropped
        self.has_lost = False  # data that is held, but is too much to be looked at

    def add(self, value: Any, number: int | None = None) -> int:
        """Keep data that the other side has too; return its number, which is given if it is theirs."""
        if not values.has_identity(value, type(value)):
            raise values.FrameError("data without an identity")
        place = (number is None, self._count if number is None else number)
        self._drop(place)
        self._count += number is None
        replica = self._concealed.get(id(value))
        is_concealed = replica is not None and replica.shown is value
        if replica is None or not (is_concealed and values.has_content(value, replica.seen)):
            replica = Replica(value)
        self._replicas[place] = replica
        self._places[id(value)] = self._places[id(replica.value)] = place
        return place[1]

    def use(self, value: Any) -> Place | None:
        """Return where data is kept that a message refers to; None if it is not."""
        if (place := self._places.get(id(value))) is not None:
            self.used.add(place)
        return place

    def find(self, is_mine: bool, number: int) -> Replica:
        """Return the data at a place; raise KeyError if there is none."""
        return self._replicas[is_mine, number]

    def conceal(self, replica: Replica) -> None:
        """Have what this side holds stay as it is when the other changes it."""
        if replica.shown is None:
            replica.shown, replica.seen = replica.value, replica.content
            replica.value = copy.copy(replica.value)
            self._places[id(replica.value)] = self._places[id(replica.shown)]

    def changes(self, content: Callable[[Any], Any]) -> list[Any]:
        """Return what was changed since the last look: whose it is, its number, its content."""
        changed: list[Any] = []
        for (is_mine, number), replica in [*self._replicas.items()]:
            if replica.shown is not None and not values.has_content(replica.shown, replica.seen):
                replica.value, replica.shown = replica.shown, None
            elif values.has_content(replica.value, replica.content):
                continue
            replica.content = values.content_of(replica.value)
            changed.append([is_mine, number, content(replica.value)])
        return changed

    def drop_unheld(self) -> list[list[int]]:
        """Drop data that nothing on this side holds any longer; return the numbers of its own, and others.

        What is in other data comes after it, and is held by it.
        """
        dropped: list[list[int]] = []
        for is_mine in (True, False):
            places = sorted(place for place in self._replicas if place[0] == is_mine)
            numbers: list[int] = []
            for place in places:
                replica = self._replicas[place]
                is_surplus = len(places) - len(numbers) > MOST or len(replica.value) > LONGEST
                if place not in self.used and (is_surplus or not replica.is_held()):
                    self.has_lost |= is_surplus
                    self._drop(place)
                    numbers.append(place[1])
            dropped.append(numbers)
        self.used.clear()
        return dropped

    def drop(self, theirs: Iterable[int], mine: Iterable[int]) -> None:
        """Drop data that the other side has dropped."""
        for place in [*((False, number) for number in theirs), *((True, number) for number in mine)]:
            self._drop(place)

    def _drop(self, place: Place) -> None:
        if (replica := self._replicas.pop(place, None)) is not None:
            self._places.pop(id(replica.value), None)
            if replica.shown is not None:
                del self._places[id(replica.shown)]
                self._concealed[id(replica.shown)] = replica
