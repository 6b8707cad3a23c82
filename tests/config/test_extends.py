"""Files that `extend` others: what wins, which file an error names, and what a campaign keeps of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, start
from retrain.config.load import load_config, value_origins
from retrain.config.resolve import as_tables
from retrain.plan.build import plan_runs

Call = Callable[..., subprocess.CompletedProcess[str]]
BASE = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
lr = 1e-3

[data]
task = "successor"

[algorithm]
loss_mode = "ppo"
[algorithm.loss_params]
clip_low = 0.1

[campaign]
seeds = [0, 1]
max_steps = 4

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "maxrl"
"""


def write(directory: Path, **texts: str) -> Path:
    """Write files, `top` among them; return it."""
    for name, text in texts.items():
        (directory / f"{name}.toml").write_text(text)
    return directory / "top.toml"


def problems_of(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return refused.value.problems


def test_tables_are_merged_and_arrays_replaced(here: Path) -> None:
    top = write(
        here,
        base=BASE,
        top='extends = "base.toml"\ntraining = {lr = 1.0}\n'
        '[campaign]\nseeds = [7]\n[[campaign.conditions]]\nname = "one"',
    )
    config = load_config(top)
    assert (config.training.lr, config.training.batch_size) == (1.0, 2)
    assert config.campaign is not None
    assert (config.campaign.seeds, config.campaign.max_steps) == ([7], 4)
    assert [condition.name for condition in config.campaign.conditions or []] == ["one"]


def test_later_files_win_and_the_top_over_all_but_set(here: Path) -> None:
    files = {
        name: f"[training]\nlr = {lr}\nseed = {lr}\nmax_steps = {lr}" for name, lr in (("a", 1), ("b", 2))
    }
    top = write(here, **files, top='extends = ["a.toml", "b.toml"]\n[training]\nseed = 3\nmax_steps = 3')
    training = load_config(top, ["training.max_steps=4"]).training
    assert (training.lr, training.seed, training.max_steps) == (2, 3, 4)


def test_a_base_that_two_files_extend_wins_over_neither(here: Path) -> None:
    top = write(
        here,
        base="[training]\nlr = 1\nseed = 1",
        a='extends = "base.toml"\n[training]\nlr = 2',
        b='extends = "base.toml"\n[training]\nseed = 2',
        top='extends = ["a.toml", "b.toml"]',
    )
    assert (load_config(top).training.lr, load_config(top).training.seed) == (2, 2)


def test_a_plugin_that_replaces_another_drops_its_parameters(here: Path) -> None:
    top = write(here, base=BASE, top='extends = "base.toml"\n[algorithm]\nloss_mode = "importance_sampling"')
    assert load_config(top).algorithm.loss_params == {}


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        ("[training]\nbatch_sise = 2", "base.toml [training].batch_sise: unknown key; did you mean"),
        ("[training]\ngroup_size = 1", "base.toml [training].group_size: got 1; needs at least 2"),
        ("[trainin]\nlr = 1", "base.toml [trainin]: unknown section; did you mean 'training'?"),
        ("[data]\ntask = 'jsonl'\noptions = {path = 'no.jsonl'}", "base.toml [data.options].path: "),
        ("[[eval]]\nname = 'a'\ntask = 'sortt'", "base.toml [[eval]] "),
        (
            "[[campaign.conditions]]\nname = 'a'\ntraining = {lrr = 1}",
            'base.toml [[campaign.conditions]] "a" [training].lrr: unknown key',
        ),
    ],
)
def test_an_error_names_the_file_in_which_the_key_stands(base: str, problem: str, here: Path) -> None:
    top = write(here, base=base, top='extends = "base.toml"\n[training]\nlr_scale = 1')
    problems = problems_of(top)
    assert [line for line in problems if line.startswith(problem)] != [], problems
    assert [line for line in problems if line.startswith("top.toml [training].lr_scale: unknown key")] != []


def test_an_error_of_set_names_set(here: Path) -> None:
    top = write(here, base=BASE, top='extends = "base.toml"')
    assert problems_of(top, "training.group_size=1")[0].startswith("--set training.group_size: got 1")


