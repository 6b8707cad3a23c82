import errno
import json
import os
import shutil
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta

import pytest
from typer.testing import CliRunner

from retrain.base.errors import EXIT_CONFIG, RecordsError
from retrain.base.locks import hold
from retrain.campaign.endings import conclude
from retrain.cli import app
from retrain.cli.render.status import time_left, warnings
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.control.semaphore import FileSemaphore
from retrain.control.semaphore.adaptive import SharedLimit
from retrain.records import run_state
from retrain.records.files import write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import new_manifest, write_manifest
from retrain.records.metrics import MetricsWriter
from retrain.records.run_row import RunEntry, row_of
from retrain.records.run_state import Progress, begin_attempt, end_attempt, write_done, write_progress
from retrain.records.rungs import Rung, Searched
from retrain.results.status import survey

PLANNED = [RunEntry(f"{c}_s{s}", c, s, 10) for c in ("grpo", "maxrl") for s in (1, 2)]


def _rows(files: RunFiles, steps, reward=0.5, attempt=1, **values):
    with MetricsWriter(files.metrics, attempt) as metrics:
        for step in steps:
            metrics.append({"step": step, "mean_reward": reward, "step_time_s": 2.0} | values)


def _finish(files: RunFiles, reward):
    begin_attempt(files.attempts)
    _rows(files, range(1, 11), reward)
    end_attempt(files.attempts, 1, "done")
    write_done(files.done, "", {"eval_reward": reward})


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).isoformat()


@pytest.fixture
def campaign(tmp_path):
    files = CampaignFiles(tmp_path / "study-20250131T120000Z-0a1b")
    for run in PLANNED:
        files.run(run.run_id).directory.mkdir(parents=True)
    files.campaign_toml.touch()
    write_manifest(files.manifest, new_manifest("study", "hash", PLANNED, tmp_path))
    return files


def _only(campaign):
    (found,) = survey(campaign.directory.parent)
    return found


def run_in(found, condition, seed):
    return next(run for run in found.runs if (run.condition, run.seed) == (condition, seed))


def test_a_campaign_that_has_not_begun_is_pending(campaign):
    found = _only(campaign)
    assert (found.state, found.steps_done, found.steps_total, found.eta_s) == ("pending", 0, 40, None)
    assert (len(found.conditions), found.seeds) == (2, (1, 2))


def test_finished_runs_give_mean_and_spread_over_seeds(campaign):
    for run, reward in zip(PLANNED, (0.4, 0.6, 1.0, 1.0), strict=True):
        _finish(campaign.run(run.run_id), reward)
    found = _only(campaign)
    grpo, maxrl = found.conditions
    assert found.state == "done"
    assert (grpo.done, grpo.reward_mean, grpo.reward_std) == (2, pytest.approx(0.5), pytest.approx(0.02**0.5))
    assert (maxrl.reward_mean, maxrl.reward_std) == (1.0, 0.0)
    assert run_in(found, "grpo", 2).eval_reward == 0.6


def test_the_lock_and_not_the_status_file_says_that_a_run_is_running(campaign):
    run = campaign.run("grpo_s1")
    write_progress(run.status, Progress("running", "train", 4, 10, 1))
    with hold(run.lock):
        begin_attempt(run.attempts)
        assert run_in(_only(campaign), "grpo", 1).phase == "train"
        assert _only(campaign).state == "running"
    dead = run_in(_only(campaign), "grpo", 1)
    assert (dead.state, dead.phase, dead.step) == ("died", "", 4)


def test_the_time_left_is_shared_among_the_runs_that_go_on(campaign):
    running = ("grpo_s1", "grpo_s2")
    with hold(campaign.lock), hold(campaign.run(running[0]).lock), hold(campaign.run(running[1]).lock):
        for run_id in running:
            _rows(campaign.run(run_id), range(1, 6))
        assert _only(campaign).eta_s == 2.0 * (5 + 5 + 10 + 10) / 2


