"""What a press of Tab offers in a real zsh and a real fish; bash is tested in the core."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
END = "<<offered>>"
SHELLS = ("fish", "zsh")
Press = Callable[[str], str]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return the folder of a command `retrain`, and the script for each shell that it prints."""
    command = tmp_path_factory.mktemp("bin") / "retrain"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m retrain "$@"\n')
    command.chmod(0o755)
    asked = {name: {**os.environ, "_RETRAIN_COMPLETE": f"source_{name}"} for name in SHELLS}
    return command.parent, {
        name: subprocess.run([command], env=env, capture_output=True, text=True, check=False).stdout
        for name, env in asked.items()
    }


@pytest.fixture(params=SHELLS)
def press_tab(
    request: pytest.FixtureRequest,
    scripts: tuple[Path, dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Press:
    """Type a line in a directory with a campaign and a file, press Tab, and give the line or the offers."""
    shell = shutil.which(request.param)
    assert shell, "needs Debian's packages zsh and fish"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study" / "runs" / "grpo_s0").mkdir(parents=True)
    (tmp_path / "mine.toml").touch()
    monkeypatch.setenv("PATH", f"{scripts[0]}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script").write_text(scripts[1][request.param])
    return _in_fish(shell) if request.param == "fish" else _in_zsh(shell)


def _in_fish(shell: str) -> Press:
    def press(line: str) -> str:
        ask = ["-c", 'source script; complete -C"$argv[1]"', line]
        return subprocess.run([shell, *ask], capture_output=True, text=True, check=True).stdout

    return press


def _in_zsh(shell: str) -> Press:
    """zsh completes only at a terminal: a widget types the line, completes it and prints what it became."""
    widget = (
        "autoload -Uz compinit; compinit -u -D; source script\n"
        "ask() { BUFFER=$LINE_TO_ASK CURSOR=$#LINE_TO_ASK; zle complete-word; "
        f'print -r "$BUFFER{END}"; exit }}\n'
        "zle -N ask; bindkey '^T' ask; precmd() { print READY }\n"
    )

    def press(line: str) -> str:
        Path(".zshrc").write_text(widget)
        ours, theirs = pty.openpty()
        environment = {**os.environ, "LINE_TO_ASK": line, "TERM": "dumb"}
        shown, is_asked = "", False
        with subprocess.Popen(
            [shell, "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        ) as zsh:
            os.close(theirs)
            killer = threading.Timer(60, zsh.kill)
            killer.start()
            while END not in shown:
                shown += os.read(ours, 4096).decode(errors="replace")
                if "READY" in shown and not is_asked:
                    is_asked = os.write(ours, b"\x14") == 1
            killer.cancel()
            zsh.kill()
        os.close(ours)
        return shown.partition(END)[0].rpartition("\n")[2]

    return press


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("retrain statu", "status"),
        ("retrain init qui", "quickstart"),
        ("retrain run mine.toml --set training.batch", "training.batch_size="),
        ("retrain logs study g", "grpo_s0"),
        ("retrain samples --b", "--best"),
        ("retrain explain mi", "mine.toml"),
        ("retrain mi", "mine.toml"),
        ("retrain status stu", "study/"),
    ],
)
def test_tab_offers_what_fits(press_tab: Press, line: str, offered: str) -> None:
    assert offered in press_tab(line)
