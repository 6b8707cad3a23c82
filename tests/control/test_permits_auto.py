"""The number of permits grows by one while calls go well, and falls at once when the API is overloaded."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.errors import RecordsError
from retrain.base.locks import LockFile, locked
from retrain.campaign.conformance import check_plugin
from retrain.campaign.run import start
from retrain.config.load import load_config
from retrain.control.rules.concurrency_limit import HIGHEST, CallFacts, ConcurrencyLimit
from retrain.control.semaphore import FileSemaphore
from retrain.control.semaphore.adaptive import SharedLimit
from retrain.records.files import record_of
from retrain.records.layout import CampaignFiles, RunFiles, campaign_of
from retrain.trainer.permits import RunPermits
from tests.conftest import ONE_RUN
from tests.semaphore_processes import running

WANTED = CallFacts("sample", 1.0, waited=True)
REFUSED = CallFacts("sample", 1.0, overloaded=True)


def test_a_round_of_good_calls_with_waiters_adds_one_permit() -> None:
    controller = ConcurrencyLimit(3)
    assert [controller.observe(t, WANTED).permits for t in range(7)] == [3, 3, 4, 4, 4, 4, 5]


def test_permits_that_nobody_waits_for_do_not_grow() -> None:
    controller = ConcurrencyLimit(3)
    assert {controller.observe(t, CallFacts("sample", 1.0)).permits for t in range(50)} == {3}


def test_an_overload_answer_halves_them_and_says_so() -> None:
    decision = ConcurrencyLimit(9).observe(0, REFUSED)
    assert (decision.permits, decision.changed) == (4, True)
    assert "overloaded" in decision.reason


def test_a_burst_of_overload_answers_counts_once() -> None:
    controller = ConcurrencyLimit(16)
    assert [controller.observe(0.1 * n, REFUSED).permits for n in range(8)] == [8] * 8
    assert controller.observe(2.0, REFUSED).permits == 4


def test_calls_that_take_far_longer_than_usual_count_as_overload() -> None:
    controller = ConcurrencyLimit(8)
    for t in range(20):
        controller.observe(t, CallFacts("update", 1.0))
    slow = [controller.observe(20 + 5 * n, CallFacts("update", 9.0)) for n in range(3)]
    first = next(decision for decision in slow if decision.changed)
    assert first.permits == 6
    assert "usually" in first.reason


def test_quick_refusals_do_not_make_the_calls_after_them_look_slow() -> None:
    controller = ConcurrencyLimit(16)
    for t in range(20):
        controller.observe(t, CallFacts("sample", 1.0))
    for n in range(10):
        controller.observe(20 + 0.01 * n, CallFacts("sample", 0.005, overloaded=True))
    after = [controller.observe(30 + 5 * n, CallFacts("sample", 1.0)).permits for n in range(60)]
    assert set(after) == {8}


def test_latencies_of_different_kinds_are_not_compared() -> None:
    controller = ConcurrencyLimit(8)
    for t in range(40):
        controller.observe(t, CallFacts("sample", 1.0))
        controller.observe(t, CallFacts("update", 50.0))
    assert controller.permits == 8


def test_a_lasting_change_of_latency_becomes_the_usual() -> None:
    controller = ConcurrencyLimit(8)
    for t in range(20):
        controller.observe(t, CallFacts("sample", 1.0))
    decisions = [controller.observe(20 + 10 * n, CallFacts("sample", 4.0)) for n in range(60)]
    assert decisions[-1].reason == "steady"


@given(st.lists(st.sampled_from([WANTED, REFUSED, CallFacts("save", 9.0)]), max_size=80))
def test_the_number_never_leaves_its_range(calls: list[CallFacts]) -> None:
    for first in (2, HIGHEST - 1):
        controller = ConcurrencyLimit(first)
        assert all(1 <= controller.observe(10.0 * t, call).permits <= HIGHEST for t, call in enumerate(calls))


@given(st.lists(st.sampled_from([WANTED, REFUSED, CallFacts("save", 9.0)]), max_size=40))
def test_a_state_survives_json_and_goes_on_alike(calls: list[CallFacts]) -> None:
    controller = ConcurrencyLimit(3)
    for t, call in enumerate(calls):
        copy = record_of(ConcurrencyLimit, json.loads(json.dumps(asdict(controller))))
        assert copy.observe(0.6 * t, call) == controller.observe(0.6 * t, call)


def test_it_settles_near_what_an_api_bears() -> None:
    """An API that refuses whatever goes beyond 10 at once."""
    controller, seen = ConcurrencyLimit(2), []
    for t in range(2000):
        in_flight = controller.permits
        controller.observe(float(t), CallFacts("sample", 1.0, overloaded=in_flight > 10, waited=True))
        seen.append(controller.permits)
    assert 9.8 <= sum(seen[500:]) / len(seen[500:]) < 10.1
    assert max(seen) == 11


def grown_to(permits: int) -> ConcurrencyLimit:
    """Return a controller that grew to a number of permits until second 0, and just then to it."""
    controller = ConcurrencyLimit(permits - 1)
    for _ in range(permits - 1):
        controller.observe(0, WANTED)
    assert controller.permits == permits
    return controller


def test_a_refusal_just_above_what_works_takes_one_permit_and_further_ones_more() -> None:
    controller = grown_to(20)
    assert [controller.observe(2.0 * n, REFUSED).permits for n in range(1, 5)] == [19, 14, 7, 3]


def test_a_limit_that_stays_is_tried_about_once_a_minute() -> None:
    controller, refused_s = grown_to(7), []
    for t in range(310):
        if controller.observe(float(t), REFUSED if controller.permits > 6 else WANTED).changed:
            refused_s.append(t)
    raised_s = refused_s[1::2]  # a permit is taken, then given on trial
    assert [round(later - sooner) for sooner, later in pairwise([0, *raised_s])] == [
        30,
        56,
        56,
        56,
        56,
    ]


def test_a_limit_that_has_risen_is_forgotten_and_growth_is_fast_again() -> None:
    controller = grown_to(7)
    controller.observe(0, REFUSED)
    at = [next(t for t in range(999) if controller.observe(100 + t, WANTED).changed) for _ in range(3)]
    assert at == [5, 4 * 7 - 1, 8 - 1]  # six have worked; four rounds of the trial; a round


def test_permits_that_wait_below_a_limit_are_said_to() -> None:
    controller = grown_to(7)
    controller.observe(0, REFUSED)
    assert [controller.observe(1, WANTED).reason for _ in range(6)][-1] == "held below what the API refused"


def test_all_workers_of_a_campaign_share_one_number_and_a_log(tmp_path: Path) -> None:
    semaphore = FileSemaphore(tmp_path, 8)
    first, second = SharedLimit(tmp_path, semaphore, "run 1"), SharedLimit(tmp_path, semaphore, "run 2")
    first.observe(REFUSED)
    assert semaphore.permits == 4
    for _ in range(4):
        second.observe(WANTED)
    assert semaphore.permits == 5
    lines = [json.loads(line) for line in (tmp_path / "adaptive.jsonl").read_text().splitlines()]
    assert [(line["before"], line["permits"], line["run"]) for line in lines] == [
        (8, 4, "run 1"),
        (4, 5, "run 2"),
    ]


def test_observations_from_many_threads_are_all_counted(tmp_path: Path) -> None:
    semaphore = FileSemaphore(tmp_path, 1)
    shared = [SharedLimit(tmp_path, semaphore, str(n)) for n in range(4)]
    threads = [
        threading.Thread(target=lambda s: [s.observe(WANTED) for _ in range(7)], args=(s,)) for s in shared
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert semaphore.permits == 8  # with n permits n good calls add one: 1 + 2 + ... + 7 = 28 calls


@pytest.mark.timeout(60)
def test_a_worker_that_was_stopped_with_the_lock_holds_up_no_other(tmp_path: Path) -> None:
    shared = SharedLimit(tmp_path, FileSemaphore(tmp_path, 1), "run 1")
    with locked(tmp_path / "adaptive.lock"), pytest.raises(RecordsError, match=r"lock .*is it stopped"):
        shared.observe(WANTED)
    shared.observe(WANTED)
    assert shared.semaphore.permits == 2


def test_a_worker_waits_while_others_have_the_lock_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now_s = tmp_path / "lock", itertools.count()

    def take_turns(seconds: float) -> None:
        second = next(now_s)
        os.utime(path, (second, second))
        if second >= 100:
            first.close()

    first = LockFile(str(path))
    first.lock()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now_s)))
    monkeypatch.setattr(time, "sleep", take_turns)
    with locked(path, longest_s=5.0):
        assert not first.is_open


MACHINE = """
import sys, time
own = time.monotonic
time.monotonic = lambda: own() + float(sys.argv[2])  # counts from another boot
from pathlib import Path
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.control.semaphore import FileSemaphore
from retrain.control.semaphore.adaptive import SharedLimit
from tests.semaphore_processes import running
directory = Path(sys.argv[1])
shared = SharedLimit(directory, FileSemaphore(directory, 32), sys.argv[2])
for _ in range(3):
    print("ready", flush=True)
    sys.stdin.readline()
    shared.observe(CallFacts("sample", 60.0, overloaded=True))