def test_the_time_left_does_not_count_the_wait_for_an_api_that_is_out(campaign):
    run = campaign.run("grpo_s1")
    write_progress(run.status, Progress("running", "API paused", 5, 10, 1, detail="capacity, 4 min"))
    with hold(campaign.lock), hold(run.lock):
        begin_attempt(run.attempts)
        _rows(run, range(1, 6))
        assert time_left(_only(campaign)).endswith(", not counting this wait (API paused: capacity, 4 min)")


def test_nobody_is_said_to_supervise_a_campaign_whose_orchestrator_died(campaign):
    files = campaign.run("grpo_s1")
    with hold(files.lock):
        begin_attempt(files.attempts)
        _rows(files, range(1, 6))
        with hold(campaign.lock):
            supervised = _only(campaign)
        alone = _only(campaign)
    assert (supervised.is_supervised, supervised.resume_with) == (True, "")
    assert (alone.state, alone.is_supervised) == ("running", False)
    assert alone.resume_with == f"retrain resume {campaign.directory}"
    assert (supervised.eta_s, alone.eta_s) == (pytest.approx(70.0), pytest.approx(10.0))  # 35 and 5 steps
    assert (_only(campaign).state, _only(campaign).resume_with) == ("interrupted", alone.resume_with)


def test_a_finished_campaign_and_a_run_of_one_have_nothing_to_go_on_with(campaign):
    begun = campaign.run("grpo_s1")
    begun.run_toml.touch()
    with hold(begun.lock):
        (run,) = survey(begun.directory)
    assert (run.state, run.resume_with) == ("running", "")
    for planned in PLANNED:
        _finish(campaign.run(planned.run_id), 0.5)
    assert _only(campaign).resume_with == ""


def test_a_failed_run_shows_the_last_line_of_its_error(campaign):
    run = campaign.run("grpo_s1")
    begin_attempt(run.attempts)
    end_attempt(run.attempts, 1, "failed", message="Traceback ...\n\x1b[31mValueError: no such [bold]task\n")
    found = _only(campaign)
    assert run_in(found, "grpo", 1).state == "failed"
    assert run_in(found, "grpo", 1).message == "ValueError: no such [bold]task"
    assert found.conditions[0].failed == 1


@pytest.mark.parametrize(("ending", "flag"), [("failed", " --failed"), ("infrastructure", "")])
def test_failed_runs_go_on_with_a_flag_and_those_of_a_failed_machine_without(campaign, ending, flag):
    for planned in PLANNED:
        begin_attempt(campaign.run(planned.run_id).attempts)
        end_attempt(campaign.run(planned.run_id).attempts, 1, ending)
    found = _only(campaign)
    assert (found.state, found.resume_with) == ("failed", f"retrain resume {campaign.directory}{flag}")


def test_no_command_is_named_where_a_search_was_decided_without_the_runs_that_are_left(campaign, tmp_path):
    for planned in PLANNED:
        if planned.condition == "grpo":
            _finish(campaign.run(planned.run_id), 1.0)
        else:
            begin_attempt(campaign.run(planned.run_id).attempts)
            end_attempt(campaign.run(planned.run_id).attempts, 1, "failed")
    started = new_manifest("study", "hash", PLANNED, tmp_path)
    rung = Rung(10, {"grpo": 1.0, "maxrl": None}, ("grpo",))
    found = Searched("eval_reward", "grpo", (1, 2), (rung,), "grpo")
    write_manifest(campaign.manifest, replace(started, searched=found))
    assert (_only(campaign).state, _only(campaign).resume_with) == ("failed", "")
    write_manifest(campaign.manifest, replace(started, searched=replace(found, winner="")))
    assert _only(campaign).resume_with == f"retrain resume {campaign.directory}"  # others are still to come


def test_a_campaign_without_failed_runs_goes_on_without_a_flag(campaign, tmp_path):
    for planned in PLANNED:
        _finish(campaign.run(planned.run_id), 1.0)
    started = new_manifest("study", "hash", PLANNED, tmp_path)
    write_manifest(campaign.manifest, replace(started, searched=Searched("eval_reward", "grpo", (1, 2))))
    empty = CampaignFiles(tmp_path / "other-20250131T120000Z-0a1c")
    empty.directory.mkdir()
    empty.campaign_toml.touch()
    found = survey(tmp_path)
    assert [(one.state, one.resume_with) for one in found] == [
        ("interrupted", f"retrain resume {campaign.directory}"),
        ("pending", f"retrain resume {empty.directory}"),
    ]


