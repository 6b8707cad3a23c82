"""Hides this process from others of the same user (Linux): its memory, environment and descriptors.

Programs that a policy wrote run as the user of the run, so processes of ours that hold keys or answers
hide before they import anything else: `python -m retrain.base.hide_process MODULE ...` runs a module like
this.
"""

from __future__ import annotations

import ctypes
import sys

PR_SET_DUMPABLE = 4


def hide() -> None:
    """Hide this process, though not from root; a program that it executes is visible again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)


if __name__ == "__main__":
    hide()
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