"""


def test_one_burst_on_two_machines_halves_once(tmp_path: Path) -> None:
    FileSemaphore(tmp_path, 32)
    with running(MACHINE, tmp_path, 0) as first, running(MACHINE, tmp_path, 500_000) as second:
        for machine in (first, second) * 3:
            assert machine.line() == "ready"
            machine.tell()
        assert [first.process.wait(), second.process.wait()] == [0, 0]
    assert FileSemaphore.inspect(tmp_path).permits == 16


@pytest.mark.parametrize("step_s", [0.5, -0.5])
def test_a_clock_that_is_adjusted_within_a_burst_halves_no_second_time(step_s: float) -> None:
    controller = ConcurrencyLimit(32)
    controller.observe(100, REFUSED)
    assert controller.observe(100 + step_s, REFUSED).permits == 16


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_that_is_set_does_not_keep_the_permits_from_falling(step_s: float) -> None:
    controller = ConcurrencyLimit(32)
    controller.observe(100, REFUSED)
    assert controller.observe(100 + step_s, REFUSED).permits == 8


def test_what_was_learned_outlives_a_campaign_that_is_started_again(tmp_path: Path) -> None:
    semaphore = FileSemaphore(tmp_path, 8)
    shared = SharedLimit(tmp_path, semaphore, "run 1")
    shared.observe(REFUSED)
    semaphore.set_permits(8)
    shared.observe(CallFacts("sample", 1.0))
    assert semaphore.permits == 4


def test_a_resume_removes_what_killed_workers_left(campaign_file: Path) -> None:
    campaign = start(campaign_file, [*ONE_RUN, "campaign.launcher=inline", 'backend.max_concurrent="auto"'])
    files = CampaignFiles(campaign.directory)
    left = [
        files.permits / ".adaptive.json.1-0a1b2c3d.tmp",
        files.permits / ".permits.json.1-0a1b2c3d.tmp",
        files.run("grpo_s0").directory / "loggers" / ".csv.json.1-0a1b2c3d.tmp",
    ]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_text("{")
    assert campaign.execute().exit_code == 0
    assert not [path for path in left if path.exists()]


def test_a_damaged_state_begins_anew_with_the_permits_that_there_are(tmp_path: Path) -> None:
    semaphore = FileSemaphore(tmp_path, 6)
    (tmp_path / "adaptive.json").write_text('{"permits": 3')
    SharedLimit(tmp_path, semaphore, "run 1").observe(REFUSED)
    assert semaphore.permits == 3


SILENT = """
from dataclasses import replace
from retrain.backends import numpy
check_options = numpy.check_options

