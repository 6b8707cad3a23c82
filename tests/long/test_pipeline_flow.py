"""Every order of events, tried out: accepted settings never get stuck and never leave their bounds."""

import random
from copy import deepcopy
from functools import cache
from itertools import product

import pytest

from retrain.config.flow import FlowSettings
from retrain.trainer.pipeline import Flow


class World:
    """One flow, its producers and a trainer; `moves` are what may happen next."""

    def __init__(self, settings, batch_sizes, workers, seed):
        self.flow = Flow(settings, seed)
        self.batch_sizes = batch_sizes
        self.workers = workers
        self.sampling = []  # (unit, version) of each, in any order of arrival
        self.is_waiting = False
        self.max_age = 0

    def moves(self):
        if len(self.sampling) < self.workers and self.flow.may_start():
            yield "start", 0
        yield from (("arrive", number) for number in range(len(self.sampling)))
        if not self.is_waiting:
            yield from (("ask", size) for size in self.batch_sizes)
        elif self.flow.may_take():
            yield "take", 0

    def after(self, move):
        world = deepcopy(self)
        getattr(world, move[0])(move[1])
        return world

    def start(self, _):
        self.sampling.append((self.flow.start(), self.flow.version))

    def arrive(self, number):
        unit, version = self.sampling.pop(number)
        self.flow.arrive(unit, ["sample"] * self.flow.settings.unit_size, version)

    def ask(self, size):
        if self.flow.is_training:
            self.flow.publish(self.flow.version + 1)
        self.flow.ask(size, self.flow.version)
        self.is_waiting = True

    def take(self, _):
        ages = [self.flow.version - sample.version for sample in self.flow.take()]
        self.max_age, self.is_waiting = max(ages), False

    def key(self):
        """The state up to a shift of versions; ages beyond 3 behave alike where an age bound is set."""
        flow, now = self.flow, self.flow.version
        held = flow.settings.max_staleness is not None

        def age(version):
            return min(now - version, 3) if held else 0

        contents = [
            tuple(age(s.version) for s in getattr(flow.buffer, name, ()))
            for name in ("_samples", "_unseen", "_seen")
        ]
        units = [(age(unit.version), unit.items is not None, unit.samples) for unit in flow.under_way]
        account = (round(flow.account.balance, 6), flow.account.started, flow.account.warming)
        return str((contents, units, account, flow.asked, flow.is_training, self.is_waiting))


@cache
def reachable(settings, batch_sizes=None, workers=2, most=300):
    """Return the reachable worlds, each state once, breadth first, at most about `most`."""
    front = [World(settings, batch_sizes or [settings.batch_size], workers, seed) for seed in range(2)]
    known, found = set(), []
    while front and len(known) < most:
        following = []
        for world in front:
            for move in world.moves():
                successor = world.after(move)
                if successor.key() not in known:
                    known.add(successor.key())
                    following.append(successor)
        found += following
        front = following
    return found


def accepted(**changes):
    return FlowSettings(**{"batch_size": 2, "capacity": 4, **changes})


ACCEPTED = [
    accepted(),
    accepted(samples_per_batch=2),
    accepted(samples_per_batch=2, watermark=4),
    accepted(samples_per_batch=2, watermark=1, capacity=2),
    accepted(max_staleness=0),
    accepted(max_staleness=1, samples_per_batch=2, unit_size=2),
    accepted(max_staleness=1, unit_size=3, watermark=3),
    accepted(buffer="firo", threshold=1, samples_per_batch=2, watermark=3),
    accepted(buffer="firo", threshold=2, max_staleness=1),
    accepted(buffer="reservoir"),
    accepted(buffer="reservoir", samples_per_batch=1.5, watermark=2),
    accepted(buffer="reservoir", samples_per_batch=2, watermark=4),
    accepted(buffer="reservoir", samples_per_batch=0.5, watermark=3, max_staleness=1),
    accepted(buffer="reservoir", samples_per_batch=1, watermark=4, max_staleness=0, unit_size=2),
]


@pytest.mark.parametrize("settings", ACCEPTED, ids=str)
def test_somebody_can_always_go_on(settings):
    assert all(list(world.moves()) for world in reachable(settings))


def test_somebody_can_always_go_on_with_any_accepted_settings():
    keys = (
        "batch_size",
        "capacity",
        "buffer",
        "samples_per_batch",
        "watermark",
        "max_staleness",
        "unit_size",
    )
    values = (
        [1, 3],
        [3, 5],
        ["fifo", "firo", "reservoir"],
        [None, 0.5, 1, 2.5, 3],
        [0, 2, 5],
        [None, 0, 1, 2],
        [1, 2, 4],
    )
    grid = (FlowSettings(**dict(zip(keys, chosen, strict=True))) for chosen in product(*values))
    usable = [settings for settings in grid if not list(settings.conflicts())]
    for settings in usable[::12]:
        assert all(list(world.moves()) for world in reachable(settings, most=60)), settings


@pytest.mark.parametrize("settings", ACCEPTED, ids=str)
def test_the_buffer_never_holds_more_than_its_capacity(settings):
    assert all(len(world.flow.buffer) <= settings.capacity for world in reachable(settings))


@pytest.mark.parametrize("settings", [s for s in ACCEPTED if s.max_staleness is not None], ids=str)
def test_no_batch_holds_a_stale_sample(settings):
    assert all(world.max_age <= settings.max_staleness for world in reachable(settings))


@pytest.mark.parametrize(
    "settings", [s for s in ACCEPTED if s.samples_per_batch and s.max_staleness is None], ids=str
)
def test_the_pace_is_held_within_one_batch(settings):
    pace = settings.samples_per_batch
    paid_late = pace if settings.buffer == "reservoir" else 0  # a reservoir full of unseen samples goes first
    worlds = (w for w in reachable(settings) if w.flow.account.started)
    assert all(-paid_late <= world.flow.account.balance < pace + 1 for world in worlds)


