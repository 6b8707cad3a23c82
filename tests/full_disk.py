"""A disk that is full for files beyond a size: the kernel refuses to write more of them, with EFBIG."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Refuse larger files of this process while entered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_off, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # what is cut off would be imported later
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = is_off