def connect(spec):
    return numpy.connect(replace(spec, observe_call=None))
"""


@pytest.mark.parametrize(("is_silent", "problems"), [(True, ["holds permits"]), (False, [])])
def test_a_backend_that_holds_permits_and_reports_no_call_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_silent: bool, problems: list[str]
) -> None:
    (tmp_path / "silent_api.py").write_text(SILENT)
    monkeypatch.syspath_prepend(tmp_path)
    name = "silent_api.connect" if is_silent else "numpy"
    found = [one.problem for one in check_plugin("backends", name, {"api_latency_s": 0.001}) if one.problem]
    assert [problem[:13] for problem in found] == problems


def test_the_output_of_a_run_says_that_its_permits_cannot_adapt(
    campaign_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(campaign_file, ['backend.max_concurrent="auto"'])
    permits = RunPermits(config, run := RunFiles(tmp_path / "run"), campaign_of(run.directory))
    with permits.permit():
        pass
    why = "the backend reports no call to spec.observe_call; set a number"
    assert permits.take_use().permits_fixed == why
    assert why in caplog.text
    caplog.clear()
    assert permits.take_use().permits_fixed == why, "every row says so"
    assert not caplog.text


def test_a_row_does_not_say_that_permits_are_fixed_once_a_call_was_reported(
    campaign_file: Path, tmp_path: Path
) -> None:
    config = load_config(campaign_file, ['backend.max_concurrent="auto"'])
    permits = RunPermits(config, run := RunFiles(tmp_path / "run"), campaign_of(run.directory))
    with permits.permit():
        pass
    assert permits.observe_call is not None
    permits.observe_call(CallFacts("call", 0.1))
    assert permits.take_use().permits_fixed is None
