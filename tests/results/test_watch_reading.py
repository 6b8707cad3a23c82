"""Watching reads only what changed, and must show what `status` shows."""

import dataclasses
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.base.locks import hold
from retrain.cli.render.frame import event_line
from retrain.records import run_state
from retrain.records.campaign_state import NoticeBook
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import LONGEST_LINE_BYTES, WHOLE_BYTES, GrowingFile
from retrain.records.manifest import new_manifest, write_manifest
from retrain.records.metrics import MetricsWriter
from retrain.records.run_row import RunEntry
from retrain.records.run_state import Progress, begin_attempt, end_attempt, write_done, write_progress
from retrain.results.status import survey, watch
from retrain.results.status.watch import MOST_POINTS, RewardCurve, Watcher

PLANNED = [RunEntry(f"{c}_s{s}", c, s, 10) for c in ("grpo", "maxrl") for s in (1, 2)]


def make_campaign(where, name="study-20250131T120000Z-0a1b"):
    files = CampaignFiles(where / name)
    for run in PLANNED:
        files.run(run.run_id).directory.mkdir(parents=True)
    files.campaign_toml.touch()
    write_manifest(files.manifest, new_manifest("study", "hash", PLANNED, where))
    return files


@pytest.fixture
def campaign(tmp_path):
    return make_campaign(tmp_path)


def rows(files: RunFiles, steps, attempt=1, **values):
    with MetricsWriter(files.metrics, attempt) as metrics:
        for step in steps:
            metrics.append({"step": step, "mean_reward": step / 10, "step_time_s": 2.0} | values)


def kinds(view):
    return [(added.run_id, added.kind) for added in view.added]


def _append(path, data: bytes):
    with path.open("ab") as file:
        file.write(data)


def test_each_complete_line_is_given_once(tmp_path):
    path = tmp_path / "lines"
    growing = GrowingFile(path)
    path.write_bytes(b"one\ntw")
    assert growing.read_growth().lines == [b"one"]
    _append(path, b"o\nthree\n")
    assert growing.read_growth().lines == [b"two", b"three"]
    assert growing.read_growth() is None


