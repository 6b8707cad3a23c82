"""A copy of a campaign's directory: complete files, each part sent once, consistent for whoever reads it."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from retrain.base.errors import ConfigError, LaunchError, RecordsError
from retrain.base.locks import LockHolder
from retrain.campaign import mirror
from retrain.campaign.mirror import Copier, take_over
from retrain.campaign.run import reopen, run_campaign, start
from retrain.records import mirror as places
from retrain.records.layout import CampaignFiles
from retrain.records.lines import append_line
from retrain.records.metrics import read_metrics
from retrain.records.mirror import Claim, MirrorState, Place, as_address, download, is_address
from retrain.results.status import survey
from retrain.trainer import checkpoint
from tests.conftest import ONE_RUN

URL = "memory://bucket/prefix"
RUN = "grpo_s0"


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def campaign(campaign_file: Path) -> CampaignFiles:
    """A campaign that has not run yet."""
    return CampaignFiles(start(campaign_file).directory.absolute())


def copier_of(files: CampaignFiles, owner: str = "here", number: int = 0) -> Copier:
    copier = Copier(files, Place(URL), MirrorState(URL, owner, number))
    copier.begin()
    return copier


def save(files: CampaignFiles, step: int, content: bytes = b"weights", keep: int = 1) -> None:
    """Write the checkpoint of a step, and the rows until then."""
    run = files.run(RUN)
    for row in range(step - 1, step + 1):
        append_line(run.metrics, {"step": row})
    checkpoint.save(
        run.checkpoints, step, {}, lambda at: (at / "weights").write_bytes(content + b"%d" % step), keep
    )


def trees(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".lock" and path.name != "mirror.json"
    }


def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The digests of parts that are written from now on."""
    sent: list[str] = []
    write = Place.write_parts

    def noted(place: Place, parts: dict[str, bytes]) -> None:
        sent.extend(parts)
        write(place, parts)

    monkeypatch.setattr(Place, "write_parts", noted)
    return sent


def test_a_copy_is_the_directory_without_what_was_cut_off(campaign: CampaignFiles, tmp_path: Path) -> None:
    save(campaign, 2)
    before = trees(campaign.directory)
    with campaign.run(RUN).metrics.open("ab") as metrics:
        metrics.write(b'{"step": 3, "half')
    (campaign.run(RUN).checkpoints / ".step-000004.partial").mkdir()
    (campaign.run(RUN).checkpoints / ".step-000004.partial" / "weights").write_bytes(b"half")
    (campaign.run(RUN).directory / ".status.json.1-a.tmp").write_bytes(b"half")
    copier_of(campaign).copy()
    index, directory = download(Place(URL), tmp_path / "there")
    assert trees(directory) == before
    assert index.steps[RUN] == 2


def test_what_is_there_is_not_sent_again(campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "PART_BYTES", 1000)
    save(campaign, 2, bytes(range(256)) * 40)
    sent = requests(monkeypatch)
    first = copier_of(campaign)
    first.copy()
    assert len(sent) == len(set(sent)) >= 10  # a large file has several parts
    sent.clear()
    copier_of(campaign, number=1).copy()  # as after a resume, which knows no times of files
    assert sent == []
    append_line(campaign.run(RUN).metrics, {"step": 3, "text": "x" * 100})
    first.scan()
    first.copy()
    assert len(sent) == 1
    assert first.state.behind_bytes == 0


