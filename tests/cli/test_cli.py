"""The command line as a user meets it: what is typed, what is seen, which exit code."""

from __future__ import annotations

import errno
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain import cli
from retrain.base.errors import ConfigError, RecordsError
from retrain.campaign.run import reopen, start
from retrain.cli import COMMANDS, app
from retrain.records.metrics import read_metrics
from tests.conftest import ONE_RUN, TINY
from tests.full_disk import files_of_at_most
from tests.semaphore_processes import wait_until
from tests.simulated import flat, write_campaign

Call = Callable[..., subprocess.CompletedProcess[str]]
TESTS = Path(__file__).parents[1]


def test_init_writes_a_template_and_never_overwrites(retrain: Call, here: Path) -> None:
    assert retrain("init").returncode == 0
    assert retrain("init").returncode == 0  # nothing to overwrite
    (here / "campaign.toml").write_text("mine")
    refused = retrain("init")
    assert (refused.returncode, (here / "campaign.toml").read_text()) == (2, "mine")
    assert "--force" in refused.stderr
    assert retrain("init", "--force").returncode == 0
    assert (here / "campaign.toml").read_text() != "mine"


def test_init_replaces_no_link(retrain: Call, here: Path) -> None:
    (here / "shared.toml").write_text("mine")
    (here / "campaign.toml").symlink_to("shared.toml")
    refused = retrain("init", "--force")
    assert (refused.returncode, "is a symbolic link" in refused.stderr) == (2, True)
    assert (here / "campaign.toml").is_symlink()
    assert (here / "shared.toml").read_text() == "mine"


def test_init_on_a_full_disk_leaves_what_was_there(here: Path) -> None:
    for before in (None, "mine"):  # an empty file would be a campaign
        with files_of_at_most(100):
            answer = CliRunner().invoke(app, ["init", "--force"])
        assert isinstance(answer.exception, ConfigError)
        assert "campaign.toml: cannot be written (File too large)" in str(answer.exception)
        left = {path.name: path.read_text() for path in here.iterdir() if "campaign.toml" in path.name}
        assert left == ({"campaign.toml": before} if before else {})
        (here / "campaign.toml").write_text("mine")


def test_init_says_why_it_cannot_write_although_it_cannot_remove_either(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **_: object) -> None:  # a read-only file system does so even if nothing is there
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "unlink", refuse)
    with files_of_at_most(100):
        answer = CliRunner().invoke(app, ["init"])
    assert str(answer.exception) == "campaign.toml: cannot be written (File too large)"


