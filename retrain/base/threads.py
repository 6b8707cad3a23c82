"""How a process of ours computes: on one thread, since workers share the cores, and without pauses.

The products of small policies are slower on several threads, which mostly wait for each other.
"""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager, nullcontext

VARIABLE = "OMP_NUM_THREADS"  # OpenBLAS, MKL and PyTorch read it when they are first imported
# between two searches for garbage: the some 50,000 objects of our own imports all stay
ALLOCATIONS = 100_000


def use_one_thread() -> None:
    """Let this process and those that it starts compute on one thread, unless the user set another number.

    What was imported before keeps its threads: see `limited`.
    """
    os.environ.setdefault(VARIABLE, "1")


def limited() -> AbstractContextManager[object]:
    """Hold what this process imported before to as many threads as what it imports later, for a while."""
    from threadpoolctl import threadpool_limits  # not at the top: only a run inside this process needs it

    use_one_thread()
    threads = os.environ[VARIABLE].partition(",")[0]  # OpenMP takes a number for each nested level
    return threadpool_limits(int(threads)) if threads.isdigit() and int(threads) else nullcontext()


def search_rarely() -> None:
    """Search for garbage seldom enough that imports cost no search: with PyTorch, a fifth of their time."""
    gc.set_threshold(ALLOCATIONS)