def test_the_last_output_of_a_run_that_was_killed_is_not_called_the_cause(campaign):
    run = campaign.run("grpo_s1")
    begin_attempt(run.attempts)
    assert run_in(_only(campaign), "grpo", 1).message == "ended without a message (killed?)"
    run.output_log.write_bytes(b"step 1\nall good, accuracy 100% \xff\n")
    assert run_in(_only(campaign), "grpo", 1).message == (
        "ended without a message (killed?); last output: all good, accuracy 100% \N{REPLACEMENT CHARACTER}"
    )


@pytest.mark.parametrize(("code", "is_cause"), [(0, False), (3, False), (EXIT_CONFIG, True)])
def test_the_last_output_is_the_cause_only_where_a_worker_exits_with_a_code_of_its_own(
    campaign, code, is_cause
):
    run = campaign.run("grpo_s1")
    run.output_log.write_text("all good, accuracy 100%\n")
    told = "" if is_cause else f"the worker exited with code {code} and no message; last output: "
    assert conclude(run, "abc", code, None).message == told + "all good, accuracy 100%"


def test_back_pressure_and_permit_waits_are_those_of_the_last_step(campaign):
    values = {"bp_regime": "optimal", "bp_p_star": 12.5, "bp_utilization": 0.8, "permit_wait_s": 0.25}
    _rows(campaign.run("grpo_s1"), [1, 2], **values)
    run = run_in(_only(campaign), "grpo", 1)
    assert (run.bp_regime, run.bp_p_star, run.bp_utilization, run.permit_wait_s) == (
        "optimal",
        12.5,
        0.8,
        0.25,
    )


def test_a_number_that_no_float_holds_is_none(campaign):
    _rows(campaign.run("grpo_s1"), [1, 2], 10**400)
    run = run_in(_only(campaign), "grpo", 1)
    assert (run.step, run.reward_last, run.step_time_s) == (2, None, 2.0)


def test_first_and_last_reward_are_told_apart(campaign):
    _rows(campaign.run("grpo_s1"), [1], reward=0.0)
    _rows(campaign.run("grpo_s1"), range(2, 12), reward=1.0)
    run = run_in(_only(campaign), "grpo", 1)
    assert (run.reward_first, run.reward_last, run.reward_mean, run.step) == (0.0, 1.0, 1.0, 11)


@pytest.mark.parametrize("content", [None, "{"])
def test_lost_permits_are_named_once_with_what_restores_them(campaign, content):
    FileSemaphore(campaign.permits, 2)
    path = campaign.permits / "permits.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    problem = _only(campaign).problem
    assert problem.startswith(f"{path}: ")
    assert "as `retrain resume` does" in problem
    assert problem.count(str(campaign.permits)) == 1


def test_permits_that_are_being_opened_for_the_first_time_are_no_problem(campaign):
    campaign.permits.mkdir()
    (campaign.permits / "permits.lock").touch()
    found = _only(campaign)
    assert (found.permits, found.problem) == (None, "")


@pytest.fixture
def make_stale(monkeypatch):
    """Have a path's file server lose it."""

    def lose(lost):
        stat = os.stat

        def stale(path, **more):
            if str(path) == str(lost):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return stat(path, **more)

        monkeypatch.setattr(os, "stat", stale)

    return lose


def test_permits_that_cannot_be_looked_at_for_now_are_a_problem(campaign, make_stale):
    make_stale(campaign.permits)
    assert "Stale file handle" in _only(campaign).problem


def test_a_campaign_is_shown_by_its_runs_while_its_origin_cannot_be_looked_at(campaign, make_stale):
    begin_attempt(campaign.run("grpo_s1").attempts)
    campaign.manifest.unlink()
    make_stale(campaign.origin)
    assert run_in(_only(campaign), "grpo", 1).state == "died"


def test_permits_show_who_holds_them(campaign):
    with FileSemaphore(campaign.permits, 2, label="grpo_s1"):
        permits = _only(campaign).permits
    assert (permits.permits, permits.waiting) == (2, 0)
    assert [(holder.pid, holder.label) for holder in permits.holders] == [(os.getpid(), "grpo_s1")]


