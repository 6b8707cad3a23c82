"""What a press of Tab offers, asked the way that the shell's own script asks, in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def press_tab(tmp_path_factory):
    """Complete a command line by the script that `--show-completion` gives."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.fail("bash is not installed, and it is what runs these scripts")
    home = tmp_path_factory.mktemp("home")
    command = home / "bin" / "retrain"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m retrain "$@"\n')
    command.chmod(0o755)
    env = {"PATH": f"{command.parent}:/usr/bin:/bin", "HOME": str(home), "SHELL": bash}

    def run(text: str) -> str:
        result = subprocess.run([bash, "-c", text], env=env, capture_output=True, text=True, check=True)
        return result.stdout

    script = run("_RETRAIN_COMPLETE=source_bash retrain")
    function = next(line for line in script.splitlines() if line.endswith("() {")).removesuffix("() {")

    def press(words: str) -> list[str]:
        ask = f"COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); {function} retrain"
        return run(f"{script}\n{ask}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\"").split()

    return press


def test_commands_templates_kinds_and_keys_are_offered(press_tab, here):
    assert press_tab("retrain stat") == ["status", "states"]
    assert press_tab("retrain init quick") == ["quickstart"]
    assert press_tab("retrain plugins rew") == ["rewards"]
    assert press_tab("retrain run x.toml --set training.batch") == ["training.batch_size="]
    assert "--best" in press_tab("retrain samples --b")


def test_runs_of_a_campaign_are_offered(press_tab, here):
    (here / "study" / "runs" / "grpo_s0").mkdir(parents=True)
    (here / "study" / "runs" / "maxrl_s0").mkdir()
    assert press_tab("retrain logs study g") == ["grpo_s0"]
    assert press_tab("retrain publish study g") == ["grpo_s0"]
    assert press_tab("retrain samples study ''") == ["grpo_s0", "maxrl_s0"]