def test_parts_of_a_growing_file_stay_few_and_each_byte_is_sent_seldom(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes: list[int] = []
    write = Place.write_parts
    monkeypatch.setattr(
        Place,
        "write_parts",
        lambda place, parts: (sizes.extend(map(len, parts.values())), write(place, parts)),
    )
    copier = copier_of(campaign)
    copier.copy()
    sizes.clear()
    for step in range(64):
        append_line(campaign.run(RUN).metrics, {"step": 1000 + step})
        copier.copy()
    size = campaign.run(RUN).metrics.stat().st_size
    index, directory = download(Place(URL), tmp_path / "there")
    assert len(index.files[f"runs/{RUN}/metrics.jsonl"]) <= 7
    assert sum(sizes) <= 7 * size  # the logarithm of the number of copies
    assert trees(directory) == trees(campaign.directory)


def test_a_checkpoint_that_is_removed_while_it_is_sent_is_complete_in_the_copy(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(campaign, 2)
    before = trees(campaign.run(RUN).directory)
    write = Place.write_parts

    def slow(place: Place, parts: dict[str, bytes]) -> None:
        if not (campaign.run(RUN).checkpoints / "step-000004").exists():
            save(campaign, 4)  # removes the one before
        write(place, parts)

    copier = copier_of(campaign)
    opened = copier._opened

    def within_the_run(unit: str):
        if unit:
            monkeypatch.setattr(Place, "write_parts", slow)
        return opened(unit)

    monkeypatch.setattr(copier, "_opened", within_the_run)
    copier.copy()
    _, directory = download(Place(URL), tmp_path / "there")
    assert trees(directory / "runs" / RUN) == before
    assert checkpoint.newest(directory / "runs" / RUN / "checkpoints").step == 2
    copier.copy()
    _, directory = download(Place(URL), tmp_path / "there")
    assert trees(directory) == trees(campaign.directory)


def test_a_file_that_others_rewrite_meanwhile_is_as_it_was_and_follows_later(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = campaign.directory / "trackio.db"
    database.write_bytes(b"first")
    copier = copier_of(campaign)
    copier.copy()
    opened = copier._opened

    @contextmanager
    def rewritten(unit: str) -> Iterator[dict[str, object]]:
        with opened(unit) as files:
            database.write_bytes(b"third, in place")
            yield files

    database.write_bytes(b"second, in place")
    save(campaign, 2)
    monkeypatch.setattr(copier, "_opened", rewritten)
    copier.copy()
    _, directory = download(Place(URL), tmp_path / "there")
    assert (directory / database.name).read_bytes() == b"first"
    assert trees(directory / "runs") == trees(campaign.runs)
    copier.copy()
    _, directory = download(Place(URL), tmp_path / "there")
    assert trees(directory) == trees(campaign.directory)


def test_a_copy_that_fails_half_way_leaves_the_one_before(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save(campaign, 2)
    copier = copier_of(campaign)
    copier.copy()
    before = trees(campaign.directory)
    save(campaign, 4)
    for name in ("write_parts", "write_index"):
        with monkeypatch.context() as broken:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            broken.setattr(Place, name, full)
            with pytest.raises(OSError, match="No space"):
                copier.copy()
        _, directory = download(Place(URL), tmp_path / "there")
        assert trees(directory) == before
    Place(URL).fs.pipe_file("/bucket/prefix/index/000000099.json", b'{"version": 1, "number')  # killed
    assert trees(download(Place(URL), tmp_path / "there")[1]) == before


def test_what_is_old_is_removed_and_a_reader_of_it_reads_again(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copier, place = copier_of(campaign), Place(URL)
    for step in (2, 4, 6, 8):
        save(campaign, step)
        copier.copy()
    assert place.numbers() == [4, 3]
    index = place.newest()
    named = {sha for number in (4, 3) for sha in _parts(place, number)}
    assert set(place.parts()) == named
    read = Place.read_parts

    def late(self: Place, parts: object) -> dict[str, bytes]:
        monkeypatch.setattr(Place, "read_parts", read)
        for step in (10, 12):
            save(campaign, step)
            copier.copy()
        return self.read_parts(parts)

    monkeypatch.setattr(Place, "read_parts", late)
    newer, directory = download(place, tmp_path / "there")
    assert (index.number, newer.number) == (4, 6)
    assert trees(directory) == trees(campaign.directory)


def _parts(place: Place, number: int) -> set[str]:
    index = json.loads(place.fs.cat_file(f"/bucket/prefix/index/{number:09d}.json"))
    return {sha for parts in index["files"].values() for _, sha in parts}


def test_what_is_removed_here_stays_in_the_copy(campaign: CampaignFiles, tmp_path: Path) -> None:
    save(campaign, 2)
    copier = copier_of(campaign)
    copier.copy()
    before = trees(campaign.directory)
    shutil.rmtree(campaign.run(RUN).directory)
    copier.copy()
    assert trees(download(Place(URL), tmp_path / "there")[1]) == before
    shutil.rmtree(campaign.directory)
    with pytest.raises(mirror._RemovedError):
        copier.copy()
    assert trees(download(Place(URL), tmp_path / "there")[1]) == before


def test_what_somebody_deleted_in_the_copy_is_sent_again(campaign: CampaignFiles, tmp_path: Path) -> None:
    save(campaign, 2)
    copier, place = copier_of(campaign), Place(URL)
    copier.copy()
    place.fs.rm("/bucket/prefix/data", recursive=True)
    with pytest.raises(RecordsError, match="parts of the copy are gone; copy it again"):
        download(place, tmp_path / "there")
    copier.refresh()
    copier.copy()
    assert trees(download(place, tmp_path / "there")[1]) == trees(campaign.directory)
    place.fs.rm("/bucket/prefix", recursive=True)
    copier.refresh()
    copier.copy()
    assert trees(download(place, tmp_path / "there")[1]) == trees(campaign.directory)


def test_of_two_machines_that_resume_at_once_one_does(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    monkeypatch.setattr(mirror, "SETTLE_S", 0.3)
    copier_of(campaign).copy()
    shutil.rmtree(campaign.directory)
    ready = threading.Barrier(2)
    claim = Place.require_free

    def at_once(place: Place, owner: str, say: Callable[[str], None]) -> None:
        claim(place, owner, say)
        ready.wait()

    monkeypatch.setattr(Place, "require_free", at_once)
    outcomes: list[object] = []

    def resume() -> None:
        try:
            outcomes.append(take_over(URL, lambda text: None))
        except LaunchError as error:
            outcomes.append(error)

    machines = [threading.Thread(target=resume) for _ in range(2)]
    for machine in machines:
        machine.start()
    for machine in machines:
        machine.join()
    errors = [outcome for outcome in outcomes if isinstance(outcome, LaunchError)]
    assert len(errors) == 1
    assert "its campaign runs elsewhere" in str(errors[0])
    assert (here / "logs" / campaign.directory.name / "campaign.toml").exists()


def test_a_machine_that_has_lost_its_claim_copies_no_more(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "RENEW_S", 0.01)
    copier, place = copier_of(campaign), Place(URL)
    with place.claimed("here") as lost:
        copier.copy(lost)
        while not lost.is_set():
            claimed_by("other", LockHolder(7, "otherhost", "2026-01-01T00:00:00Z", "boot:1", time.time()))
            lost.wait(0.01)
        save(campaign, 2)
        with pytest.raises(LaunchError, match="was continued from there since"):
            copier.copy(lost)
    assert place.numbers() == [1]


def test_a_damaged_part_is_told(campaign: CampaignFiles, tmp_path: Path) -> None:
    copier_of(campaign).copy()
    place = Place(URL)
    sha = next(iter(place.parts()))
    place.fs.pipe_file(f"/bucket/prefix/data/{sha}", b"something else")
    with pytest.raises(RecordsError, match=f"data/{sha} is damaged"):
        download(place, tmp_path / "there")


@pytest.mark.parametrize("path", ["../evil", "/etc/evil", "runs//x", "a/../../evil", ""])
def test_a_path_that_leads_out_of_the_directory_is_no_copy(
    campaign: CampaignFiles, tmp_path: Path, path: str
) -> None:
    copier = copier_of(campaign)
    copier.copy()
    place = Place(URL)
    index = place.newest()
    place.write_index(replace(index, number=7, files={**index.files, path: index.files["origin.json"]}))
    assert download(place, tmp_path / "there")[0].number == 1
    assert not list(tmp_path.rglob("evil"))


def claimed_by(owner: str, holder: LockHolder) -> None:
    Place(URL).fs.pipe_file("/bucket/prefix/claim.json", json.dumps(asdict(Claim(owner, holder))).encode())


def test_two_machines_do_not_copy_to_one_place(
    campaign: CampaignFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "WATCH_S", 0.2)
    monkeypatch.setattr(places, "WATCH_PAUSE_S", 0.01)
    copier_of(campaign).copy()
    elsewhere = LockHolder(7, "otherhost", "2026-01-01T00:00:00Z", "boot:1", time.time())
    claimed_by("other", elsewhere)
    said: list[str] = []
    copier_of(campaign, number=1)  # it has not said anything for WATCH_S
    claims = iter(range(1, 10_000))
    read = Place.claim

    def renewed(place: Place) -> Claim | None:
        claimed_by("other", replace(elsewhere, renewed_at=elsewhere.renewed_at + next(claims)))
        return read(place)

    monkeypatch.setattr(Place, "claim", renewed)
    with pytest.raises(LaunchError, match="runs elsewhere, with process 7 on otherhost since 2026"):
        Place(URL).require_free("here", said.append)
    assert "waiting 0.2 s" in said[0]


def test_a_directory_whose_campaign_went_on_elsewhere_is_not_copied_over_it(campaign: CampaignFiles) -> None:
    copier_of(campaign).copy()
    claimed_by("other", LockHolder(7, "otherhost", "2026-01-01T00:00:00Z", "boot:1", 1.0))
    save(campaign, 2)
    there = copier_of(campaign, "other", number=1)
    there.copy()
    with pytest.raises(LaunchError, match=r"was continued from there since, so .* is older; move that away"):
        copier_of(campaign, number=1)


def test_a_campaign_is_copied_and_goes_on_from_the_copy_elsewhere(
    campaign_file: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{here}/bucket"
    settings = (*ONE_RUN, "campaign.launcher=inline", f'logging.mirror="{url}"')
    outcome = run_campaign(campaign_file, [*settings, "campaign.max_steps=2"])
    (there := here / "there").mkdir()
    (status,) = survey(outcome.directory)
    assert status.mirror is not None
    assert (status.mirror.behind_s, status.mirror.behind_steps, status.mirror.problem) == (0.0, 0, "")
    before = trees(outcome.directory)
    shutil.rmtree(outcome.directory)
    monkeypatch.chdir(there)
    directory = take_over(url, lambda text: None)
    assert directory == Path("logs", outcome.directory.name)
    assert trees(directory) == before
    assert reopen(directory).execute().exit_code == 0
    assert [row["step"] for row in read_metrics(directory / "runs" / RUN)] == [1, 2]
    assert take_over(url, lambda text: None) == directory  # what is there is as new
    with pytest.raises(ConfigError, match=f"holds the campaign {directory.name}; choose another prefix"):
        start(here / "tiny.toml", settings)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("bucket/prefix", 'got "bucket/prefix"; needs an address of fsspec, as s3://BUCKET/PREFIX'),
        ("nope://bucket/prefix", "nope://bucket/prefix: Protocol not known: nope; needs an address"),
        ("gcs://bucket/prefix", "gcs://bucket/prefix: Please install gcsfs"),
    ],
)
def test_an_address_that_cannot_be_used_is_told_before_anything_starts(
    campaign_file: Path, here: Path, url: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        start(campaign_file, [f'logging.mirror="{url}"'])
    assert str(error.value).startswith(f"tiny.toml [logging].mirror: {problem}")
    assert not (here / "logs").exists()


def test_without_its_packages_the_extra_is_named(
    campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'mirror': pip install .*\[mirror\]"):
        start(campaign_file, ['logging.mirror="s3://bucket/prefix"'])


def test_a_place_that_cannot_be_written_is_told_before_anything_starts(
    campaign_file: Path, here: Path
) -> None:
    with pytest.raises(ConfigError, match=r"tiny.toml \[logging\].mirror: got .*NotADirectoryError"):
        start(campaign_file, [f'logging.mirror="file://{campaign_file}/prefix"'])
    assert not (here / "logs").exists()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("s3://b/p/", "s3://b/p"),
        (Path("s3://b/p"), "s3://b/p"),
        ("file:///tmp/x", "file:///tmp/x"),
        (Path("file:///tmp/x"), "file:///tmp/x"),
        ("logs/x", None),
        ("/tmp/s3:x", None),
    ],
)
def test_addresses(text: str | Path, address: str | None) -> None:
    assert is_address(text) == (address is not None)
    assert as_address(text) == (address or str(text))