def test_permits_that_adapted_say_why(campaign):
    semaphore = FileSemaphore(campaign.permits, 8)
    SharedLimit(campaign.permits, semaphore, "grpo_s1").observe(CallFacts("sample", 1.0, overloaded=True))
    permits = _only(campaign).permits
    assert (permits.permits, permits.change) == (4, "8 -> 4, the API said that it is overloaded")


def test_a_single_run_is_a_campaign_of_one(tmp_path):
    run = RunFiles(tmp_path / "alone-20250131T120000Z-0a1b")
    run.directory.mkdir()
    run.run_toml.touch()
    _finish(run, 0.75)
    (found,) = survey(tmp_path)
    assert (found.state, len(found.runs), found.runs[0].reward_last) == ("done", 1, 0.75)


@pytest.mark.parametrize("name", ["done.json", "status.json", "metrics.jsonl", "attempts.jsonl", "run.lock"])
@pytest.mark.parametrize("kind", ["garbage", "directory", "fifo", "loop"])
def test_a_broken_file_troubles_only_its_own_run(campaign, name, kind):
    path = campaign.run("grpo_s1").directory / name
    plant = {
        "garbage": lambda: path.write_bytes(b"\0\xff{[" * 999),
        "directory": path.mkdir,
        "fifo": lambda: os.mkfifo(path),
        "loop": lambda: path.symlink_to(path),
    }
    plant[kind]()
    _finish(campaign.run("grpo_s2"), 0.5)
    found = _only(campaign)
    assert run_in(found, "grpo", 2).state == "done"
    assert run_in(found, "grpo", 1).state in ("unreadable", "pending")


def test_a_status_file_that_a_power_loss_emptied_does_not_hide_the_run(campaign):
    run = campaign.run("grpo_s1")
    _rows(run, [1, 2])
    run.status.touch()
    found = run_in(_only(campaign), "grpo", 1)
    assert (found.state, found.step) == ("pending", 2)
    assert "status.json" in found.message


def test_a_lost_manifest_is_made_up_for_by_the_names_of_the_runs(campaign):
    campaign.manifest.unlink()
    _finish(campaign.run("grpo_s2"), 0.5)
    found = _only(campaign)
    assert (run_in(found, "grpo", 2).state, len(found.runs), found.problem) == ("done", 4, "")


def test_a_corrupt_manifest_is_reported_and_the_runs_are_shown(campaign):
    campaign.manifest.write_text('{"torn')
    found = _only(campaign)
    assert "manifest.json" in found.problem
    assert len(found.runs) == 4


def test_a_damaged_file_without_a_manifest_is_reported_and_the_runs_are_shown(campaign):
    campaign.manifest.unlink()
    campaign.campaign_toml.write_text("seeds = [")
    found = _only(campaign)
    assert "campaign.toml: what it plans is unknown" in found.problem
    assert len(found.runs) == 4


def test_a_campaign_without_its_files_beside_another_is_named(campaign):
    logs = campaign.directory.parent
    lost, begun = (logs / f"lost-20250131T1200{second}0Z-0a1b" for second in (1, 2))
    (lost / "runs" / "grpo_s1").mkdir(parents=True)
    begun.mkdir()  # whose file is about to be written
    line = f"{lost} is left out: it has runs, but no campaign.toml; restore it or move them away"
    shown = CliRunner().invoke(app, ["status", str(logs)])
    told = json.loads(CliRunner().invoke(app, ["status", str(logs), "--json"]).stdout)
    assert (shown.exit_code, shown.stdout.splitlines()[0]) == (0, line)
    assert (told["left_out"], [c["id"] for c in told["campaigns"]]) == ([line], [campaign.directory.name])


def test_an_older_campaign_that_is_damaged_is_named_below_the_table_of_older_ones(campaign):
    logs = campaign.directory.parent
    for day in range(1, 7):
        shutil.copytree(campaign.directory, logs / f"study-2025020{day}T120000Z-0a1b")
    campaign.manifest.write_text('{"torn')
    shown = CliRunner().invoke(app, ["status", str(logs)]).stdout.splitlines()
    assert any(line.startswith(f"{campaign.directory.name}: {campaign.manifest}") for line in shown)


