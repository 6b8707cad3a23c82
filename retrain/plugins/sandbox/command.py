"""A command of yours, such as a container, started for each program.

```toml
[reward]
sandbox = "command"
sandbox_options.command = ["docker", "run", "--rm", "-i", "--network", "none", "python:3.12"]
```
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from retrain.plugins.sandbox import Sandbox

WEAKNESS = 'tests of tests = "asserts" run outside of it, on this machine in the sandbox "process"'


def open_sandbox(*, command: list[str], python: str = "python3") -> Sandbox:
    """Return the command; `python` is the interpreter's name in it."""
    # what it shows of this machine, only its author knows
    return Sandbox("command", [*command, python], single_use=True, readable=(), weakness=WEAKNESS)


def check_options(options: Mapping[str, Any]) -> Iterator[str]:
    """Return the problems of the options."""
    command = options["command"]
    if not command:
        yield 'command: got []; needs a list, such as ["docker", "run", "-i", "python:3.12"]'
    elif shutil.which(command[0]) is None:
        yield f"command: {command[0]!r} is not on the PATH"
