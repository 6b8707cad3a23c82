"""Logs are shown, safe to print, and followed until nobody is left who would write to them."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.base.locks import hold
from retrain.campaign.run import start
from retrain.config.resolve import label_of
from retrain.records.layout import CampaignFiles
from retrain.results.status.one_run import find_log, find_run, follow
from tests.simulated import flat, write_campaign


@pytest.fixture
def campaign(tmp_path: Path) -> CampaignFiles:
    """A run that is done, and one that died."""
    runs = {("grpo", 0): flat(0.5), ("grpo", 1): flat(0.5, 3, ending="")}
    return CampaignFiles(write_campaign(tmp_path, runs))


def test_a_finished_runs_log_is_over_while_its_campaign_goes_on(campaign):
    with hold(campaign.lock):
        assert find_log(campaign.directory, "grpo_s0").is_over()


def test_a_dead_runs_log_may_go_on_while_its_campaign_could_start_it_again(campaign):
    log = find_log(campaign.directory, "grpo_s1")
    with hold(campaign.lock):
        assert not log.is_over()
    assert log.is_over()


def test_a_log_is_not_over_while_its_worker_lives(campaign):
    with hold(campaign.run("grpo_s0").lock):
        assert not find_log(campaign.directory, "grpo_s0").is_over()


def test_a_log_directory_offers_its_campaigns(campaign):
    with pytest.raises(ConfigError, match=f"log directory; name a campaign.*{campaign.directory.name}"):
        find_log(campaign.directory.parent)
    with pytest.raises(ConfigError, match="does not exist"):
        find_log(campaign.directory / "nowhere")


def test_a_single_run_in_the_background_shows_its_orchestrators_messages_too(
    retrain: Callable[..., subprocess.CompletedProcess[str]], here: Path
) -> None:
    (here / "one.toml").write_text("[training]\nseed = 1\n")
    files = CampaignFiles(start(here / "one.toml").directory)
    files.directory.joinpath("output.log").touch()
    assert "output.log: no output" in retrain("logs", files.directory).stderr
    files.log.write_text("started maxrl_s1\n")
    shown = retrain("logs", files.directory)
    assert (shown.stdout, shown.stderr) == ("started maxrl_s1\n", "")
    files.directory.joinpath("output.log").write_text("a warning\n")
    shown = retrain("logs", files.directory)
    assert (shown.stdout, shown.stderr) == ("a warning\nstarted maxrl_s1\n", "output.log:\n")


def test_a_run_is_found_by_its_conditions_own_name(tmp_path):
    runs = CampaignFiles(write_campaign(tmp_path, {(label_of("Контроль"), 0): flat(0.5)}))
    assert find_run(runs.directory, "Контроль_s0").directory.name == f"{label_of('Контроль')}_s0"
    slashed = CampaignFiles(write_campaign(tmp_path / "2", {(label_of("max rl/ü"), 0): flat(0.5)}))
    assert find_run(slashed.directory, "max rl/ü_s0").directory.name == f"{label_of('max rl/ü')}_s0"
    for name in ("../max_s0", "a/b", "..", "/etc_s0"):
        with pytest.raises(ConfigError, match="has no run"):
            find_run(slashed.directory, name)
    with pytest.raises(ConfigError, match="has no run 'Другой_s0'"):
        find_run(runs.directory, "Другой_s0")
    alone = find_run(runs.directory, "Контроль_s0").directory.rename(tmp_path / "alone")
    with pytest.raises(ConfigError, match="is a run by itself; name no other"):
        find_run(alone, "other_s0")


def test_a_list_of_runs_gives_the_names_that_status_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "c.toml"
    file.write_text(
        "[campaign]\nseeds = [0]\nlauncher = 'inline'\nmax_steps = 1\nconditions = [{name = 'größe x'}]"
    )
    campaign = start(file)
    assert campaign.execute().exit_code == 0
    for name in ("", "other_s0"):
        with pytest.raises(ConfigError, match="größe x_s0"):
            find_run(campaign.directory, name)


def test_the_nearest_of_many_runs_is_offered(tmp_path):
    directory = write_campaign(
        tmp_path,
        {("grpo", seed): flat(0.5) for seed in range(8)} | {("maxrl", seed): flat(0.5) for seed in range(8)},
    )
    with pytest.raises(ConfigError, match="has no run 'maxrl_s9'; did you mean 'maxrl_s"):
        find_run(directory, "maxrl_s9")


def test_logs_show_a_runs_output_without_what_a_terminal_would_obey(
    retrain: Callable[..., subprocess.CompletedProcess[str]], campaign_file: Path
) -> None:
    directory = start(campaign_file).directory
    (directory / "runs" / "grpo_s0" / "output.log").write_bytes(b"one\n\x1b[31mred\x1b[0m\xff\nlast")
    assert retrain("logs", directory / "runs" / "grpo_s0").stdout.split() == ["one", "red\ufffd", "last"]
    assert retrain("logs", directory, "grpo_s0", "-n", "1").stdout.split() == ["red\ufffd", "last"]
    wrong = retrain("logs", directory, "grpo_s9")
    assert (wrong.returncode, "grpo_s0, grpo_s1" in wrong.stderr) == (2, True)


def test_logs_keep_the_blanks_of_tables_and_tracebacks(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b'  File "a.py"\r\n    raise\x1b[2J  it\n\n name    steps\n' + b"x" * 9000)
    lines = ['  File "a.py"', "    raise  it", "", " name    steps"]
    *whole, cut = follow(log, 9, lambda: True)
    assert (whole, len(cut), cut[-1]) == (lines, 2000, "…")


@pytest.mark.parametrize("way", ["cut back", "replaced", "gone for a while"])
def test_a_log_that_is_rotated_is_followed_from_its_new_beginning(way: str, tmp_path: Path) -> None:
    log, states = tmp_path / "output.log", iter(["read", "rotate", "look", "write", "end"])
    log.write_text("old\nunfinished")

    def is_over() -> bool:
        state = next(states)
        if state == "rotate":
            if way != "cut back":
                log.rename(tmp_path / "output.log.1")
            if way != "gone for a while":
                log.write_text("")
        elif state == "write":
            log.write_text("new\n")
        return state == "end"

    assert list(follow(log, 9, is_over)) == ["old", "new"]


def test_following_gives_every_line_once_and_ends_with_the_writer(tmp_path: Path) -> None:
    log, ended = tmp_path / "output.log", threading.Event()
    log.write_text("old\n")
    seen = follow(log, 5, ended.is_set)
    assert next(seen) == "old"

    def write() -> None:
        with log.open("a") as file:
            for number in range(100):
                file.write(f"line {number}\n")
                file.flush()
            file.write("no newline at the end")
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    found = list(seen)
    writer.join()
    assert found == [*(f"line {number}" for number in range(100)), "no newline at the end"]
    assert list(follow(log, 2, ended.is_set)) == ["line 98", "line 99", "no newline at the end"]
    assert list(follow(tmp_path / "none", 5, ended.is_set)) == []
