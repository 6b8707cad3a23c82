"""One thread for the arithmetic of each process: workers share the cores.

The products of small policies are slower on several threads, which mostly wait for each other.
"""

from __future__ import annotations

import os

VARIABLE = "OMP_NUM_THREADS"  # OpenBLAS, MKL and PyTorch read it when they are first imported


def use_one_thread() -> None:
    """Let this process and those that it starts compute on one thread, unless the user set another number.

    What was imported before keeps its threads.
    """
    os.environ.setdefault(VARIABLE, "1")