def test_a_file_that_was_replaced_begins_anew(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    growing = GrowingFile(path)
    growing.read_growth()
    (tmp_path / "other").write_bytes(b"another\n")
    (tmp_path / "other").replace(path)
    growth = growing.read_growth()
    assert (growth.lines, growth.begins_anew) == ([b"another"], True)


def test_a_torn_tail_that_the_next_writer_cuts_off_is_never_given(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntorn")
    growing = GrowingFile(path)
    growing.read_growth()
    os.truncate(path, 4)
    _append(path, b"two\n")
    growth = growing.read_growth()
    assert (growth.lines, growth.begins_anew) == ([b"two"], False)


@pytest.mark.parametrize("length", [20, 5000, LONGEST_LINE_BYTES // 2])
def test_of_a_long_file_the_first_and_last_lines_and_some_between_are_read(tmp_path, length):
    path = tmp_path / "lines"
    count = 20 * WHOLE_BYTES // length + 10
    path.write_bytes(b"".join(str(i).encode().rjust(length) + b"\n" for i in range(count)))
    numbers = [int(line) for line in GrowingFile(path).read_growth().lines]
    assert (numbers[0], numbers[-1]) == (0, count - 1)
    assert numbers == sorted(set(numbers))
    assert len(numbers) >= 5


@given(values=st.lists(st.floats(-1, 1), min_size=1, max_size=400))
def test_a_curve_keeps_the_mean_whatever_it_joins(values):
    curve = RewardCurve()
    for step, value in enumerate(values):
        curve.add(step, value)
    kept = curve.values()
    assert len(kept) <= MOST_POINTS
    assert min(values) - 1e-9 <= min(kept)
    assert max(kept) <= max(values) + 1e-9


def test_a_resumed_run_takes_back_what_was_rolled_back():
    curve = RewardCurve()
    for step in (0, 1, 2, 3, 2):
        curve.add(step, float(step))
    assert curve.values() == (0.0, 1.0, 2.0)


def test_events_name_runs_as_tables_do(tmp_path):
    files = CampaignFiles(tmp_path / "study-20250131T120000Z-0a1b")
    planned = RunEntry("condition-4ee952_s0", "Контроль", 0, 10)
    files.run(planned.run_id).directory.mkdir(parents=True)
    files.campaign_toml.touch()
    write_manifest(files.manifest, new_manifest("study", "hash", [planned], tmp_path))
    begin_attempt(files.run(planned.run_id).attempts)
    (started,) = [event for event in Watcher(tmp_path).refresh().added if event.kind == "started"]
    assert (started.run_id, started.name) == ("condition-4ee952_s0", "Контроль_s0")
    assert "started Контроль_s0" in event_line(started).plain


class Story:
    """Things that happen to a campaign, as hypothesis orders them."""

    def __init__(self, files):
        self.files = files
        self.locks = {}
        self.steps = {run.run_id: 0 for run in PLANNED}

    def tell(self, number, what):
        run = self.files.run(PLANNED[number].run_id)
        getattr(self, what)(run, PLANNED[number].run_id)

    def begin(self, run, name):
        if name not in self.locks and not run.done.exists():
            self.locks[name] = hold(run.lock)
            begin_attempt(run.attempts)

    def step(self, run, name):
        self.steps[name] += 1
        rows(run, [self.steps[name]], bp_regime="optimal", batch_size=self.steps[name])
        write_progress(run.status, Progress("running", "train", self.steps[name], 10, 1))

    def roll_back(self, run, name):
        self.steps[name] = max(0, self.steps[name] - 2)

    def tear(self, run, name):
        _append(run.metrics, b'{"step": 3, "mean_rew\xff')

    def die(self, run, name):
        if name in self.locks:
            self.locks.pop(name).release()

    def fail(self, run, name):
        if name in self.locks:
            end_attempt(run.attempts, 1, "failed", message="Traceback\nValueError: no")
            self.die(run, name)

    def finish(self, run, name):
        if name in self.locks:
            end_attempt(run.attempts, 1, "done")
            write_done(run.done, "", {"eval_reward": 0.5})
            self.die(run, name)

    def break_status(self, run, name):
        run.status.write_bytes(b"")


def seen_of(status):
    """Everything but averages over the last rows, for which `status` counts torn and repeated lines too."""
    skipped = {"reward_mean": None, "step_time_s": None}
    return status.state, status.steps_done, [dataclasses.replace(run, **skipped) for run in status.runs]


DEEDS = ["begin", "step", "step", "roll_back", "tear", "die", "fail", "finish", "break_status", "look"]


@settings(max_examples=60)
@given(
    plot=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(DEEDS)), max_size=25),
    at_once=st.sampled_from((1, 2, watch.WHOLE_READS)),
)
def test_watching_shows_what_status_shows_whatever_happens(tmp_path_factory, plot, at_once):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "WHOLE_READS", at_once)
        follow(tmp_path_factory.mktemp("logs"), plot)


def follow(where, plot):
    story = Story(make_campaign(where))
    watcher = Watcher(where)
    for number, what in plot:
        if what == "look":
            watcher.refresh()
        else:
            story.tell(number, what)
    with_lock = hold(story.files.lock)  # a running campaign is looked at closely every time
    try:
        for _ in PLANNED:  # so that it is the turn of each run to be read as a whole
            view = watcher.refresh()
        assert seen_of(view.campaigns[0].status) == seen_of(survey(where)[0])
    finally:
        with_lock.release()
        for lock in story.locks.values():
            lock.release()


def test_starts_failures_and_retries_are_told_with_their_reasons(campaign):
    run, watcher = campaign.run("grpo_s1"), Watcher(campaign.directory)
    watcher.refresh()
    with hold(campaign.lock):
        begin_attempt(run.attempts)
        end_attempt(run.attempts, 1, "infrastructure", message="Traceback\nConnectionError: \x1b[31mgone")
        begin_attempt(run.attempts, resumed_from_step=4)
        end_attempt(run.attempts, 2, "done")
        view = watcher.refresh()
    assert kinds(view) == [
        ("grpo_s1", "started"),
        ("grpo_s1", "infrastructure"),
        ("grpo_s1", "retried"),
        ("grpo_s1", "done"),
    ]
    assert view.added[1].text == "ConnectionError: gone"
    assert view.added[2].text == "attempt 2, from step 4"


def test_of_more_runs_than_are_read_as_a_whole_rows_and_endings_are_seen_at_once(campaign, monkeypatch):
    monkeypatch.setattr(watch, "WHOLE_READS", 1)
    watcher, files = Watcher(campaign.directory), [campaign.run(run.run_id) for run in PLANNED]
    locks = [hold(campaign.lock), *(hold(run.lock) for run in files)]
    for run in files:
        begin_attempt(run.attempts)
        write_progress(run.status, Progress("running", "train", 0, 10, 1))
    watcher.refresh()
    for run in files:
        rows(run, [1])
    (seen,) = watcher.refresh().campaigns
    assert [(run.state, run.step, run.reward_last) for run in seen.status.runs] == [("running", 1, 0.1)] * 4
    for run in files:
        end_attempt(run.attempts, 1, "failed", message="why")
    for lock in locks:
        lock.release()
    (seen,) = watcher.refresh().campaigns
    assert {run.state for run in seen.status.runs} == {"failed"}


def test_of_many_runs_one_that_goes_on_does_not_count_as_silent(campaign, monkeypatch):
    monkeypatch.setattr(watch, "WHOLE_READS", 1)
    run, watcher = campaign.run("grpo_s1"), Watcher(campaign.directory)
    with hold(campaign.lock), hold(run.lock):
        begin_attempt(run.attempts)
        rows(run, range(1, 3))
        write_progress(run.status, Progress("running", "train", 2, 10, 1))
        for _ in PLANNED:
            watcher.refresh()
        later = "2099-01-01T00:00:00.000Z"
        monkeypatch.setattr(run_state, "utc_now", lambda: later)
        monkeypatch.setattr(watch, "utc_now", lambda: later)
        write_progress(run.status, Progress("running", "evaluate", 2, 10, 1))
        (seen,) = watcher.refresh().campaigns
    assert (seen.status.runs[0].phase, seen.status.runs[0].silent_s(later)) == ("evaluate", None)


def test_a_run_that_was_killed_is_told_once(campaign):
    run, watcher = campaign.run("grpo_s1"), Watcher(campaign.directory)
    with hold(campaign.lock), hold(run.lock):
        begin_attempt(run.attempts)
        assert kinds(watcher.refresh()) == [("grpo_s1", "started")]
    with hold(campaign.lock):
        assert kinds(watcher.refresh()) == [("grpo_s1", "died")]
        assert kinds(watcher.refresh()) == []


def test_changes_of_the_throttle_are_told_and_steady_levels_are_not(campaign):
    run, watcher = campaign.run("grpo_s1"), Watcher(campaign.directory)
    for step, level in enumerate(["full", "reduced", "reduced", "full"], start=1):
        rows(run, [step], throttle_level=level, throttle_reason=f"load of step {step}")
    told = [added.text for added in watcher.refresh().added]
    assert told == ["full -> reduced: load of step 2", "reduced -> full: load of step 4"]


def test_a_pause_for_other_work_is_told(campaign):
    run, watcher = campaign.run("grpo_s1"), Watcher(campaign.directory)
    write_progress(run.status, Progress("running", "paused: load 0.98", 4, 10, 1))
    assert [added.text for added in watcher.refresh().added] == ["load 0.98"]


def test_what_the_orchestrator_said_is_told_once_per_matter(campaign):
    book, watcher = NoticeBook(campaign.notices), Watcher(campaign.directory)
    for text in ("0 workers for now: load 0.98", "0 workers for now: load 0.97", "paused: three failures"):
        book.write(text)
    told = [added.text for added in watcher.refresh().added]
    assert told == ["0 workers for now: load 0.98", "paused: three failures"]


def test_a_batch_that_changes_every_step_does_not_hide_a_failure(campaign):
    run, watcher = campaign.run("grpo_s1"), Watcher(campaign.directory)
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "failed", message="why")
    rows(run, range(1, 500), bp_action="increase", bp_batch_size=9, bp_reason="room")
    view = watcher.refresh()
    assert [one.kind for one in view.events] == ["started", "failed", "batch"]