def test_a_manifest_that_leads_out_of_the_campaign_is_not_followed(campaign):
    write_manifest(
        campaign.manifest, new_manifest("s", "h", [RunEntry("../../x", "c", 1, 1)], campaign.directory)
    )
    with pytest.raises(RecordsError, match="is not a run id"):
        survey(campaign.directory)


def test_hostile_names_are_shown_without_what_a_terminal_obeys(campaign):
    campaign.manifest.unlink()
    (campaign.runs / "\x1b]0;x\x07\u202eevil\n_s7").mkdir()
    run = next(r for r in _only(campaign).runs if r.seed == 7)
    assert (run.run_id, run.condition) == ("evil _s7", "evil")


def test_an_empty_directory_has_no_campaigns(tmp_path):
    assert survey(tmp_path) == ()


def test_a_directory_with_only_unreadable_campaigns_is_an_error(campaign):
    for run in PLANNED:
        campaign.run(run.run_id).done.write_text("torn")
    with pytest.raises(RecordsError, match=r"done\.json"):
        survey(campaign.directory)


@pytest.mark.parametrize(
    ("ago_s", "started_s", "is_silent"),
    [(15.0, 60.0, False), (21.0, 60.0, True), (-30.0, 60.0, False), (3600.0, 1.0, False)],
)
def test_a_worker_that_stands_still_is_named_and_no_time_left_is_shown(
    campaign, ago_s, started_s, is_silent, monkeypatch
):
    run = campaign.run("grpo_s1")
    with hold(campaign.lock), hold(run.lock):
        monkeypatch.setattr(run_state, "utc_now", lambda: ago(started_s))
        begin_attempt(run.attempts)
        monkeypatch.undo()
        _rows(run, range(1, 6))  # of 2 s each
        write_json(run.status, {**asdict(Progress("running", "train", 5, 10, 1)), "updated_at": ago(ago_s)})
        found = _only(campaign)
    said = [text.plain for text in warnings(found.runs)]
    assert (found.eta_s is None) == is_silent
    assert bool(said) == is_silent
    if is_silent:
        assert said[0].startswith("grpo_s1: nothing has happened for 2")
        assert said[0].endswith(", where a step takes 2.0 s; is its worker suspended?")


def test_a_run_whose_last_attempt_is_over_is_not_silent_until_the_next_begins(campaign):
    run = campaign.run("grpo_s1")
    number = begin_attempt(run.attempts)
    end_attempt(run.attempts, number, "interrupted")
    _rows(run, range(1, 6))
    write_json(run.status, {**asdict(Progress("running", "train", 5, 10, 1)), "updated_at": ago(3600.0)})
    with hold(campaign.lock), hold(run.lock):
        assert not list(warnings(_only(campaign).runs))


def test_a_long_step_is_no_standstill(campaign):
    planned = RunEntry("grpo_s1", "grpo", 1, 10)
    row = row_of(planned, {"state": "running", "step_time_s": 120.0, "updated_at": "2026-01-01T00:00:00Z"})
    assert row.silent_s("2026-01-01T00:19:00Z") is None
    assert row.silent_s("2026-01-01T00:21:00Z") == 1260.0


@pytest.mark.parametrize(
    ("host", "step_time_s", "least_s"),
    [("", 0.1, 5.0), ("", 2.0, 20.0), ("", None, 60.0), ("another", 0.1, 60.0), ("another", 8.0, 80.0)],
)
def test_a_standstill_is_ten_usual_steps_and_a_few_seconds(host, step_time_s, least_s):
    here = {"state": "running", "updated_at": "2026-01-01T00:00:00Z", "step_time_s": step_time_s}
    row = row_of(RunEntry("r", "c", 1, 10), here | {"host": host or os.uname().nodename})
    begin = datetime(2026, 1, 1, tzinfo=UTC)
    for seconds, silent_s in ((least_s - 0.5, None), (least_s + 0.5, least_s + 0.5)):
        assert row.silent_s((begin + timedelta(seconds=seconds)).isoformat()) == silent_s
