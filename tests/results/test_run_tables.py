"""The run.toml of runs that differ in their seed are parsed once, and give what each says."""

import tomllib
from pathlib import Path

import pytest

from retrain.campaign.run import start
from retrain.config.digest import is_edited
from retrain.records.layout import RunFiles
from retrain.results.report.gather import RunTables

TOML = """
[training]
batch_size = 2
group_size = 2
max_tokens = 4
[data]
task = "successor"
seed = 7
[campaign]
seeds = [0, 1, 12]
max_steps = 1
[[campaign.conditions]]
name = "a"
[[campaign.conditions]]
name = "b"
training.lr = 0.5
"""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunFiles]:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.toml"
    path.write_text(TOML)
    campaign = start(path)
    return [campaign.files_of(run.run_id) for run in campaign.plan.runs]


def parsed(files: RunFiles) -> dict[str, object]:
    return tomllib.loads(files.run_toml.read_text())


def test_each_run_has_the_tables_of_its_own_file(runs: list[RunFiles]) -> None:
    tables = RunTables()
    found = [tables.of(files) for files in runs]
    assert found == [(parsed(files), False) for files in runs]
    assert [list(one) for one, _ in found] == [list(parsed(files)) for files in runs]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("\nbatch_size = 2\n", "\nbatch_size = 3\n"),
        ("[training]\nseed = 12\n", "[training]\nseed = 13\n"),
        ('config_hash = "v2:', 'config_hash = "v2:0'),
        ('config_hash = "v2:', 'config_hash = "'),
        ("seed = 7\n", "seed = 8\n"),
        ('config_hash = "', 'note = """\nconfig_hash = "x"\n"""\nconfig_hash = "'),
        ("[run]\n", '[run]\nnote = "config_hash"\n'),
        ("[run.files]\n", '[run.files]\nconfig_hash = "v2:1"\n'),
        ("seed = 12\n", "seed = 012\n"),
        ("[training]\n", "[training\n"),
    ],
)
def test_a_changed_file_reads_as_it_would_alone(runs: list[RunFiles], before: str, after: str) -> None:
    tables = RunTables()
    *others, changed = [files for files in runs if files.directory.name.startswith("a_")]
    text = changed.run_toml.read_text()
    assert before in text
    changed.run_toml.write_text(text.replace(before, after, 1))
    for files in others:
        tables.of(files)
    try:
        expected = parsed(changed)
    except tomllib.TOMLDecodeError:
        expected = {}
    assert tables.of(changed) == (expected, is_edited(expected))


def test_a_file_that_is_gone_or_no_text_has_no_tables(runs: list[RunFiles]) -> None:
    runs[0].run_toml.unlink()
    runs[1].run_toml.write_bytes(b"\xff\xfe")
    assert [RunTables().of(files) for files in runs[:2]] == [({}, False)] * 2
