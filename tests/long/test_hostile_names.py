"""Names and files meant ill: nothing leaves the campaign's directory, nothing follows a link."""

from __future__ import annotations

import os
import re
import shlex
import stat
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.base.errors import ConfigError, LaunchError, RecordsError, RetrainError
from retrain.base.locks import hold
from retrain.campaign.run import reopen, start
from retrain.campaign.stop import stop_campaign
from retrain.config.load import load_config
from retrain.plan.build import plan_runs
from retrain.records.layout import CampaignFiles, RunFiles, create_directory
from retrain.results.report.gather import gather, gather_all
from retrain.results.status import survey
from retrain.results.status.one_run import find_run
from retrain.trainer.worker import run as run_worker
from tests.conftest import TINY

SAFE = re.compile(r"[a-z0-9+._-]{1,64}")
NASTY = [
    "../../etc/passwd",
    "a/b\\c",
    "nul\0byte",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202etxt.exe",
    "CON",
    "-rf",
    "~root",
    "$(reboot)",
    "name with spaces",
    "\ud83d\ude00",
    "ß" * 255,
    "x" * 255,
    ".",
    "..",
    "",
]
IN_MEMORY = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def quoted(text: str) -> str:
    return (
        '"'
        + "".join(f"\\U{ord(c):08x}" for c in text.encode("utf-16", "surrogatepass").decode("utf-16"))
        + '"'
    )


def campaign_named(path: Path, names: list[str]) -> Path:
    head = TINY.partition("[[campaign.conditions]]")[0]
    conditions = "".join(
        f"[[campaign.conditions]]\nname = {quoted(name)}\nadvantage_mode = 'grpo'\n" for name in names
    )
    path.write_text(head + conditions)
    return path


@IN_MEMORY
@given(names=st.lists(st.sampled_from(NASTY) | st.text(max_size=300), min_size=1, max_size=4))
def test_any_names_give_safe_distinct_run_ids_or_are_refused(names: list[str], tmp_path: Path) -> None:
    names = [name.encode("utf-16", "surrogatepass").decode("utf-16", "ignore") for name in names]
    try:
        plan = plan_runs(load_config(campaign_named(tmp_path / "c.toml", names)))
    except ConfigError:
        return
    ids = [run.run_id for run in plan.runs]
    assert all(SAFE.fullmatch(run_id) for run_id in ids)
    assert len({run_id.casefold() for run_id in ids}) == len(ids)


def test_names_that_differ_in_case_only_never_share_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the label of"):
        plan_runs(load_config(campaign_named(tmp_path / "c.toml", ["Grpo", "gRPO"])))


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_a_campaign_of_any_name_lies_in_the_log_directory(name: str, tmp_path: Path) -> None:
    made = create_directory(tmp_path / "logs", name)
    assert made.parent == tmp_path / "logs"
    assert re.fullmatch(r"[A-Za-z0-9+._-]+", made.name)
    assert not made.name.startswith((".", "-"))


@given(name=st.text(max_size=300))
def test_no_run_id_leads_out_of_the_campaign(name: str) -> None:
    files = CampaignFiles(Path("/campaign"))
    try:
        directory = files.run(name).directory
    except RetrainError:
        return
    assert directory.parent == files.runs


@IN_MEMORY
@given(
    content=st.binary(max_size=400) | st.text(max_size=400).map(lambda t: t.encode("utf-8", "surrogatepass"))
)
def test_any_bytes_are_a_config_or_a_config_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.toml"
    path.write_bytes(content)
    try:
        load_config(path)
    except ConfigError:
        return


