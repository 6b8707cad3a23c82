"""`retrain plugins` and `retrain doctor` as a user meets them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base import extras, registry
from retrain.base.distribution import install_command
from tests.slurm_pieces import command

Call = Callable[..., subprocess.CompletedProcess[str]]
NO_KEYS = {k: v for k, v in os.environ.items() if k not in ("OPENAI_API_KEY", "JUDGE_KEY")}
JUDGE = """
[reward]
reward = "weighted"
[reward.params.parts]
match = 0.5
[reward.params.parts.judge]
weight = 0.5
params = { base_url = "http://127.0.0.1:9/v1", model = "tiny", key_env = "JUDGE_KEY" }
"""


def checks(answer: subprocess.CompletedProcess[str]) -> dict[str, dict[str, str]]:
    return {check["what"]: check for check in json.loads(answer.stdout)["checks"]}


def test_plugins_lists_every_kind_and_what_each_plugin_needs(retrain: Call) -> None:
    rows = json.loads(retrain("plugins", "--json").stdout)["plugins"]
    assert {row["kind"] for row in rows} == set(registry.KINDS)
    math = next(row for row in rows if (row["kind"], row["name"]) == ("rewards", "math"))
    installed = importlib.util.find_spec("math_verify") is not None
    assert (math["extra"], math["installed"]) == ("math", installed)
    assert math["install"] == ("" if installed else install_command("math"))


def test_plugins_of_one_kind_are_shown_as_a_table(retrain: Call) -> None:
    shown = retrain("plugins", "rewards").stdout
    assert "OPENAI_API_KEY" in shown
    assert "maxrl" not in shown
    assert retrain("plugins", "reward").returncode == 2


@pytest.mark.parametrize(
    ("words", "said"), [(["plugins", "rewards"], "reasoning_gym"), (["doctor"], "extra reasoning-gym")]
)
def test_a_narrow_terminal_breaks_no_word(words: list[str], said: str, retrain: Call) -> None:
    lines = retrain(*words, env=dict(os.environ, COLUMNS="40")).stdout.splitlines()
    assert said in [line.rstrip() for line in lines]
    assert max(map(len, lines)) <= 40


def test_doctor_finds_a_bare_machine_well(retrain: Call) -> None:
    answer = retrain("doctor", "--json", env=NO_KEYS)
    assert answer.returncode == 0, answer.stderr
    found = checks(answer)
    assert found["python"]["state"] == found["numpy"]["state"] == "ok"
    assert found["key OPENAI_API_KEY"]["state"] == "absent"
    assert {"gpu", "disk for logs", "locks in logs", "extra report", "extra hub"} <= set(found)


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.part"])
def test_doctor_misses_the_packages_of_a_users_own_plugin(package: str, retrain: Call, here: Path) -> None:
    (here / "needy.py").write_text(f"PACKAGES = ({package!r},)\ndef score(completion, prompt): return 1.0\n")
    (here / "c.toml").write_text('[training]\nseed = 0\n[reward]\nreward = "needy.score"\n')
    answer = retrain("doctor", "c.toml", "--json")
    check = checks(answer)["packages for needy.score"]
    assert (answer.returncode, check["state"], check["found"]) == (2, "missing", f"{package} not found")
    assert f"needs packages: {package} not found" in retrain("explain", "c.toml").stderr


def test_doctor_misses_the_key_that_a_file_needs_and_never_shows_it(retrain: Call, here: Path) -> None:
    (here / "judged.toml").write_text(JUDGE)
    missing = retrain("doctor", "judged.toml", "--json", env=NO_KEYS)
    assert missing.returncode == 2
    assert checks(missing)["key JUDGE_KEY for judge"]["fix"] == "export JUDGE_KEY=..."
    there = retrain("doctor", "judged.toml", "--json", env={**NO_KEYS, "JUDGE_KEY": "s3cret"})
    assert checks(there)["key JUDGE_KEY for judge"]["state"] == "ok"
    assert "s3cret" not in there.stdout + there.stderr


def test_doctor_tells_of_a_file_only_what_the_file_needs(retrain: Call, here: Path) -> None:
    (here / "plain.toml").write_text("[campaign]\nseeds = [0]\n")
    found = checks(retrain("doctor", "plain.toml", "--json", env=NO_KEYS))
    assert [what for what in found if what.startswith(("extra", "key", "commands"))] == []
    assert {"python", "numpy", "disk for logs"} <= set(found)


def test_doctor_tells_once_what_all_conditions_of_a_file_lack(retrain: Call, here: Path) -> None:
    conditions = "".join(
        f'[[campaign.conditions]]\nadvantage_mode = "{mode}"\n' for mode in ("grpo", "maxrl")
    )
    (here / "paid.toml").write_text(f'[backend]\nbackend = "tinker"\n[campaign]\nseeds = [0]\n{conditions}')
    found = json.loads(retrain("doctor", "paid.toml", "--json", env=NO_KEYS).stdout)["checks"]
    named = [check["what"] for check in found]
    assert named.count("[model].model") == 1
    assert "[backend].backend" not in named  # its extra and its key have checks of their own


def test_a_file_whose_servers_are_not_well_named_can_still_be_doctored(retrain: Call, here: Path) -> None:
    (here / "odd.toml").write_text('[reward]\nreward = "weighted"\n[reward.params.parts]\njudge = 1.0\n')
    assert not [what for what in checks(retrain("doctor", "odd.toml", "--json")) if what.startswith("server")]


def test_doctor_tells_the_command_for_an_extra_that_a_file_needs(retrain: Call, here: Path) -> None:
    (here / "math.toml").write_text('[reward]\nreward = "math"\n')
    answer = retrain("doctor", "math.toml", "--json", env=NO_KEYS)
    check = checks(answer)["extra math for math"]
    if importlib.util.find_spec("math_verify") is None:
        assert (answer.returncode, check["state"], check["fix"]) == (
            2,
            "missing",
            install_command("math"),
        )
    else:
        assert (answer.returncode, check["state"]) == (0, "ok")


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_built_in_plugin_says_what_it_is_and_which_extra_brings_its_packages(kind: str) -> None:
    for name in registry.built_in_names(kind):
        assert extras.summary(kind, name).endswith((".", ":")), name
        wanted = extras.needs(kind, name)
        assert bool(wanted.extra) == bool(wanted.packages), name


def test_doctor_misses_a_log_directory_that_cannot_be_made(retrain: Call, here: Path) -> None:
    (here / "logs").write_text("a file")
    found = checks(retrain("doctor", "--json", env=NO_KEYS))["disk for logs"]
    assert (found["state"], found["found"]) == ("missing", f"{here / 'logs'} is not a directory")


def test_doctor_misses_the_commands_of_the_cluster_that_a_file_names(retrain: Call, here: Path) -> None:
    (here / "cluster.toml").write_text('[campaign]\nlauncher = "slurm"\nseeds = [0]\n')
    nowhere = {**NO_KEYS, "PATH": "/nowhere"}
    missing = retrain("doctor", "cluster.toml", "--json", env=nowhere)
    assert missing.returncode == 2
    assert checks(missing)["commands of slurm"]["found"] == "sbatch, squeue, scancel, scontrol not found"
    assert checks(retrain("doctor", "--json", env=nowhere))["commands of slurm"]["state"] == "absent"


@pytest.mark.parametrize(
    ("conf", "state", "found"), [("x", "ok", "slurm 25.05.1: sbatch"), ("", "warning", "no cluster")]
)
def test_doctor_says_which_cluster_the_commands_know(
    conf: str, state: str, found: str, retrain: Call, here: Path
) -> None:
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        path = command(
            here, name, '[ "$SLURM_CONF" ] && echo slurm 25.05.1 || { echo no cluster >&2; false; }'
        )
    answer = retrain("doctor", "--json", env={**NO_KEYS, "PATH": path, "SLURM_CONF": conf})
    check = checks(answer)["commands of slurm"]
    assert (check["state"], check["found"][: len(found)]) == (state, found)


def test_what_explain_refuses_is_missing(retrain: Callable, campaign_file: Path) -> None:
    assert retrain("doctor", campaign_file).returncode == 0
    text = campaign_file.read_text().replace(
        'task = "successor"', 'task = "jsonl"\noptions = { path = "no.jsonl" }'
    )
    campaign_file.write_text(text)
    assert retrain("explain", campaign_file).returncode == 2
    found = retrain("doctor", campaign_file)
    assert found.returncode == 2
    assert "no.jsonl" in found.stdout
