"""A process with limits; on Linux with a filter of system calls, and only its own files. Works everywhere."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from retrain.plugins.sandbox import Sandbox

WEAKNESS = "programs run as this user beside the run: some can disturb it, though none sees an answer"
SYSTEM = ("/usr/share", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
PREFIXES = ("/usr", "/usr/local")  # a container's project may lie in /usr/src
PARTS = ("bin", "lib", "lib32", "lib64", "libexec", "include", "pyvenv.cfg")  # of a prefix, maybe a project
PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def open_sandbox() -> Sandbox:
    """Return this interpreter."""
    return Sandbox("process", [sys.executable], readable=readable_paths(), weakness=WEAKNESS)


def readable_paths() -> list[str]:
    """Return what programs can read of this machine, each path once; of a prefix, an interpreter's parts.

    A virtual environment may be the directory of a campaign, whose data holds the answers.
    """
    prefixes = [*PREFIXES, sys.prefix, sys.base_prefix]
    parts = [os.path.join(prefix, part) for prefix in prefixes for part in PARTS]  # noqa: PTH118
    packages = [path for path in sys.path if Path(path).name in PACKAGE_FOLDERS]
    links = [sys.executable]  # those that it goes through, and the executable
    while Path(links[-1]).is_symlink():
        links.append(os.path.join(Path(links[-1]).parent, Path(links[-1]).readlink()))  # noqa: PTH118
    interpreter = [*parts, sysconfig.get_path("stdlib"), *links]
    paths = [os.path.abspath(path) for path in (*SYSTEM, *interpreter, *packages)]  # noqa: PTH100 - keeps links
    existing = [path for path in dict.fromkeys(paths) if os.path.exists(path) and path != "/"]  # noqa: PTH110 - Path raises
    folders = {path for path in existing if not Path(path).is_symlink()}
    # others are in one
    return [path for path in existing if folders.isdisjoint(map(str, Path(path).parents))]
