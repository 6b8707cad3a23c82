"""Whether bubblewrap can work on this machine; where CI runs, it must."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def _are_allowed() -> bool:
    command = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    return sys.platform == "linux" and subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0


BUBBLEWRAP = pytest.param(
    "bubblewrap",
    marks=pytest.mark.skipif(
        "CI" not in os.environ and not _are_allowed(), reason="this machine refuses user namespaces"
    ),
)
