"""Every order of events, tried out: accepted settings never get stuck and never leave their bounds."""

from copy import deepcopy
from functools import cache
from itertools import product

import pytest

from retrain.config.flow import FlowSettings
from retrain.pipeline.buffers import build
from retrain.pipeline.flow import Flow


class World:
    """One flow, its producers and a trainer; `moves` are what may happen next."""

    def __init__(self, settings, batch_sizes, workers, seed):
        self.flow = Flow(settings, build(settings, seed))
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
    usable = [settings for settings in grid if not settings.problems()]
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


def test_settings_that_deadlock_cannot_be_built():
    with pytest.raises(ValueError, match="reads each sample once"):
        World(accepted(samples_per_batch=1), [2], workers=1, seed=0)


def test_a_batch_that_the_buffer_can_never_hold_is_refused():
    with pytest.raises(ValueError, match="needs 1 to capacity - threshold = 4"):
        World(accepted(), [2], workers=1, seed=0).flow.ask(5, version=0)
