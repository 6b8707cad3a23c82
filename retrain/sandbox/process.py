"""A process with limits; on Linux with a filter of system calls, and only its own files. Works everywhere."""

from __future__ import annotations

import sys

from retrain.sandbox import Sandbox
from retrain.sandbox.interpreter import readable_paths

WEAKNESS = "programs run as this user beside the run: some can disturb it, though none sees an answer"


def open_sandbox() -> Sandbox:
    """Return this interpreter."""
    return Sandbox("process", [sys.executable], readable=readable_paths(), weakness=WEAKNESS)
