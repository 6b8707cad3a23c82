import os
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.control import machine as system
from retrain.control.machine import Pool, process_tree
from retrain.control.machine.throttle import LoadMeter, taken_fraction

# waits for a line, burns that many core-seconds, says so, and ends with its standard input
BURNER = """
import sys, time
print("ready", flush=True)
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print("burnt", flush=True)
"""
# starts a burner and stays its parent until it is killed
PARENT = (
    f"import signal, subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURNER!r}]); signal.pause()"
)
# starts a burner and ends at once, which leaves an orphan outside of our tree
ORPHANING = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {BURNER!r}])"


@contextmanager
def burner(code):
    """A burner that is ready, in our tree (BURNER) or outside of it (ORPHANING)."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        assert child.stdout.readline() == "ready\n"
        if code is ORPHANING:
            child.wait()
        yield child
        child.stdin.close()


def core_seconds_seen(meters, child, core_s):
    """Core-seconds that each meter's cpu load stands for, while `child` burns `core_s`."""
    for meter in meters:
        meter.read()
    began_s = time.monotonic()
    child.stdin.write(f"{core_s}\n")
    assert child.stdout.readline() == "burnt\n"
    loads = [meter.read().parts["cpu"] for meter in meters]
    scale = system.cpu_capacity() * (time.monotonic() - began_s)
    return [load * scale for load in loads]


def test_work_of_our_own_tree_is_not_foreign():
    with burner(BURNER) as child:
        foreign, everything = core_seconds_seen(
            [LoadMeter(gpu=False), LoadMeter("system", gpu=False)], child, 1.0
        )
    assert everything - foreign > 0.25


def test_work_of_others_is_foreign():
    with burner(ORPHANING) as other:
        foreign, everything = core_seconds_seen(
            [LoadMeter(gpu=False), LoadMeter("system", gpu=False)], other, 1.0
        )
    assert foreign > 0.25
    assert everything > 0.25


def test_work_of_a_campaigns_processes_is_not_foreign():
    with burner(BURNER) as worker, burner(ORPHANING) as sibling:
        pids = orphan_pids()
        assert worker.pid not in pids
        meters = [LoadMeter(gpu=False, own_pids=lambda: pids), LoadMeter(gpu=False)]
        with_siblings, alone = core_seconds_seen(meters, sibling, 1.0)
    assert alone - with_siblings > 0.25


def test_work_of_a_child_that_lost_its_parent_stays_ours():
    remembering = LoadMeter(gpu=False)
    with burner(PARENT) as parent:
        remembering.read()
        parent.kill()
        parent.wait()
        known, unknown = core_seconds_seen([remembering, LoadMeter(gpu=False)], parent, 1.0)
    assert unknown - known > 0.25


def orphan_pids():
    """Burners that are not in our tree."""
    ours = process_tree(os.getpid())
    return {p.pid for p in psutil.process_iter(["cmdline"]) if BURNER in (p.info["cmdline"] or [])} - ours


def test_the_first_reading_already_sees_the_load():
    with burner(ORPHANING) as other:
        other.stdin.write("0.5\n")
        load = LoadMeter(gpu=False).read()
        assert other.stdout.readline() == "burnt\n"
    assert load.is_known
    assert load.parts["cpu"] > 0


def test_every_part_of_a_reading_is_a_share():
    load = LoadMeter().read()
    assert {"cpu", "memory"} <= set(load.parts)
    assert all(0.0 <= share <= 1.0 for share in load.parts.values())


def test_a_reading_right_after_another_is_the_same():
    meter = LoadMeter(gpu=False)
    assert meter.read() is meter.read()


def test_a_campaigns_function_that_fails_to_read_makes_the_load_unknown():
    def pids():
        raise FileNotFoundError("campaign.lock")

    load = LoadMeter(gpu=False, own_pids=pids).read()
    assert load.value is None
    assert "campaign.lock" in load.unknown[0]


def test_a_machine_shared_evenly_is_half_taken():
    assert taken_fraction([Pool(8, 8.0)], own=4.0) == 0.5


def test_neighbours_do_not_count_while_our_quota_fits_beside_them():
    assert taken_fraction([Pool(64, 40.0), Pool(4, 4.0)], own=4.0) == 0.0


def test_neighbours_count_once_they_reach_into_our_quota():
    assert taken_fraction([Pool(64, 62.0), Pool(4, 1.0)], own=1.0) == 0.75 - 0.5


def test_others_in_our_own_group_count_against_its_quota():
    assert taken_fraction([Pool(64, 4.0), Pool(4, 4.0)], own=1.0) == 0.75


def test_counting_everything_a_used_up_quota_is_full():
    assert taken_fraction([Pool(64, 4.0), Pool(4, 4.0)], own=0.0) == 1.0


pools = st.lists(st.builds(Pool, st.floats(0.1, 64), st.floats(0, 100)), min_size=1, max_size=3)


@given(pools=pools, own=st.floats(0, 100), more=st.floats(0, 100))
def test_a_share_is_bounded_and_falls_with_what_is_ours(pools, own, more):
    assert 0.0 <= taken_fraction(pools, own + more) <= taken_fraction(pools, own) <= 1.0


def test_the_scope_has_two_words():
    with pytest.raises(ValueError, match="needs one of foreign, system"):
        LoadMeter("ours")


def test_this_machine_has_a_capacity():
    assert 0 < system.cpu_capacity() <= len(system.allowed_cpus())
    assert 0 < system.memory_available_bytes() <= system.memory_limit_bytes()
