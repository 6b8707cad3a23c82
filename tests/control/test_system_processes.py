import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from retrain.control.machine import (
    Process,
    descendants,
    own_cpu_seconds,
    own_memory_bytes,
    process_tree,
    read_processes,
)

# waits for a line, burns that many core-seconds, says so, and ends with its standard input
BURNER = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + float(line)
    while time.process_time() < until:
        pass
    print("burnt", flush=True)
"""


@contextmanager
def burner():
    with subprocess.Popen(
        [sys.executable, "-c", BURNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as child:
        yield child
        child.stdin.close()


def burn(child, core_s):
    child.stdin.write(f"{core_s}\n")
    assert child.stdout.readline() == "burnt\n"


def test_a_tree_is_its_root_and_all_that_descend_from_it():
    with burner() as child:
        burn(child, 0)
        assert descendants([os.getpid()], read_processes()) >= {os.getpid(), child.pid}
        assert descendants([child.pid], read_processes()) == {child.pid}


def test_the_tree_of_a_process_that_is_gone_is_empty():
    with burner() as child:
        pass
    assert process_tree(child.pid) == set()


def test_time_of_a_running_child_is_ours():
    with burner() as child:
        burn(child, 0)
        before = read_processes()
        burn(child, 0.2)
        after = read_processes()
        own = {child.pid}
        assert own_cpu_seconds(before, own, after, own) == pytest.approx(0.2, abs=0.05)


def test_time_of_a_child_that_ended_meanwhile_is_ours_once():
    me = {os.getpid()}
    with burner() as child:
        burn(child, 0.3)
        before, began_s = read_processes(), time.process_time()
        burn(child, 0.2)
    after, own_s = read_processes(), time.process_time() - began_s
    used_s = own_cpu_seconds(before, me | {child.pid}, after, me)
    assert used_s - own_s == pytest.approx(0.2, abs=0.1)  # without the 0.3 from before


def process(parent=1, cpu_s=0.0, ended_s=0.0, start=1):
    return Process(parent, start, cpu_s, ended_s)


def test_what_an_ended_child_had_used_before_is_taken_off():
    before = {10: process(cpu_s=1.0), 11: process(parent=10, cpu_s=4.0)}
    after = {10: process(cpu_s=1.5, ended_s=6.0)}
    assert own_cpu_seconds(before, {10, 11}, after, {10}) == pytest.approx(0.5 + 2.0)


def test_an_ended_grandchild_is_inherited_through_its_ended_parent():
    before = {10: process(), 11: process(parent=10, cpu_s=1.0), 12: process(parent=11, cpu_s=2.0)}
    after = {10: process(ended_s=4.5)}
    assert own_cpu_seconds(before, {10, 11, 12}, after, {10}) == pytest.approx(1.5)


def test_a_pid_that_was_used_again_is_another_process():
    before = {10: process(cpu_s=9.0, start=1)}
    after = {10: process(cpu_s=0.5, start=2)}
    assert own_cpu_seconds(before, {10}, after, {10}) == 0.5


def test_a_process_that_becomes_ours_brings_only_its_time_since():
    before = {10: process(), 20: process(cpu_s=100.0)}
    after = {10: process(), 20: process(cpu_s=100.5)}
    assert own_cpu_seconds(before, {10}, after, {10, 20}) == 0.5


def test_a_child_that_nobody_waited_for_takes_nothing_away():
    before = {10: process(), 11: process(parent=10, cpu_s=50.0)}
    assert own_cpu_seconds(before, {10, 11}, {10: process(cpu_s=0.25)}, {10}) == 0.25


def test_our_memory_holds_what_we_allocate():
    before = own_memory_bytes([os.getpid()])
    block = bytearray(os.urandom(1)) * (64 << 20)
    assert own_memory_bytes([os.getpid()]) - before >= 60 << 20
    del block


def test_memory_is_read_without_a_proc_folder(tmp_path):
    assert own_memory_bytes([os.getpid(), 2**22 + 1], tmp_path) > 1 << 20