@pytest.mark.parametrize("end", ["full disk", "Ctrl-C"])
def test_a_start_that_does_not_come_to_its_end_leaves_no_campaign(
    end: str, campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        if end == "full disk":
            stack.enter_context(files_of_at_most(100))
            stack.enter_context(pytest.raises(RecordsError, match=r"cannot write .*, then start again"))
        else:

            def press(fd: int) -> None:
                if any(here.glob("logs/*/origin.json")):
                    signal.raise_signal(signal.SIGINT)

            monkeypatch.setattr(os, "fsync", press)
            stack.enter_context(pytest.raises(KeyboardInterrupt))
        start(campaign_file)
    assert list((here / "logs").iterdir()) == []


def test_init_writes_the_schema_that_the_files_first_line_names(retrain: Call, here: Path) -> None:
    assert retrain("init", "-t", "quickstart").returncode == 0
    directive = (here / "quickstart.toml").read_text().splitlines()[0]
    assert directive == "#:schema ./retrain.schema.json"
    assert json.loads((here / "retrain.schema.json").read_text()) == json.loads(retrain("schema").stdout)


def test_init_lists_templates_and_hints_at_the_nearest(retrain: Call) -> None:
    listed = retrain("init", "--list").stdout.splitlines()
    names = ["agent", "campaign", "distill", "local", "quickstart", "tinker"]
    assert [line.split()[0] for line in listed] == names
    assert all(len(line.split()) > 5 for line in listed)
    wrong = retrain("init", "quikstart")
    assert (wrong.returncode, "did you mean 'quickstart'" in wrong.stderr) == (2, True)


def test_init_takes_a_templates_name_once(retrain: Call, here: Path) -> None:
    assert retrain("init", "quickstart").returncode == 0
    assert (here / "quickstart.toml").is_file()
    assert retrain("init", "quickstart", "-t", "agent").returncode == 2


def test_a_usage_line_names_its_arguments_once(retrain: Call) -> None:
    assert retrain("report", "-h").stdout.startswith("Usage: retrain report [OPTIONS] [DIR]")


@pytest.mark.parametrize("command", ["explain", "run"])
def test_a_bad_file_gives_every_problem_and_creates_nothing(command: str, retrain: Call, here: Path) -> None:
    (here / "bad.toml").write_text('[training]\nlr = -1\nbatch = 2\n[campaign]\nseeds = "12"\n')
    answer = retrain(command, "bad.toml")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 3
    assert "Traceback" not in answer.stderr
    assert [p.name for p in here.iterdir()] == ["bad.toml"]


def test_debug_shows_the_traceback(retrain: Call, here: Path) -> None:
    (here / "bad.toml").write_text("[training]\nlr = -1\n")
    answer = retrain("--debug", "explain", "bad.toml")
    assert (answer.returncode, "Traceback" in answer.stderr) == (2, True)


@pytest.mark.parametrize("words", [[], ["--debug"]])
def test_the_password_of_an_address_is_in_no_error(words: list[str], retrain: Call, here: Path) -> None:
    (here / "bad.toml").write_text('[model]\n"http://me:s3cret@127.0.0.1/models" = 1\n')
    told = retrain(*words, "explain", "bad.toml").stderr
    assert "http://127.0.0.1/models" in told
    assert "s3cret" not in told


def test_the_help_of_init_shows_the_option_that_names_a_template(retrain: Call) -> None:
    assert "--template" in retrain("init", "--help").stdout


def test_a_usage_error_has_exit_code_2(retrain: Call) -> None:
    assert retrain("expalin").returncode == 2


def test_explain_shows_matrix_capacity_and_the_pilot_to_run(retrain: Call, campaign_file: Path) -> None:
    shown = retrain("explain", campaign_file.name).stdout
    assert shown.count("&& retrain explain") == 1  # several answers name it
    for words in ("4 runs", "2 x 4 = 8", "total campaign steps", "16", "--set campaign.max_steps=4 "):
        assert words in shown
    assert not (campaign_file.parent / "logs").exists()


def test_explain_shows_no_seeds_where_each_campaign_draws_its_own(retrain: Call, here: Path) -> None:
    (here / "c.toml").write_text("[campaign]\nmax_steps = 5\n")
    (row,) = (line for line in retrain("explain", "c.toml").stdout.splitlines() if " maxrl " in line)
    assert row.split()[:4] == ["maxrl", "1", "drawn", "5"]


def test_explain_tells_permits_that_adapt(retrain: Call, campaign_file: Path) -> None:
    assert "permits" not in retrain("explain", campaign_file.name).stdout  # it calls no API
    api = ("--set", "backend.options.api_latency_s=0.1", "--set", "backend.max_concurrent=auto")
    assert "4 at first, then adapted to the API" in retrain("explain", campaign_file.name, *api).stdout


def test_explain_json_has_the_rows_of_the_table(retrain: Call, campaign_file: Path) -> None:
    found = json.loads(retrain("explain", campaign_file.name, "--json").stdout)
    assert found["total_campaign_steps"] == 16
    assert [c["condition"] for c in found["conditions"]] == ["grpo", "maxrl"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A directory with a finished campaign of two runs, and what the command said."""
    directory = tmp_path_factory.mktemp("ran")
    (directory / "tiny.toml").write_text(TINY.replace("seeds = [0, 1]", "seeds = [0]"))
    command = [sys.executable, "-m", "retrain", "tiny.toml"]
    return directory, subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=100)


Ran = tuple[Path, subprocess.CompletedProcess[str]]


def test_a_file_name_alone_runs_it_and_shows_a_result_table(retrain: Call, ran: Ran) -> None:
    directory, answer = ran
    assert answer.returncode == 0, answer.stderr
    assert "done" in answer.stdout
    assert "4/4" in answer.stdout
    assert "started grpo_s0" in answer.stderr
    estimate = retrain("explain", "tiny.toml", "--from", "logs", cwd=directory).stdout
    assert "median step time" in estimate
    assert "2 earlier runs" in estimate


def test_status_shows_failures_as_text_without_control_characters(retrain: Call, campaign_file: Path) -> None:
    campaign_file.write_text(campaign_file.read_text() + '[reward]\nreward = "plugins.broken"\n')
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    answer = retrain(campaign_file.name, "--set", "campaign.launcher=inline", env=environment)
    assert answer.returncode == 4
    assert "resume" in answer.stderr
    status = retrain("status", "logs")
    assert status.returncode == 0
    assert "[bold]on purpose[/bold]" in status.stdout
    assert "\x1b" not in status.stdout + answer.stdout + answer.stderr


def test_status_json_has_every_run(retrain: Call, ran: Ran) -> None:
    (campaign,) = json.loads(retrain("status", "--json", cwd=ran[0]).stdout)["campaigns"]
    assert {(run["run_id"], run["state"], run["step"]) for run in campaign["runs"]} == {
        ("grpo_s0", "done", 4),
        ("maxrl_s0", "done", 4),
    }


@pytest.mark.parametrize(
    "command", [("status",), ("export",), ("report",), ("compare",), ("logs",), ("stop",), ("resume",)]
)
def test_a_directory_of_other_things_is_bad_usage(command: tuple[str, ...], retrain: Call) -> None:
    answer = retrain(*command, "/etc")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert "/etc: holds no campaign" in answer.stderr


@pytest.mark.parametrize(
    "command", "status logs report compare export samples stop resume states publish".split()
)
def test_a_directory_that_does_not_exist_is_bad_usage(command: str, here: Path) -> None:
    answer = CliRunner().invoke(app, [command, "nowhere"])
    assert isinstance(answer.exception, ConfigError)
    assert str(answer.exception).startswith(("nowhere: does not exist", "nowhere: is no campaign"))


def test_a_campaign_is_resumed_by_the_path_that_was_given(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = start(campaign_file).directory
    assert reopen(directory).directory == directory == Path("logs") / directory.name
    monkeypatch.chdir(directory / "runs")
    assert reopen(Path("..")).directory == here / directory


def test_status_of_an_empty_directory_says_what_to_do(retrain: Call, here: Path) -> None:
    (here / "logs").mkdir()
    for command in (("status",), ("status", "--watch")):  # without a screen, watching ends with the last run
        assert "no campaigns yet" in retrain(*command).stdout


AS_NOBODY = """
import os, sys
from pathlib import Path
from retrain.base.errors import RecordsError
from retrain.results.status import survey
if os.getuid() == 0:
    os.setuid(65534)
try:
    print(survey(Path(sys.argv[1])))
except RecordsError as error:
    print(error)
"""


def test_campaigns_that_cannot_be_looked_into_are_not_none() -> None:
    with tempfile.TemporaryDirectory() as name:  # unlike pytest's, one that others may enter
        Path(name).chmod(0o755)
        campaign = Path(name) / "study-20250131T120000Z-0a1b"
        campaign.mkdir(mode=0)
        command = [sys.executable, "-c", AS_NOBODY, name]
        status = subprocess.run(command, capture_output=True, text=True, check=True)
    assert status.stdout.startswith(f"{campaign}: cannot look inside (Permission denied); make it readable")


def test_ctrl_c_saves_and_says_how_to_go_on(campaign_file: Path, here: Path) -> None:
    campaign_file.write_text(campaign_file.read_text() + '[reward]\nreward = "plugins.slow"\n')
    options = [word for one in ("campaign.max_steps=100000", *ONE_RUN) for word in ("--set", one)]
    process = subprocess.Popen(
        [sys.executable, "-m", "retrain", campaign_file.name, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"},
    )
    assert process.stderr is not None
    lines = [process.stderr.readline()]
    while "started" not in lines[-1]:
        assert lines[-1], f"it ended: {lines}"
        lines.append(process.stderr.readline())
    run = next((here / "logs").iterdir()) / "runs" / "grpo_s0"
    wait_until(lambda: bool(read_metrics(run)) or process.poll() is not None)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "retrain resume logs" in errors
    assert "interrupted" in output
    assert list((run / "checkpoints").iterdir())


HEAVY = {
    *("numpy", "torch", "psutil", "pydantic", "rich.progress", "asyncio", "importlib.metadata"),
    *(
        "retrain.cli.run",
        "retrain.campaign.run",
        "retrain.trainer.worker",
        "retrain.trainer",
        "retrain.control.semaphore.adaptive",
    ),
}

ROOMS = {f"retrain.{room}" for room in ("base", "control", "plugins", "results")}  # a docstring each


def test_help_imports_no_command(here: Path) -> None:
    assert of_retrain(imported(["--help"], here)) == {
        "retrain.__main__",
        "retrain.cli",
        "retrain.base",
        "retrain.base.errors",
        "retrain.base.hide_process",
        "retrain.base.redaction",
        "retrain.base.streams",
        "retrain.base.threads",
    }


def test_status_imports_only_what_it_uses(ran: Ran) -> None:
    found = imported(["status"], ran[0])
    assert not found & (HEAVY | {"pydantic_core", "retrain.config.schema", "retrain.base.registry"})
    assert len(of_retrain(found)) <= 55


def test_numbers_are_read_without_pydantic(ran: Ran) -> None:
    run = next((ran[0] / "logs").glob("*/runs/*"))
    for words in (["logs", str(run), "-n", "3"], ["samples", str(run), "--count", "1"]):
        assert not imported(words, ran[0]) & {"pydantic", "pydantic_core"}


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        (["samples", ".", "--count", "x"], "got 'x'; needs a whole number of at least 1"),
        (["calibrate", "c.toml", "--seeds", "17"], "needs a whole number of at least 1 and at most 16"),
        (["squeeze", ".", "--keep", "nan"], "got 'nan'; needs a number of at least 0 and at most 1"),
    ],
)
def test_a_wrong_number_is_refused_with_what_it_needs(retrain: Call, words: list[str], needs: str) -> None:
    answer = retrain(*words)
    assert answer.returncode == 2
    assert needs in " ".join(answer.stderr.replace("│", " ").split())


def test_explain_imports_only_what_it_uses(campaign_file: Path) -> None:
    of_an_api = ["--set", "backend.options.api_latency_s=0.1"]  # which takes permits when it runs
    found = imported(["explain", campaign_file.name, *of_an_api], campaign_file.parent)
    records = {f"retrain.records.{name}" for name in ("manifest", "run_state", "run_row", "step_row")}
    clusters = {f"retrain.campaign.launchers.{name}" for name in ("cluster", "slurm", "ray")}
    others = {
        "retrain.control.semaphore",
        "retrain.config.reference",
        "retrain.plugins.sandbox.cell",
        "retrain.results.status",
    }
    assert not found & (HEAVY | records | clusters | others)
    assert len(of_retrain(found) - ROOMS) <= 81  # one more: plans and what makes them are two modules


def of_retrain(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("retrain.")}


def imported(arguments: list[str], where: Path) -> set[str]:
    """Run a command in a process of its own, and return the modules that it imported."""
    code = (
        "import sys\n"
        "from retrain.__main__ import main\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, cwd=where
    )
    return set(answer.stderr.split())


def test_every_command_has_a_file_and_every_file_a_command() -> None:
    files = {module.name for module in pkgutil.iter_modules(cli.__path__) if module.name[0] != "_"}
    assert set(COMMANDS) == files - {"render"}


def test_a_misspelt_command_is_answered_with_the_nearest(retrain: Call) -> None:
    assert "'status'" in retrain("statos").stderr


def test_a_file_whose_name_is_nearly_right_is_named(retrain: Call, campaign_file: Path) -> None:
    answer = retrain(campaign_file.stem)
    assert (answer.returncode, f"Did you mean the file {campaign_file.name}?" in answer.stderr) == (2, True)
    answer = retrain("explain", campaign_file.name.replace("toml", "tml"))
    assert (answer.returncode, f"did you mean '{campaign_file.name}'?" in answer.stderr) == (2, True)


def test_the_schema_is_printed_for_editors_and_for_people(retrain: Call) -> None:
    assert json.loads(retrain("schema").stdout)["title"] == "retrain campaign"
    assert "rollouts per prompt" in retrain("schema", "--markdown").stdout


def test_explain_holds_the_estimate_against_a_budget_and_check_fails_on_a_warning(
    retrain: Call, ran: Ran
) -> None:
    asked = ("explain", "tiny.toml", "--from", "logs", "--json", "--budget", "0.01s")
    answer = retrain(*asked, cwd=ran[0])
    lines = {c["question"]: c for c in json.loads(answer.stdout)["checklist"]}
    assert lines["wall time acceptable"]["state"] == "warn"
    assert answer.returncode == 0
    assert retrain(*asked, "--check", cwd=ran[0]).returncode == 2


def test_a_budget_that_is_no_time_span_is_a_usage_error(retrain: Call, campaign_file: Path) -> None:
    answer = retrain("explain", campaign_file.name, "--budget", "soon")
    assert (answer.returncode, "write it as 6h" in answer.stderr) == (2, True)


def test_ctrl_c_while_modules_are_imported_leaves_no_traceback(here: Path) -> None:
    (here / "typer.py").write_text("raise KeyboardInterrupt")
    command = [sys.executable, "-m", "retrain", "status"]
    environment = {**os.environ, "PYTHONPATH": f"{here}{os.pathsep}{TESTS.parent}"}
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (answer.returncode, answer.stderr) == (130, "")


def test_a_misspelt_file_is_looked_for_as_a_file(retrain: Call) -> None:
    answer = retrain("campaign.tml")
    assert (answer.returncode, answer.stderr.split(";")[0]) == (2, "campaign.tml: No such file or directory")


def test_a_missing_file_with_a_templates_name_is_offered_that_template(retrain: Call) -> None:
    assert "`retrain init quickstart` makes a file" in retrain("quickstart.toml").stderr


def test_a_home_that_cannot_be_written_is_a_message(retrain: Call, here: Path) -> None:
    (here / "home").write_text("a file")
    env = {**os.environ, "HOME": str(here / "home"), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    answer = retrain("--install-completion", "bash", env=env)
    assert (answer.returncode, len(answer.stderr.splitlines())) == (5, 1)
    assert str(here / "home") in answer.stderr


def test_a_terminal_without_unicode_is_written_to_in_ascii(here: Path) -> None:
    write_campaign(here / "logs", {("übung", seed): flat(0.5) for seed in range(2)})
    env = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    command = [sys.executable, "-m", "retrain", "status", "logs"]
    answer = subprocess.run(command, capture_output=True, env=env, check=False)
    assert (answer.returncode, answer.stderr) == (0, b"")
    assert rb"\xfcbung" in answer.stdout
    assert b"0.500 +- 0.000" in answer.stdout


def test_the_list_of_commands_is_not_cut_off(retrain: Call) -> None:
    commands = retrain("--help").stdout.partition("Commands:")[2]
    assert "squeeze" in commands
    assert "..." not in commands


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_what_an_option_takes_and_not_its_python_type(retrain: Call, command: str) -> None:
    assert "<" not in retrain(command, "--help").stdout.replace("<=", "")


def test_an_error_that_cannot_be_shown_keeps_its_exit_code(here: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "retrain", "stop", "nowhere"]
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("command", [("schema",), ("status", ".")])
def test_output_to_a_full_disk_is_a_message(command: tuple[str, ...], here: Path) -> None:
    words = [sys.executable, "-m", "retrain", *command]
    with Path("/dev/full").open("w") as full:
        answer = subprocess.run(words, cwd=here, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert answer.returncode == 5
    assert answer.stderr == "output: No space left on device; --debug shows where\n"


@pytest.mark.parametrize("command", [("schema",), ("status", ".", "--json"), ("-h",)])
def test_a_reader_that_has_seen_enough_is_no_failure(command: tuple[str, ...], here: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "retrain", *command]
    answer = subprocess.run(words, cwd=here, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (answer.returncode, answer.stderr) == (0, "")
