"""What runs inside a sandbox: sent there as text, so it imports the standard library only.

Nothing in these modules holds a test, an expected output or a key while a program runs. Here is how they are
sent: what an interpreter in a sandbox reads first.
"""

from __future__ import annotations

import json
import marshal
from binascii import b2a_base64
from dataclasses import asdict
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from retrain.base import hide_process
from retrain.plugins.sandbox import Limits, Sandbox

BOOT = """\
import json, marshal, os, sys, types
from binascii import a2b_base64
from importlib.util import MAGIC_NUMBER
size = int(sys.argv[1]); text = b""
while len(text) < size: text += os.read(0, size - len(text)) or sys.exit(1)
setup = json.loads(text)
codes = setup.pop("codes").get(MAGIC_NUMBER.hex())
codes = marshal.loads(a2b_base64(codes)) if codes else {}
for name, source in setup.pop("modules").items():
    sys.modules[name] = types.ModuleType(name)
    exec(codes.get(name) or compile(source, name + ".py", "exec"), sys.modules[name].__dict__)
sys.modules[name].main(setup)"""
MODULES = "values confine stand_in replicas peer reading judge testing jobs zygote".split()
HIDDEN = "retrain.base.hide_process"


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
        "codes": {} if sandbox.single_use else byte_code(),
    }
    return json.dumps(setup).encode()


@cache
def _modules() -> dict[str, str]:
    """Return the source of every module, by name."""
    return {__name__: "", **{name: path.read_text(encoding="utf-8") for name, path in files().items()}}


@cache
def byte_code() -> dict[str, str]:
    """Return the modules' byte code by the version of the interpreters that can run it.

    Others compile the source, which takes 20 ms, as does a container for a single use: its Python is its own.
    """
    codes = {name: SourceFileLoader(name, str(path)).get_code(name) for name, path in files().items()}
    return {MAGIC_NUMBER.hex(): b2a_base64(marshal.dumps(codes), newline=False).decode()}


def files() -> dict[str, Path]:
    """Return the file of every module that runs in a sandbox, by name; the last one starts."""
    paths = {f"{__name__}.{name}": Path(__file__).with_stem(name) for name in MODULES}
    return {HIDDEN: Path(hide_process.__file__), **paths}
