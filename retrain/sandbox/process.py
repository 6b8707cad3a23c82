"""A process with limits; on Linux with a filter of system calls, and only its own files. Works everywhere."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from retrain.sandbox import Sandbox

WEAKNESS = "programs run as this user beside the run: some can disturb it, though none sees an answer"
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/localtime")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def open_sandbox() -> Sandbox:
    """Return this interpreter."""
    return Sandbox("process", [sys.executable], readable=readable_paths(), weakness=WEAKNESS)


def readable_paths() -> list[str]:
    """Return reachable paths, each once; never the directory of a campaign, whose data holds the answers."""
    packages = [path for path in sys.path if Path(path).name in PACKAGE_FOLDERS]
    interpreter = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *_links(sys.executable)]
    paths = [os.path.abspath(path) for path in (*SYSTEM, *interpreter, *packages)]  # noqa: PTH100 - keeps links
    return [path for path in dict.fromkeys(paths) if os.path.exists(path) and path != "/"]  # noqa: PTH110 - Path raises


def _links(path: str) -> list[str]:
    """Return the directories of the links that an executable goes through."""
    found = []
    while Path(path).is_symlink():
        found.append(str(Path(path).parent))
        path = os.path.join(Path(path).parent, Path(path).readlink())  # noqa: PTH118
    return found