@pytest.mark.parametrize("settings", ACCEPTED, ids=str)
def test_somebody_can_always_go_on_while_the_batch_size_changes(settings):
    sizes = range(1, settings.capacity - settings.threshold + 1)
    assert all(list(world.moves()) for world in reachable(settings, sizes))


@pytest.mark.parametrize(
    "settings", [s for s in ACCEPTED if s.samples_per_batch and s.buffer != "reservoir"], ids=str
)
def test_samples_read_or_dropped_leave_buffer_and_pace_alike(settings):
    stock = settings.watermark - min(settings.watermark, settings.batch_size)
    worlds = (w for w in reachable(settings) if w.flow.account.started)
    assert all(len(world.flow.buffer) - world.flow.account.balance == stock for world in worlds)


def test_without_overlap_no_unit_starts_while_training():
    worlds = reachable(accepted(max_staleness=0))
    assert not any(w.flow.may_start() for w in worlds if w.flow.is_training)


EVEN = [
    accepted(max_staleness=0, capacity=8),
    accepted(max_staleness=1, samples_per_batch=2, unit_size=2),
    accepted(max_staleness=2, unit_size=1, capacity=2),
    accepted(max_staleness=2, unit_size=2),
    accepted(max_staleness=1, unit_size=4),
    accepted(max_staleness=3, unit_size=2, samples_per_batch=2, watermark=4, capacity=6),
    accepted(buffer="firo", threshold=2, max_staleness=1),
    accepted(buffer="firo", threshold=1, max_staleness=2, unit_size=2, capacity=8),
    accepted(buffer="reservoir", max_staleness=1, capacity=6),
    accepted(buffer="reservoir", max_staleness=2, samples_per_batch=1, watermark=2, unit_size=2, capacity=6),
]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("settings", EVEN, ids=str)
def test_nothing_gets_stale_though_units_arrive_in_any_order(settings, workers):
    worlds = list(reachable(settings, workers=workers, most=200))
    assert all(list(world.moves()) for world in worlds)
    assert all(world.flow.stale == 0 for world in worlds)


class Looking(World):
    """A flow whose trainer looks, around each step, at what may come in until it looks again.

    It may hold the flow as it looks.
    """

    allowed, come, failed = (
        None,
        0,
        False,
    )  # what may come in; None until the first look, before which nothing does

    def moves(self):
        done = self.flow.version == self.flow.settings.steps
        has_looked = self.allowed is not None
        if has_looked and len(self.sampling) < self.workers and self.flow.may_start():
            yield "start", 0
        yield from (("arrive", number) for number in range(len(self.sampling)))
        if self.flow.is_training:
            yield from (("publish", held) for held in (True, False))
        elif not self.is_waiting and not done:
            yield from (("ask", held) for held in (True, False))
        elif self.is_waiting and self.flow.may_take():
            yield "take", 0

    def arrive(self, number):
        super().arrive(number)
        self.come += self.flow.settings.unit_size
        self.failed |= self.come > self.allowed

    def publish(self, held):
        self.flow.publish(self.flow.version + 1)
        self._look(0, held)

    def ask(self, held):
        self._look(1, held)
        super().ask(self.batch_sizes[0])

    def _look(self, batches, held):
        self.flow.is_held |= held  # first, so that nothing more is started
        self.allowed, self.come = self.flow.most_started(batches, held=held), 0
        self.flow.is_held = held

    def key(self):
        flow = self.flow
        return super().key() + str((flow.version, flow.is_held, flow.is_asked, self.allowed, self.come))


@cache
def looked(settings):
    front, known = [Looking(settings, [settings.batch_size], 2, seed=0)], {}
    while front and len(known) < 3000:
        found = {world.key(): world for old in front for world in map(old.after, old.moves())}
        front = [world for key, world in found.items() if key not in known]
        front = random.Random(0).sample(front, min(len(front), 150))
        known |= {world.key(): world for world in front}
    return list(known.values())


ENDING = [
    accepted(max_staleness=1, steps=4),
    accepted(max_staleness=3, steps=4, capacity=8, samples_per_batch=2),
    accepted(max_staleness=2, unit_size=3, steps=3, capacity=6),
    accepted(max_staleness=2, unit_size=2, steps=3, watermark=4),
    accepted(buffer="firo", threshold=2, max_staleness=1, steps=3),
    accepted(buffer="reservoir", max_staleness=2, samples_per_batch=1, watermark=2, capacity=6, steps=4),
]


@pytest.mark.parametrize("settings", [s for s in ENDING if s.buffer != "reservoir"], ids=str)
def test_no_more_comes_in_until_the_next_look_than_was_foreseen(settings):
    worlds = looked(settings)
    assert max(world.flow.version for world in worlds) == settings.steps
    assert not any(world.failed for world in worlds)


@pytest.mark.parametrize("settings", ENDING, ids=str)
def test_a_flow_goes_on_to_its_last_batch_and_not_beyond(settings):
    for world in looked(settings):
        is_over = world.flow.version == settings.steps
        assert bool(list(world.moves())) != (is_over and not world.sampling)
        if is_over and settings.buffer == "fifo":
            assert world.flow.ahead < settings.unit_size


def test_settings_that_deadlock_cannot_be_built():
    with pytest.raises(ValueError, match="reads each sample once"):
        World(accepted(samples_per_batch=1), [2], workers=1, seed=0)


def test_a_batch_that_the_buffer_can_never_hold_is_refused():
    with pytest.raises(ValueError, match="needs 1 to capacity - threshold = 4"):
        World(accepted(), [2], workers=1, seed=0).flow.ask(5, version=0)