values = st.recursive(
    st.integers() | st.floats() | st.booleans() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
keys = st.sampled_from(
    [
        "training.lr",
        "training.seed",
        "data.options",
        "campaign.seeds",
        "campaign.conditions",
        "reward.params",
        "backend.options",
        "campaign.max_workers",
        "campaign.stall_timeout",
        "campaign.min_free_memory",
        "run.x",
    ]
)


@IN_MEMORY
@given(key=keys, value=values)
def test_any_value_of_any_type_is_taken_or_explained(key: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "fuzz.toml"
    raw = tomllib.loads(TINY)
    section, name = key.split(".")
    raw.setdefault(section, {})[name] = value
    path.write_text(tomli_w.dumps(raw))
    try:
        load_config(path)
    except ConfigError:
        return


# Links

PLANTED = ["metrics.jsonl", "attempts.jsonl", "status.json", "done.json", "run.lock", "checkpoints"]


@pytest.mark.parametrize("name", PLANTED)
def test_a_link_planted_where_a_worker_writes_is_not_followed(
    name: str, campaign_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    campaign = start(campaign_file)
    run = RunFiles(campaign.directory / "runs" / "grpo_s0")
    treasure = tmp_path_factory.mktemp("treasure")
    target = treasure / "file"
    if name != "checkpoints":
        target.write_text("precious")
    (run.directory / name).symlink_to(treasure if name == "checkpoints" else target)
    assert run_worker(run.directory, threading.Event()) != 0
    assert [path.name for path in treasure.iterdir()] == ([] if name == "checkpoints" else ["file"])
    assert name == "checkpoints" or target.read_text() == "precious"
    assert (run.directory / name).is_symlink()


def test_a_link_planted_for_a_workers_output_is_not_followed(campaign_file: Path, here: Path) -> None:
    campaign = start(campaign_file, ["campaign.seeds=[0]", "campaign.retries=0"])
    (here / "target").write_text("precious")
    (campaign.directory / "runs" / "grpo_s0" / "output.log").symlink_to(here / "target")
    outcome = campaign.execute()
    assert outcome.states["maxrl_s0"] == "done"
    assert outcome.states["grpo_s0"] != "done"
    assert (here / "target").read_text() == "precious"


@pytest.mark.parametrize("name", ["manifest.json", "campaign.lock", "origin.json"])
def test_a_link_planted_where_the_orchestrator_writes_is_not_followed(
    name: str, campaign_file: Path, here: Path
) -> None:
    campaign = start(campaign_file, ["campaign.launcher=inline"])
    (here / "target").write_text("precious")
    (campaign.directory / name).unlink(missing_ok=True)
    (campaign.directory / name).symlink_to(here / "target")
    if name != "origin.json":  # which is only read from now on
        with pytest.raises((RetrainError, LaunchError), match=name):
            campaign.execute()
    assert (here / "target").read_text() == "precious"


@pytest.mark.parametrize("name", ["runs", "runs/grpo_s0", "runs/grpo_s0/checkpoints", "permits"])
def test_a_linked_directory_of_a_campaign_is_neither_resumed_nor_stopped(
    name: str, campaign_file: Path, here: Path
) -> None:
    campaign = start(campaign_file, ["campaign.launcher=inline", "backend.max_concurrent=2"])
    for made in ("permits", "runs/grpo_s0/checkpoints"):
        (campaign.directory / made).mkdir(exist_ok=True)
    (campaign.directory / name).rename(here / "elsewhere")
    (campaign.directory / name).symlink_to(here / "elsewhere")
    before = sorted(here.joinpath("elsewhere").rglob("*"))
    told = f"{name}: is a symbolic link, which records never follow"
    with pytest.raises(RecordsError, match=told):
        reopen(campaign.directory).execute()
    with pytest.raises(RecordsError, match=told):
        stop_campaign(campaign.directory)
    assert sorted(here.joinpath("elsewhere").rglob("*")) == before


@pytest.mark.parametrize("name", ["runs", "runs/grpo_s0"])
def test_runs_behind_a_link_are_neither_shown_nor_compared(
    name: str, campaign_file: Path, here: Path
) -> None:
    campaign = start(campaign_file, ["campaign.launcher=inline"]).directory
    (campaign / name).rename(here / "elsewhere")
    (campaign / name).symlink_to(here / "elsewhere")
    told = f"{name}: is a symbolic link, which records never follow"
    readers: list[Callable[[Path], object]] = [
        survey, gather, gather_all, lambda directory: find_run(directory, "grpo_s0"),
    ]  # fmt: skip
    for read in readers:
        with pytest.raises(RecordsError, match=told):
            read(campaign)


@pytest.mark.parametrize("name", ["runs/grpo_s0/checkpoints", "permits"])
def test_status_names_a_link_that_resume_refuses_and_advises_no_resume(
    name: str, campaign_file: Path, here: Path
) -> None:
    campaign = start(campaign_file, ["campaign.launcher=inline", "backend.max_concurrent=2"]).directory
    (here / "elsewhere").mkdir()
    (campaign / name).symlink_to(here / "elsewhere")
    (shown,) = survey(campaign)
    assert f"{name}: is a symbolic link" in shown.problem
    assert (len(shown.runs), shown.resume_with) == (4, "")


def test_checkpoints_of_a_single_run_behind_a_link_are_not_resumed(here: Path) -> None:
    Path("single.toml").write_text(TINY.partition("[campaign]")[0])
    run = start(Path("single.toml"), ["campaign.launcher=inline"]).directory
    (here / "elsewhere").mkdir()
    (run / "checkpoints").symlink_to(here / "elsewhere")
    with pytest.raises(RecordsError, match="checkpoints: is a symbolic link"):
        reopen(run).execute()


def test_everything_is_private_whatever_the_umask(campaign_file: Path) -> None:
    before = os.umask(0)
    try:
        campaign = start(campaign_file, ["campaign.launcher=inline"])
        assert campaign.execute().exit_code == 0
    finally:
        os.umask(before)
    for path in (campaign.directory, *campaign.directory.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("log_dir", ["my logs", "it's; $(reboot)", "two\nlines"])
def test_a_command_to_copy_names_the_directory_as_a_shell_takes_it(campaign_file: Path, log_dir: str) -> None:
    campaign = start(campaign_file, [f"logging.log_dir={log_dir}"])
    with hold(CampaignFiles(campaign.directory).lock) as _, pytest.raises(LaunchError) as refused:  # type: ignore[union-attr]
        campaign.execute()
    command = str(refused.value).split("`")[1]
    assert shlex.split(command) == ["retrain", "status", str(campaign.directory)]
