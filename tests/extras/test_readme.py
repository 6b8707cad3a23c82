"""The README's own lines work, and work again."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
SLOW = ("calibrate",)
SHORTER = ("--set", "campaign.max_steps=12", "--set", "campaign.launcher=inline")


def lines() -> list[list[str]]:
    """The `retrain` commands of the README's first section, in their order."""
    section = README.read_text().partition("## 60 seconds")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    commands = [command for block in blocks for line in block.splitlines() for command in line.split("&&")]
    typed = [shlex.split(command, comments=True) for command in commands]
    return [words[1:] for words in typed if words[0] == "retrain" and words[1] not in SLOW]


def test_the_first_section_can_be_typed_twice(
    retrain: Callable[..., subprocess.CompletedProcess[str]], here: Path
) -> None:
    typed = lines()
    assert len(typed) >= 6
    for words in typed * 2:
        found = [name for word in words for name in (sorted(here.glob(word)) or [word])]
        answer = retrain(*found, *(SHORTER if words[0].endswith(".toml") else ()))
        assert answer.returncode == 0, f"retrain {shlex.join(words)}: {answer.stderr}"
