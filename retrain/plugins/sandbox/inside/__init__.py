"""What runs inside a sandbox: sent there as text, so it imports the standard library only.

Nothing in these modules holds a test, an expected output or a key while a program runs. Here is how they are
sent: what an interpreter in a sandbox reads first.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path

from retrain.base import hide_process
from retrain.plugins.sandbox import Limits, Sandbox

BOOT = """\
import json, os, sys, types
size = int(sys.argv[1]); text = b""
while len(text) < size: text += os.read(0, size - len(text)) or sys.exit(1)
setup = json.loads(text)
for name, source in setup.pop("modules").items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name + ".py", "exec"), sys.modules[name].__dict__)
sys.modules[name].main(setup)"""
MODULES = "values confine stand_in replicas peer reading judge testing jobs zygote".split()


def boot_text(sandbox: Sandbox, limits: Limits | None = None) -> bytes:
    """Return the text of which `BOOT` reads so many bytes from standard input.

    The settings are of `retrain.plugins.sandbox.inside.zygote.Setup`, the limits those of a single program.
    """
    is_confined = sandbox.mounts or sandbox.single_use
    setup = {
        "single_use": sandbox.single_use,
        "mounts": sandbox.mounts,
        "folder": sandbox.folder,
        "readable": () if is_confined else sandbox.readable or (),
        "limits": limits and asdict(limits),
        "modules": _modules(),
    }
    return json.dumps(setup).encode()


@cache
def _modules() -> dict[str, str]:
    """Return the source of every module that runs in a sandbox, by name; the last one starts."""
    files = {f"{__name__}.{name}": Path(__file__).with_stem(name) for name in MODULES}
    files = {hide_process.__name__: Path(hide_process.__file__), **files}
    return {__name__: "", **{name: file.read_text(encoding="utf-8") for name, file in files.items()}}
