"""Free ports in a row, which two clusters that start at once do not both choose."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20001, 32000  # above those of Ray's workers, below those that the kernel gives out
ROW = 10  # ports between two starts
CLAIMED: list[socket.socket] = []  # until this process ends


def free_ports(count: int) -> list[int]:
    """Find ports in a row that nobody listens on.

    Raises:
        RuntimeError: there are none.
    """
    starts = list(range(FIRST, LAST - ROW, ROW))
    random.shuffle(starts)
    for first in starts:
        ports = list(range(first, first + count))
        if _claim(first) and all(_is_free(port) for port in ports):
            return ports
    raise RuntimeError(f"no {count} free ports in a row")


def _claim(first: int) -> bool:
    """Take the port for UDP, which no cluster uses: one that starts now finds the same ports free."""
    claim = socket.socket(type=socket.SOCK_DGRAM)
    try:
        claim.bind(("127.0.0.1", first))
    except OSError:
        claim.close()
        return False
    CLAIMED.append(claim)
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
