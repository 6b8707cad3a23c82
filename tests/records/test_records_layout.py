import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError, RecordsError
from retrain.records.files import make_directory
from retrain.records.layout import (
    CampaignFiles,
    campaign_of,
    create_directory,
    files_of_runs,
    find_campaigns,
    open_campaign,
)
from retrain.trainer import checkpoint


def test_a_new_directory_is_private_and_named_after_campaign_and_time(tmp_path):
    directory = create_directory(tmp_path / "logs", "grpo")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert directory.parent == tmp_path / "logs"
    assert len(directory.name) == len("grpo-20250131T120000Z-0a1b")


def test_letters_with_accents_stay_in_a_directorys_name(tmp_path):
    assert create_directory(tmp_path, "Über Größe").name.startswith("Uber-Groe-")


def test_what_belongs_in_a_log_directory_is_no_sign_of_another_one(tmp_path):
    for name in ("calibrations", "permits", ".gitkeep", "study-20250131T120000Z-0a1b"):
        (tmp_path / name).mkdir()
    assert find_campaigns(tmp_path) == ()
    (tmp_path / "hosts").touch()
    with pytest.raises(ConfigError, match="holds no campaign"):
        find_campaigns(tmp_path)
    with pytest.raises(ConfigError, match="hosts: is a file; name a log directory"):
        find_campaigns(tmp_path / "hosts")
    with pytest.raises(ConfigError, match="logs: does not exist; start a campaign"):
        find_campaigns(tmp_path / "logs")


def test_a_campaign_without_its_file_is_named_as_that(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match="holds no campaign"):
        open_campaign(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RecordsError, match=r"campaign\.toml: is missing; put the campaign's file back there"):
        open_campaign(tmp_path)


def test_a_directory_above_or_within_a_campaign_is_answered_with_the_campaigns_own(tmp_path):
    campaign = create_directory(tmp_path / "logs", "study")
    (campaign / "campaign.toml").touch()
    run = campaign / "runs" / "grpo_s0"
    run.mkdir(parents=True)
    (run / "run.toml").touch()
    with pytest.raises(ConfigError, match=f"logs: is a log directory; name a campaign, .*: {campaign}$"):
        open_campaign(tmp_path / "logs")
    for within in (campaign / "runs", run):
        with pytest.raises(
            ConfigError, match=f"{within.name}: is a part of a campaign; name that: {campaign}$"
        ):
            open_campaign(within)
    with pytest.raises(ConfigError, match=r"campaign\.toml: is a file; name"):
        open_campaign(campaign / "campaign.toml")


def test_a_log_directory_named_runs_beside_a_campaign_file_is_no_part_of_a_campaign(tmp_path):
    (tmp_path / "campaign.toml").touch()  # as `retrain init` names it
    logs = tmp_path / "runs"
    campaign, single = (create_directory(logs, name) for name in ("study", "single"))
    for directory in (campaign, single):
        (directory / "campaign.toml").touch()
    (single / "run.toml").touch()
    with pytest.raises(ConfigError, match="runs: is a log directory; name a campaign"):
        open_campaign(logs)
    assert campaign_of(single).directory == single


def test_runs_and_checkpoints_are_not_missed_where_python_hides_errors(tmp_path, monkeypatch):
    (tmp_path / "campaign.toml").touch()
    run = CampaignFiles(tmp_path).run("grpo_s0")
    run.checkpoints.mkdir(parents=True)
    checkpoint.save(run.checkpoints, 1, {"n": 1}, lambda directory: None, keep=1)
    (tmp_path / "runs" / "moved").symlink_to("nowhere")
    for name in ("exists", "is_dir"):  # from Python 3.14 on so after any error, as of a file server's
        monkeypatch.setattr(Path, name, lambda path, **_: False)
    assert list(files_of_runs(CampaignFiles(tmp_path))) == ["grpo_s0"]
    assert checkpoint.newest(run.checkpoints).step == 1


def test_a_link_to_itself_among_the_runs_hides_no_run(tmp_path):
    run = CampaignFiles(tmp_path).run("grpo_s0")
    run.directory.mkdir(parents=True)
    (tmp_path / "runs" / "loop").symlink_to("loop")
    assert list(files_of_runs(CampaignFiles(tmp_path))) == ["grpo_s0"]


def test_names_created_at_once_never_collide(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: create_directory(tmp_path, "same"), range(600)))
    assert len(set(made)) == 600


@pytest.mark.parametrize("name", ["../../etc", "a/b", "", "..", "x\0y", "\x1b[31m", "ü" * 300, "n" * 300])
def test_a_hostile_name_stays_inside_the_log_directory(tmp_path, name):
    assert create_directory(tmp_path, name).parent == tmp_path


@pytest.mark.parametrize("run_id", ["", ".", "..", "../x", "/etc", "a\0b"])
def test_a_run_id_cannot_lead_out_of_its_campaign(tmp_path, run_id):
    with pytest.raises(RecordsError, match="is not a run id"):
        CampaignFiles(tmp_path).run(run_id)


def test_a_log_directory_may_be_a_link_to_another_disk(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "logs").symlink_to(tmp_path / "scratch")
    assert create_directory(tmp_path / "logs", "c").is_dir()


def test_a_link_planted_where_a_run_will_be_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordsError, match="not a directory"):
        make_directory(tmp_path / "run")


def _campaign(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "campaign.toml").touch()
    return directory


def test_campaigns_and_single_runs_are_found_and_strangers_are_not(tmp_path):
    campaign = _campaign(tmp_path / "a")
    single = _campaign(tmp_path / "b")
    (single / "run.toml").touch()
    (tmp_path / "wandb" / "runs").mkdir(parents=True)
    (tmp_path / "website").mkdir()
    (tmp_path / "website" / "manifest.json").touch()
    (tmp_path / "notes.txt").touch()
    assert find_campaigns(tmp_path) == (campaign, single)
    assert find_campaigns(campaign) == (campaign,)
    assert find_campaigns(single) == (single,)


def test_campaigns_are_listed_in_the_order_in_which_they_were_started(tmp_path):
    latest = _campaign(tmp_path / "a-20260102T000000Z-0001")
    first = _campaign(tmp_path / "b-20260101T000000Z-ffff")
    assert find_campaigns(tmp_path) == (first, latest)


def test_runs_of_a_campaign_share_its_permits_and_a_single_run_has_its_own(tmp_path):
    campaign = CampaignFiles(_campaign(tmp_path / "a"))
    assert campaign_of(campaign.run("x_s1").directory).permits == campaign.permits
    assert campaign_of(tmp_path / "alone").permits == tmp_path / "alone" / "permits"


def test_a_log_directory_that_is_a_file_is_a_wrong_path_not_an_unreadable_record(tmp_path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"logs: is not a directory; .*choose another \[logging\].log_dir"):
        create_directory(tmp_path / "logs", "c")


def test_a_log_directory_where_none_can_be_made_is_a_wrong_path():
    with pytest.raises(ConfigError, match=r"cannot make the directory .*choose another \[logging\].log_dir"):
        create_directory(Path("/proc/logs"), "c")


def test_the_path_of_a_file_is_made_once(tmp_path):
    campaign = CampaignFiles(tmp_path)
    assert campaign.runs is campaign.runs
    assert campaign == CampaignFiles(tmp_path)