def test_an_error_that_only_the_plan_shows_names_its_file_too(here: Path, retrain: Call) -> None:
    (here / "data.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    data = '[data]\ntask = "jsonl"\n[data.options]\npath = "data.jsonl"\nheld_out = 0.5'
    write(here, base=data, top='extends = "base.toml"')
    for command in ("explain", "run"):
        refused = retrain(command, "top.toml")
        assert (refused.returncode, refused.stderr.split(": ")[0]) == (2, "base.toml [data.options].held_out")


@pytest.mark.parametrize(
    ("top", "problem"),
    [
        ("extends = 3", 'top.toml extends: got 3; needs a file, as "base.toml", or a list of them'),
        ('extends = ["a.toml", ""]', 'top.toml extends: got ["a.toml", ""]; needs a file'),
        (
            'extends = "bsae.toml"',
            "top.toml extends: got \"bsae.toml\", which is no file; did you mean 'base.toml'?",
        ),
        ('extends = "base.toml"', "base.toml: not valid TOML: "),
        ('extends = "top.toml"', "top.toml extends: goes in a circle: top.toml -> top.toml; remove"),
        ('extends = "a.toml"', "b.toml extends: goes in a circle: a.toml -> b.toml -> a.toml; remove"),
    ],
)
def test_what_cannot_be_extended_is_named(top: str, problem: str, here: Path) -> None:
    path = write(here, base="[training", a='extends = "b.toml"', b='extends = "a.toml"', top=top)
    (line,) = problems_of(path)
    assert line.removeprefix(f"{here}/").startswith(problem)


def test_inputs_are_relative_to_the_file_that_names_them(here: Path) -> None:
    for name in ("shared", "mine"):
        (here / name).mkdir()
    (here / "shared" / "data.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 2)
    text = '[data]\ntask = "jsonl"\n[data.options]\npath = "data.jsonl"\nheld_out = 0'
    write(here / "shared", base=text)
    top = write(here / "mine", top='extends = "../shared/base.toml"')
    assert load_config(top).data.options["path"] == str(here / "shared" / "data.jsonl")
    (here / "shared" / "data.jsonl").rename(here / "mine" / "data.jsonl")
    (problem,) = problems_of(top)
    assert problem.startswith(
        '../shared/base.toml [data.options].path: got "data.jsonl", which is beside the file'
    )
    assert problem.endswith('write "../mine/data.jsonl"')


def test_a_campaign_keeps_its_file_whole_and_its_runs_their_identity(here: Path) -> None:
    (here / "elsewhere").mkdir()
    write(here / "elsewhere", base=BASE)
    top = write(here, top='extends = "elsewhere/base.toml"\n[training]\nlr = 5e-3')
    flat = here / "flat.toml"
    flat.write_text(BASE.replace("1e-3", "5e-3"))
    campaign = start(top)
    alone = plan_runs(load_config(flat), "flat.toml")
    assert [run.config_hash for run in campaign.plan.runs] == [run.config_hash for run in alone.runs]
    kept = campaign.directory / "campaign.toml"
    assert kept.read_text().startswith("# top.toml with what it extends: elsewhere/base.toml\n")
    assert as_tables(load_config(kept)) == as_tables(load_config(flat))
    (here / "elsewhere" / "base.toml").unlink()  # nothing depends on it any more
    assert reopen(campaign.directory).execute().exit_code == 0
    kept.write_text(f'extends = "../../flat.toml"\n{kept.read_text()}')
    with pytest.raises(ConfigError, match="extends: a campaign's own file is whole"):
        reopen(campaign.directory)


def test_a_file_that_extends_nothing_is_kept_as_it_is(here: Path) -> None:
    alone = write(here, top=f"# mine\n{BASE}")
    assert (start(alone).directory / "campaign.toml").read_text() == f"# mine\n{BASE}"
    assert value_origins(alone) == ()


def test_explain_tells_where_each_value_comes_from(here: Path, retrain: Call) -> None:
    write(here, base=BASE, top='extends = "base.toml"\n[training]\nlr = 5e-3')
    said = retrain("explain", "top.toml", "--set", "campaign.seeds=[1]").stdout
    rows = dict(
        reversed(line.split("  ")[1:3])
        for line in said.splitlines()
        if ".toml  [" in line or "--set  [" in line
    )
    assert {at: name for at, name in rows.items() if at.startswith(("[training].lr", "[training].ba"))} == {
        "[training].lr = 0.005": "top.toml",
        "[training].batch_size = 2": "base.toml",
    }
    assert rows["[campaign].seeds = [1]"] == "--set"


def test_a_design_is_written_into_the_top_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrain.cli.explain import _write_design
    from retrain.plan.designs import Designs

    top = write(here, base="[decision]\nmax_seeds = 9", top='extends = "base.toml"\n')
    _write_design(top, Designs("mean_reward", 0.1, 8, (), {"max_seeds": 5}))
    assert top.read_text() == 'extends = "base.toml"\n\n[decision]\nmax_seeds = 5\n'