def test_campaigns_that_come_and_go_are_noticed(tmp_path):
    watcher = Watcher(tmp_path)
    assert watcher.refresh().campaigns == ()
    first = make_campaign(tmp_path, "a-20250131T120000Z-0a1b")
    make_campaign(tmp_path, "b-20250131T120000Z-0a1b")
    assert len(watcher.refresh().campaigns) == 2
    first.directory.rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    assert [c.status.id for c in watcher.refresh().campaigns] == ["b-20250131T120000Z-0a1b"]


def test_an_unchanged_campaign_is_the_same_object(campaign):
    watcher = Watcher(campaign.directory)
    assert watcher.refresh().campaigns[0] is watcher.refresh().campaigns[0]


def test_an_unchanged_file_is_not_opened_again(campaign, monkeypatch):
    rows(campaign.run("grpo_s1"), range(1, 5))
    watcher = Watcher(campaign.directory)
    with hold(campaign.lock):
        watcher.refresh()
        opened = []
        real = os.open
        monkeypatch.setattr(os, "open", lambda path, *a, **k: opened.append(str(path)) or real(path, *a, **k))
        watcher.refresh()
    assert not [path for path in opened if not path.endswith(".lock")]


def test_corrupted_lines_are_passed_over(campaign):
    run = campaign.run("grpo_s1")
    rows(run, [1])
    _append(run.metrics, b"\0\xff{[\n[]\n{}\n" * 20 + b'{"step": "9"}\n{"step": -1}\n')
    rows(run, [2])
    watched = Watcher(campaign.directory).refresh().campaigns[0].runs["grpo_s1"]
    assert (watched.row.step, watched.rewards) == (2, (0.1, 0.2))


@pytest.mark.parametrize("value", ["NaN", "1e999", "true", '"x"', "null", "[1]"])
def test_a_reward_that_is_no_number_is_left_out(campaign, value):
    run = campaign.run("grpo_s1")
    run.metrics.write_text(
        f'{{"step": 1, "mean_reward": {value}}}\n' + json.dumps({"step": 2, "mean_reward": 0.5}) + "\n"
    )
    watched = Watcher(campaign.directory).refresh().campaigns[0].runs["grpo_s1"]
    assert watched.rewards == (0.5,)
