"""Every bad file is refused with all its problems: where, what, how to fix."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.errors import ConfigError
from retrain.config.digest import digest
from retrain.config.keys import as_toml
from retrain.config.load import load_config, load_types, parse
from retrain.config.reference import json_schema
from retrain.config.resolve import as_tables, build, resolve
from retrain.config.schema import Config


def problems(text: str, here: Path, *overrides: str) -> list[str]:
    path = here / "campaign.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "[training]\nbatch_sise = 4",
            "campaign.toml [training].batch_sise: unknown key; did you mean 'batch_size'?",
        ),
        ('[training]\ntask = "sort"', "[training].task: unknown key; it belongs to [data]"),
        ("[reward]\nseed = 1", "[reward].seed: unknown key; it belongs to [training] or [data]"),
        ("batch_size = 4", "[batch_size]: unknown section; it belongs to [training]"),
        (
            '[[campaign.conditions]]\nname = "hot"\ntemperature = 1.2',
            "[[campaign.conditions]] #1.temperature: unknown key; write training.temperature",
        ),
        ("[trainig]\nlr = 1", "campaign.toml [trainig]: unknown section; did you mean 'training'?"),
        ("[training]\nmax_steps = 3.9", "[training].max_steps: got 3.9; needs a whole number"),
        ('[training]\nlr = "abc"', '[training].lr: got "abc"; needs a number'),
        ('[backpressure]\nenabled = "false"', '[backpressure].enabled: got "false"; needs true or false'),
        ("[training]\nbatch_size = true", "[training].batch_size: got true; needs a whole number"),
        ('[campaign]\nseeds = "12"', '[campaign].seeds: got "12"; needs a list'),
        ("[training]\nbatch_size = -4", "[training].batch_size: got -4; needs at least 1"),
        ("[training]\nlr = -1", "[training].lr: got -1; needs more than 0"),
        ("[training]\nmax_steps = -5", "[training].max_steps: got -5; needs at least 1"),
        ("[campaign]\nmax_workers = -3", "[campaign].max_workers: got -3; needs at least 0"),
        (
            "[backend]\nmax_concurrent = 0",
            '[backend].max_concurrent: got 0; needs a whole number from 1 to 512, or "auto"',
        ),
        ("[backpressure]\nthrottle_margin = 7", "[backpressure].throttle_margin: got 7; needs at most 1"),
        (
            "[backpressure]\nmin_batch_size = 9\nmax_batch_size = 8",
            "max_batch_size: got 8, below min_batch_size = 9",
        ),
        ("[training]\nlr = nan", "[training].lr: got nan; needs a finite number"),
        ("[training]\ntemperature = inf", "[training].temperature: got inf; needs a"),
        ("[training]\ntemperature = 1e-300", "[training].temperature: got 1e-300; needs at least 0.01"),
        (
            "[training]\ngroup_size = 1",
            "needs at least 2, because an advantage compares rollouts of one prompt",
        ),
        ("[campaign]\nseeds = []", "[campaign].seeds: got []; needs a length of at least 1"),
        ("[campaign]\nseeds = [1, 2, 1]", "[campaign].seeds: seed 1 listed more than once"),
        ("[campaign]\nseeds = [true]", "[campaign].seeds #1: got true; needs a whole number"),
        ("[campaign]\nconditions = []", "[campaign].conditions: got []; needs a length of at least 1"),
        ("[campaign]\nlauncher = 'slrm'", "[campaign].launcher: 'slrm' is not a known launcher"),
        ("[campaign]\nlauncher = ['local']", '[campaign].launcher: got ["local"]; needs a string in quotes'),
        (f"[campaign]\nsweep.training.lr = [1{'0' * 400}]", "0…; needs numbers, strings, or true and false"),
        ("[run]\norigin = 'here'", '[run].origin: got "here"; needs a table'),
        ("training = 3", "[training]: got 3; needs a table"),
        ("[algorithm]\nadvantage_mode = 'grop'", "'grop' is not a known advantage; did you mean 'grpo'?"),
        ("[algorithm]\nloss_mode = 'no.such.loss'", "'no.such.loss' cannot be loaded as a loss"),
        (
            "[algorithm.loss_params]\nclip_hi = 1",
            "[algorithm.loss_params].clip_hi: unknown parameter of 'ppo'",
        ),
        (
            "[algorithm.loss_params]\nclip_high = 'x'",
            "[algorithm.loss_params].clip_high: got 'x'; needs a number",
        ),
        (
            f"[algorithm.loss_params]\nclip_high = 1{'0' * 400}",  # more than a float holds
            "0; needs a number of 0 or more",
        ),
        (
            f"[backend.options]\napi_latency_s = 1{'0' * 400}",
            "0; needs seconds from 0 (no API) to 3600",
        ),
        (
            f"[reward]\nreward = 'python'\nparams = {{ timeout_s = 1{'0' * 400} }}",
            "0; needs a finite number",
        ),
        (
            "[data.options]\nlenght = 3",
            "[data.options].lenght: unknown parameter of 'sort'; did you mean 'length'?",
        ),
        ("a b", "campaign.toml: not valid TOML"),
        ("[campaign]\nmax_tokens = 3", "[campaign].max_tokens: unknown key; it belongs to [training]"),
        ("[data]\npath = 'a'", "[data].path: unknown key; it belongs to [data.options]"),
        ("[campaign.conditions]\nname = 'a'", "got a single table; write [[campaign.conditions]]"),
        ("[campaign]\nparallel = True", "write true, in lower case (at line 2, column 12)"),
        ("[campaign]\nparallel = TRUE", "write true, in lower case"),
        ("[campaign]\nparallel = yes", "yes is no value of TOML: write true or false"),
        ("[training]\nlr = null", "null is no value of TOML: leave the key out"),
        ("[data]\ntask = sort", 'write "sort" (at line 2, column 8)'),
        ("[data]\ntask = \u201csort\u201d", "is no quote of TOML: write straight ones"),
        ("[training]\nlr = \nseed = 0", "a value is missing (at line 2, column 6)"),
        ("[training]\nlr = # later\nseed = 0", "a value is missing (at line 2, column 6)"),
        ('[data]\ntask = "sort\n', "a quote is not closed (at line 2)"),
        ("[training]\nlr =", "its last value is missing, or a bracket of it is not closed (at line 2)"),
        ("[campaign]\nseeds = [0,", "or a bracket of it is not closed (at line 2)"),
        ("[training]\nlr = 1\nseed = 0\nlr = 2", "lr is given twice, the second time in line 4"),
        ("[training]\n[data]\n[training]\nlr = 2", "[training] is given twice, the second time in line 3"),
        ("[training]\n[data]\n[training ]\nlr = 2", "[training ] is given twice, the second time in line 3"),
        ("[training]\nlr = 1\n'lr' = 2", "'lr' is given twice, the second time in line 3"),
        ("training.lr = 1\n[training]\nseed = 0", "[training] is given twice, the second time in line 2"),
        ("[data]\noptions = {}\n[data.options]", "[data.options] is given twice, the second time in line 3"),
        ("[data.options]\n[data]\noptions = {}", "options is given twice, the second time in line 3"),
        ("[data]\noptions = {}\noptions.a = 1", "options.a is given twice, the second time in line 3"),
        ("[training]\ntable = { lr = 1, lr = 2 }", "lr is given twice in line 2; keep one"),
        (
            "[campaign]\nconditions = []\n[[campaign.conditions]]",
            "[[campaign.conditions]] is given twice, the second time in line 3",
        ),
        (
            "[[campaign.conditions]]\nname = 'a'\n[[campaign.conditions]]\nname = 'b'\nname = 'c'",
            "name is given twice, the second time in line 5",
        ),
    ],
)
def test_each_problem_says_where_what_and_how_to_fix(text: str, says: str, here: Path) -> None:
    assert any(says in line for line in problems(text, here)), problems(text, here)


def test_all_problems_of_a_file_are_reported_at_once(here: Path) -> None:
    text = "[training]\nlr = -1\nmax_step = 3\n[campaign]\nseeds = [1, 1]\nparallel = 1\n[modle]\nx = 1"
    assert len(problems(text, here)) == 5


def test_a_problem_inside_a_condition_names_the_condition(here: Path) -> None:
    text = '[campaign]\nseeds=[0]\n[[campaign.conditions]]\nname = "fast"\ntraining.lr = -1'
    assert problems(text, here) == [
        'campaign.toml [[campaign.conditions]] "fast" [training].lr: got -1; needs more than 0'
    ]


def test_an_unknown_key_of_a_condition_is_an_error(here: Path) -> None:
    text = '[campaign]\nseeds=[0]\n[[campaign.conditions]]\nnaem = "a"'
    assert problems(text, here) == [
        "campaign.toml [[campaign.conditions]] #1.naem: unknown key; did you mean 'name'?"
    ]


def test_a_condition_is_checked_together_with_the_file(here: Path) -> None:
    text = "[backpressure]\nmin_batch_size = 9\n[campaign]\nseeds=[0]\n[[campaign.conditions]]\nname='a'\n"
    text += "[campaign.conditions.backpressure]\nmax_batch_size = 8"
    assert "below min_batch_size = 9" in problems(text, here)[0]


def test_a_file_that_is_not_utf8_is_refused(here: Path) -> None:
    (here / "bad.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(here / "bad.toml")


def test_a_byte_order_mark_is_no_part_of_a_file(here: Path) -> None:
    (here / "marked.toml").write_bytes(b"\xef\xbb\xbf[training]\nmax_steps = 7\n")
    assert load_config(here / "marked.toml").training.max_steps == 7


def test_a_huge_file_is_refused_unread(here: Path) -> None:
    (here / "big.toml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match="larger than"):
        load_config(here / "big.toml")


@pytest.mark.parametrize("opening", ["[", "{a="])
def test_absurd_nesting_is_refused(opening: str, here: Path) -> None:
    (here / "deep.toml").write_text("a = " + opening * 20_000)
    with pytest.raises(ConfigError, match=r"nested too deep|not valid TOML"):
        load_config(here / "deep.toml")


def test_a_missing_file_says_how_to_make_one(here: Path) -> None:
    with pytest.raises(ConfigError, match="retrain init"):
        load_config(here / "none.toml")


@given(st.binary(max_size=300))
def test_any_bytes_give_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "f.toml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        assert isinstance(load_config(path), Config)


@pytest.mark.parametrize(
    "damage",
    [
        "sweep.training.lr = 3",
        "sweep.training.lr = { uniform = [1.0], samples = 2 }",
        "sweep.training.lr = { samples = 2 }",
        f"sweep.training.lr = {{ uniform = [1, 1{'0' * 400}], samples = 2 }}",
        "[[campaign.conditions]]\nenvironment.max_trns = 3",
    ],
)
def test_the_file_of_a_campaign_that_was_damaged_is_refused_by_its_types(damage: str, here: Path) -> None:
    (here / "c.toml").write_text(f"[campaign]\nseeds = [0]\n{damage}\n")
    with pytest.raises(ConfigError, match=r"c\.toml \[.*(needs|unknown key)"):
        load_types(here / "c.toml")


def test_an_override_replaces_the_files_value(here: Path) -> None:
    (here / "c.toml").write_text("[training]\nlr = 1e-3")
    config = load_config(here / "c.toml", ["training.lr=1e-4", "model.model=org/name"])
    assert (config.training.lr, config.model.model) == (1e-4, "org/name")


def test_a_bad_override_is_named_as_typed(here: Path) -> None:
    assert problems("", here, "training.lr=fast") == ['--set training.lr: got "fast"; needs a number']
    (problem,) = problems("", here, "lr=1")
    assert problem == (
        "--set lr=1: not of the form section.key=value; write --set training.lr=1 or --set warmup.lr=1"
    )
    assert problems("", here, "trainig.lr=1") == ["--set trainig: unknown section; did you mean 'training'?"]


def test_a_condition_with_another_plugin_does_not_inherit_its_parameters() -> None:
    raw = {
        "algorithm": {"advantage_mode": "maxrl", "advantage_params": {"eps": 0.1}},
        "campaign": {"seeds": [0], "conditions": [{"advantage_mode": "grpo"}, {"name": "same"}]},
    }
    config = parse(raw, "c.toml")
    grpo, same = [resolve(config, c, 0).algorithm for c in config.campaign.conditions]  # type: ignore[union-attr]
    assert (grpo.advantage_params, same.advantage_params) == ({}, {"eps": 0.1})


def test_a_resolved_config_survives_toml_without_loss() -> None:
    import tomli_w

    raw = {
        "algorithm": {"loss_params": {"clip_low": 0.1}},
        "data": {"task": "sort", "options": {"length": 3}},
        "campaign": {"seeds": [3], "conditions": [{"name": "a", "training": {"lr": 0.25}}]},
    }
    config = parse(raw, "c.toml")
    resolved = resolve(config, config.campaign.conditions[0], 3)  # type: ignore[union-attr,index]
    again = build(Config, tomllib.loads(tomli_w.dumps(as_tables(resolved))))
    assert again == resolved
    assert digest(again) == digest(resolved)


def test_the_digest_ignores_where_records_go_and_sees_the_learning_rate() -> None:
    base = parse({}, "c")
    assert digest(parse({"logging": {"log_dir": "x"}, "backend": {"max_concurrent": 9}}, "c")) == digest(base)
    assert digest(parse({"training": {"lr": 0.1}}, "c")) != digest(base)


@pytest.mark.parametrize("wrong", ["'many'", "2.5", "true", "513", "[4]", "'4'"])
def test_permits_are_a_number_or_auto_and_a_problem_is_said_once(wrong: str, here: Path) -> None:
    (line,) = problems(f"[backend]\nmax_concurrent = {wrong}", here)
    assert line.endswith('; needs a whole number from 1 to 512, or "auto"')


def test_editors_know_that_permits_are_a_number_or_auto() -> None:
    wanted = json_schema()["$defs"]["BackendSection"]["properties"]["max_concurrent"]["anyOf"]
    assert wanted == [{"type": "integer", "minimum": 1, "maximum": 512}, {"type": "string", "const": "auto"}]


def test_the_json_schema_has_every_section_with_descriptions() -> None:
    schema = json_schema()
    assert "run" not in schema["properties"]
    assert schema["$defs"]["TrainingSection"]["properties"]["lr"]["description"] == "learning rate"
    assert schema["$defs"]["TrainingSection"]["additionalProperties"] is False


def test_the_json_schema_names_plugins_and_what_they_take() -> None:
    defs = json_schema()["$defs"]
    assert "sort" in defs["DataSection"]["properties"]["task"]["anyOf"][0]["enum"]
    assert defs["DataSection"]["properties"]["options"]["properties"]["length"]["type"] == "integer"
    assert "numpy" in defs["BackendSection"]["properties"]["options"]["properties"]["hidden"]["description"]


def test_the_json_schema_describes_a_conditions_tables_as_the_files_own() -> None:
    condition = json_schema()["$defs"]["ConditionSection"]["properties"]
    assert condition["training"]["$ref"] == "#/$defs/TrainingSection"


def test_the_json_schema_asks_for_nothing_that_toml_cannot_say() -> None:
    assert "null" not in json.dumps(json_schema())


def test_a_device_is_not_read() -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        load_config("/dev/zero")


def test_a_pipe_is_not_waited_for(here: Path) -> None:
    os.mkfifo(here / "pipe.toml")
    with pytest.raises(ConfigError, match="is not a file"):
        load_config(here / "pipe.toml")


@pytest.mark.parametrize("path", ["..x", "a..b", "a.b-c", "1.2"])
def test_a_path_that_python_could_not_write_is_refused(path: str, here: Path) -> None:
    assert "is not a dotted path" in problems(f'[reward]\nreward = "{path}"', here)[0]


def test_an_override_of_two_lines_is_one_string(here: Path) -> None:
    assert problems("", here, "training.lr=1\nseed=4")[0].startswith("--set training.lr: got")


def test_a_condition_cannot_contradict_itself_or_choose_a_seed(here: Path) -> None:
    text = "[campaign]\nseeds=[0]\n[[campaign.conditions]]\nadvantage_mode='grpo'\n"
    found = problems(text + "algorithm.advantage_mode = 'rloo'\ntraining.seed = 9", here)
    assert len(found) == 2
    assert "advantage_mode: got 'grpo', but its algorithm.advantage_mode is 'rloo'" in found[0]
    assert "list it in campaign.seeds" in found[1]


def test_a_wrong_name_is_found_even_if_every_condition_replaces_it(here: Path) -> None:
    text = "[campaign]\nseeds=[0]\n[[campaign.conditions]]\nadvantage_mode='grpo'\n"
    assert "did you mean 'grpo'?" in problems(text, here, "algorithm.advantage_mode=grpoo")[0]


@pytest.mark.parametrize(
    "value",
    [
        True,
        -3,
        2.5,
        1e-5,
        'a "quoted" word',
        [],
        [1, "x"],
        {},
        {"beta": 0.1, "on": {"a": [False]}},
        {"x.y": {"é b": {"": 1}}},
    ],
)
def test_a_value_is_shown_as_toml_reads_it(value: object) -> None:
    assert tomllib.loads(f"key = {as_toml(value)}") == {"key": value}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that opens and cannot be read")
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.symlink_to("/proc/self/mem")  # which begins with an input/output error
    with pytest.raises(ConfigError, match=r"c.toml: cannot read \(Input/output error\); the disk reports"):
        load_config(path)


def test_a_problem_that_many_conditions_share_is_told_once(tmp_path: Path) -> None:
    conditions = "".join(f'[[campaign.conditions]]\nname = "c{number}"\nlrr = 1\n' for number in range(9))
    (problem,) = problems(f"[campaign]\nmax_steps = 3\nseeds = [0]\n{conditions}", tmp_path)
    assert "[[campaign.conditions]] #1.lrr: unknown key" in problem
    assert problem.endswith("; the same in 8 more conditions")
